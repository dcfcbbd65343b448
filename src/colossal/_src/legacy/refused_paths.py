"""Names of the older documentation that have no counterpart, and what to use instead."""

from collections.abc import Mapping

WITHOUT_COUNTERPART: Mapping[str, str] = {
    # ---------------------------------------------------------------- pipelines
    "colossal.communication.ring": "Use colossal.nn.attention.ring_attention, whose messages go around by themselves.",
    "colossal.communication.ring_forward": "Use colossal.nn.attention.ring_attention, whose messages go around by "
    "themselves.",
    # ---------------------------------------------------------------- utils
    "colossal.utils.rank_recorder": "Use torch.profiler.profile on each rank, or colossal.comm.CommCounter.",
    # ---------------------------------------------------------------- experts
    "colossal.moe._operation.AllGather": "Use colossal.comm.gather.",
    "colossal.moe._operation.ReduceScatter": "Use colossal.comm.reduce_scatter.",
    "colossal.moe._operation.AllToAll": "Use colossal.comm.all_to_all.",
    "colossal.moe._operation.HierarchicalAllToAll": "Use colossal.nn.moe.dispatch.",
    "colossal.moe._operation.AllToAllUneven": "Use colossal.nn.moe.dispatch, or all_to_all_uneven of the same module.",
    "colossal.moe._operation.MoeDispatch": "Use colossal.nn.moe.dispatch, which sends tokens to their experts.",
    "colossal.moe._operation.MoeCombine": "Use colossal.nn.moe.combine, which returns them.",
    # ---------------------------------------------------------------- kernels and optimizers
    "colossal.kernel.kernel_loader.KernelLoader": "A kernel of a program's own needs no registry: torch.library has "
    "torch.library.custom_op.",
    "colossal.kernel.kernel_loader.MoeLoader": "torch.compile fuses what routes tokens.",
    "colossal.kernel.kernel_loader.ScaledMaskedSoftmaxLoader": "Use torch.nn.functional.softmax, "
    "or scaled_dot_product_attention for the whole.",
    "colossal.kernel.kernel_loader.ScaledUpperTriangleMaskedSoftmaxLoader": "Use torch.nn.functional.softmax, "
    "or scaled_dot_product_attention for the whole.",
    "colossal.kernel.kernel_loader.FlashAttentionWithCustomMaskLoader": "Use "
    "torch.nn.functional.scaled_dot_product_attention.",
    "colossal.nn.optimizer.nvme_optimizer": "CPUAdam and HybridAdam of colossal.nn.optimizer keep states on disk: pass "
    "nvme_offload_fraction and nvme_offload_dir.",
    "colossal.nn.optimizer.NVMeOptimizer": "CPUAdam and HybridAdam of colossal.nn.optimizer keep states on disk: pass "
    "nvme_offload_fraction and nvme_offload_dir.",
    # ---------------------------------------------------------------- modules of programs, which no page names
    "colossal.shardformer.policies": "Leave the policy out: colossal.shardformer.ShardFormer(...).optimize(model) and "
    "HybridParallelPlugin find the table of a family by themselves.",
    "colossal.shardformer.modeling": "No forward method is replaced: HybridParallelPlugin of colossal.booster.plugin "
    "runs the models of transformers as they are.",
    "colossal.nn.parallel.ColoDDP": "Use colossal.booster.plugin.TorchDDPPlugin, or colossal.zero.gemini.GeminiDDP for "
    "a model of ColoTensors.",
    "colossal.nn.parallel.data_parallel.ColoDDP": "Use colossal.booster.plugin.TorchDDPPlugin, or "
    "colossal.zero.gemini.GeminiDDP for a model of ColoTensors.",
    "colossal.nn.parallel.layers": "Use torch.nn.EmbeddingBag for a cached one; the specs of "
    "colossal.legacy.tensor.ColoParameter say how layers are sharded, without a module for each.",
    "colossal.nn._ops": "ColoTensors of colossal.legacy.tensor compute by the operators of torch.nn.functional.",
    "colossal.tensor.DistSpecManager": "Use colossal.legacy.tensor.ColoTensor.redistribute.",
    "colossal.tensor.dist_spec_mgr": "Use colossal.legacy.tensor.ColoTensor.redistribute.",
    "colossal.pipeline.rpc": "Use HybridParallelPlugin of colossal.booster.plugin, with pp_size and a pp_style.",
    "colossal.pipeline.middleware": "Use HybridParallelPlugin of colossal.booster.plugin, which partitions a model.",
    "colossal.pipeline.pipeline_process_group": "Use the pp axis of colossal.cluster.ParallelMesh.",
    "colossal.engine.paramhooks": "Use torch.Tensor.register_post_accumulate_grad_hook.",
    "colossal.engine.ophooks.register_ophooks_recursively": "Pass ophooks to colossal.legacy.initialize, or call "
    "Engine.add_hook.",
    "colossal.engine.gradient_accumulation": "Set gradient_accumulation=n in the config of colossal.legacy.initialize.",
    "colossal.utils.gradient_accumulation": "Set gradient_accumulation=n in the config of colossal.legacy.initialize.",
    "colossal.utils.profiler": "Use torch.profiler.profile, or colossal.comm.CommCounter for what is sent.",
    "colossal.utils.memory_tracer": "Use colossal.legacy.utils.report_memory_usage, or torch.profiler.profile.",
    "colossal.builder.build_from_config": "Call the class that get_module of a registry of colossal.legacy.registry "
    "returns.",
    "colossal.builder.build_from_registry": "Call the class that get_module of a registry of "
    "colossal.legacy.registry returns.",
    "colossal.builder.build_model": "Call the class that MODELS.get_module of colossal.legacy.registry returns.",
    "colossal.builder.build_gradient_handler": "Name it in gradient_handler of the config; "
    "colossal.legacy.initialize builds it.",
    "colossal.global_variables.tensor_parallel_env": "Ask colossal.legacy.context.global_context for the mode, "
    "config.parallel.tensor.mode, and its groups.",
    "colossal.amp.naive_amp.FP16Optimizer": "colossal.legacy.amp.convert_to_naive_amp returns the model and the "
    "optimizer.",
    "colossal.amp.naive_amp.NaiveAMPModel": "colossal.legacy.amp.convert_to_naive_amp returns the model and the "
    "optimizer.",
    "colossal.amp.naive_amp.NaiveAMPOptimizer": "colossal.legacy.amp.convert_to_naive_amp returns the model and the "
    "optimizer.",
    "colossal.amp.torch_amp.TorchAMPLoss": "colossal.legacy.amp.convert_to_torch_amp returns the model, the optimizer "
    "and the criterion.",
    "colossal.amp.torch_amp.TorchAMPModel": "colossal.legacy.amp.convert_to_torch_amp returns the model, the "
    "optimizer and the criterion.",
    "colossal.amp.torch_amp.TorchAMPOptimizer": "colossal.legacy.amp.convert_to_torch_amp returns the model, the "
    "optimizer and the criterion.",
    "colossal.zero.convert_to_zero": "Use colossal.legacy.zero.convert_to_zero_v2.",
    "colossal.zero.sharded_param": "Parameters are sharded by colossal.legacy.zero.ShardedModelV2.",
    "colossal.zero.init_ctx.no_shard_zero_context": "Build what stays unsharded outside of "
    "colossal.legacy.zero.ZeroInitContext.",
    "colossal.zero.init_ctx.no_shard_zero_decrator": "Build what stays unsharded outside of "
    "colossal.legacy.zero.ZeroInitContext.",
    "colossal.gemini.update_ddp": "Use colossal.zero.gemini.GeminiDDP.",
    "colossal.gemini.placement_policy": "Pass placement_policy to colossal.zero.gemini.GeminiDDP.",
    "colossal.gemini.tensor_placement_policy": "Pass placement_policy to colossal.zero.gemini.GeminiDDP.",
    "colossal.kernel.LayerNorm": "Use torch.nn.LayerNorm, which is one kernel.",
    "colossal.kernel.FusedScaleMaskSoftmax": "Use torch.nn.functional.scaled_dot_product_attention for the whole.",
    "colossal.kernel.MultiHeadAttention": "Use torch.nn.functional.scaled_dot_product_attention.",
    "colossal.kernel.cuda_native": "Use torch.nn.LayerNorm and torch.nn.functional.scaled_dot_product_attention, "
    "which are one kernel each.",
    "colossal.kernel.op_builder": "Kernels are built where they are first used: colossal.nn.optimizer.CPUAdam needs "
    "no call.",
    # ---------------------------------------------------------------- deep paths of later releases
    "colossal.checkpoint_io.utils.save_state_dict": "Use Booster.save_model of colossal.booster.",
    "colossal.checkpoint_io.utils.load_shard_state_dict": "Use Booster.load_model of colossal.booster.",
    "colossal.checkpoint_io.utils.search_tp_partition_dim": "Ask colossal.tensor.placement_of(parameter) which "
    "regions a rank holds.",
    "colossal.checkpoint_io.utils.calculate_tensor_size": "Use torch.Tensor.nbytes.",
    "colossal.booster.plugin.low_level_zero_plugin.LowLevelZeroCheckpointIO": "All plugins have one: "
    "Booster.checkpoint_io.",
    "colossal.booster.plugin.gemini_plugin.GeminiCheckpointIO": "All plugins have one: Booster.checkpoint_io.",
    "colossal.booster.plugin.torch_ddp_plugin.TorchDDPCheckpointIO": "All plugins have one: Booster.checkpoint_io.",
    "colossal.booster.plugin.torch_fsdp_plugin.TorchFSDPCheckpointIO": "All plugins have one: Booster.checkpoint_io.",
    "colossal.interface.model.PeftUnwrapMixin": "Call Booster.enable_lora, and Booster.save_lora_as_pretrained to "
    "save the adapter.",
    "colossal.kernel.jit.option": "Nothing is to be set; torch.compile fuses operators.",
    "colossal.kernel.jit.bias_gelu": "torch.compile fuses a bias with what follows.",
    "colossal.kernel.triton": "colossal serve and colossal.inference choose their kernels; torch.library.custom_op "
    "takes one of your own.",
    "colossal.kernel.extensions": "Kernels are built where they are first used: colossal.nn.optimizer.CPUAdam "
    "needs no call.",
    "colossal.lazy.lazy_init._MyTensor": "Use colossal.lazy.LazyTensor.",
    "colossal.lazy.pretrained": "Call from_pretrained of transformers inside of colossal.lazy.LazyInitContext.",
    "colossal.lazy.construction": "Use colossal.lazy.LazyInitContext.",
    "colossal.moe.operators": "Use colossal.nn.moe.dispatch and colossal.nn.moe.combine.",
    "colossal.nn.layer.parallel_1d._operation": "Use colossal.tensor.relayout between layouts, or the layers of "
    "colossal.nn, which have their gradients.",
    "colossal.nn.layer.parallel_2d._operation": "Use colossal.tensor.relayout between layouts, or the layers of "
    "colossal.nn, which have their gradients.",
    "colossal.nn.layer.parallel_2p5d._operation": "Use colossal.tensor.relayout between layouts, or the layers of "
    "colossal.nn, which have their gradients.",
    "colossal.nn.layer.parallel_3d._operation": "Use colossal.tensor.relayout between layouts, or the layers of "
    "colossal.nn, which have their gradients.",
    "colossal.nn.layer.parallel_2d._utils": "Ask colossal.legacy.context.global_context, or the axes of "
    "colossal.cluster.ParallelMesh.",
    "colossal.nn.layer.parallel_2p5d._utils": "Ask colossal.legacy.context.global_context, or the axes of "
    "colossal.cluster.ParallelMesh.",
    "colossal.nn.layer.parallel_3d._utils": "Ask colossal.legacy.context.global_context, or the axes of "
    "colossal.cluster.ParallelMesh.",
    "colossal.nn.layer.utils": "The layers of colossal.legacy.nn check that sizes divide.",
    "colossal.nn.parallel.reducer": "Use colossal.booster.plugin.TorchDDPPlugin, which reduces in buckets.",
    "colossal.pipeline.p2p.create_send_metadata": "colossal.pipeline.p2p.PipelineP2PCommunication sends shapes "
    "by itself.",
    "colossal.pipeline.schedule._utils": "HybridParallelPlugin of colossal.booster.plugin splits batches into "
    "micro-batches.",
    "colossal.quantization.fp8_hook": "Pass mixed_precision='fp8' to colossal.booster.Booster.",
    "colossal.quantization.utils": "Look at torch.Tensor.dtype.",
    "colossal.shardformer.layer._operation.linear_with_async_comm": "Use colossal.tensor.relayout between layouts, "
    "or the layers of colossal.nn, which have their gradients.",
    "colossal.shardformer.layer.attn.get_pad_info": "ColoAttention of colossal.legacy.shardformer takes the "
    "mask of the tokens.",
    "colossal.shardformer.layer.utils.is_share_sp_tp": "In the modes split_gather and ring, "
    "HybridParallelPlugin of colossal.booster.plugin uses the ranks of tp.",
    "colossal.shardformer.shard.utils": "ShardFormer of colossal.shardformer builds the layers of a rank only.",
    "colossal.shardformer.shard.grad_ckpt_config": "Call gradient_checkpointing_enable() of the model before "
    "Booster.boost of colossal.booster.",
    "colossal.tensor.d_tensor.utils": "Use colossal.tensor.plan_relayout, which returns steps and bytes.",
    "colossal.tensor.op_wrapper": "A ColoTensor computes by the operators of torch; subclass torch.Tensor for "
    "operators of your own.",
    "colossal.tensor.p_tensor": "Use colossal.tensor.d_tensor.distribute_tensor.",
    "colossal.tensor.utils": "Use colossal.tensor.plan_relayout for paths between layouts, and "
    "colossal.tensor.relayout to convert.",
    "colossal.utils.checkpoint.utils": "Use colossal.legacy.utils.save_checkpoint, which gathers shards by itself.",
    "colossal.utils.model.utils": "Use colossal.lazy.LazyInitContext.",
    "colossal.utils.moe": "HybridParallelPlugin of colossal.booster.plugin with ep_size makes the copies of experts "
    "equal.",
    "colossal.utils.commons": "LowLevelZeroPlugin of colossal.booster.plugin forms its buckets; "
    "reduce_bucket_size_in_m is their size.",
    "colossal.zero.gemini.chunk.chunk": "A chunk belongs to GeminiDDP of colossal.zero.gemini; chunk_config_dict "
    "sets the sizes.",
    "colossal.zero.gemini.chunk.utils": "GeminiDDP of colossal.zero.gemini makes its chunks; chunk_config_dict sets "
    "the sizes.",
    "colossal.zero.gemini.gemini_hook": "GeminiDDP of colossal.zero.gemini moves its chunks by itself.",
    "colossal.zero.gemini.memory_tracer.memory_stats": "GeminiDDP of colossal.zero.gemini "
    "measures the first step by itself.",
    "colossal.zero.gemini.memory_tracer.runtime_mem_tracer": "GeminiDDP of colossal.zero.gemini "
    "measures the first step by itself.",
    "colossal.zero.gemini.memory_tracer.chunk_memstats_collector": "GeminiDDP of colossal.zero.gemini "
    "measures the first step by itself.",
    "colossal.zero.gemini.memory_tracer.OrderedParamGenerator": "GeminiDDP of colossal.zero.gemini "
    "measures the first step by itself.",
    "colossal.zero.gemini.placement_policy": "Pass placement_policy to colossal.zero.gemini.GeminiDDP.",
    "colossal.zero.low_level.bookkeeping": "LowLevelZeroPlugin of colossal.booster.plugin keeps gradients and "
    "buckets by itself.",
    "colossal.zero.low_level._utils": "OptimizerWrapper.clip_grad_by_norm of colossal.interface returns the "
    "norm over all ranks.",
    "colossal.zero.sharded_model.reduce_scatter": "Use LowLevelZeroPlugin(stage=2) of colossal.booster.plugin.",
    "colossal.zero.sharded_model.utils": "Use Booster.save_model and load_model of colossal.booster to copy a model.",
    "colossal.zero.sharded_optim.bookkeeping": "LowLevelZeroPlugin of colossal.booster.plugin keeps gradients and "
    "buckets by itself.",
    "colossal.zero.sharded_optim._utils": "OptimizerWrapper.clip_grad_by_norm of colossal.interface returns the "
    "norm over all ranks.",
    "colossal.zero.shard_utils.tensor_utils": "Use Tensor.to; GeminiPlugin of colossal.booster.plugin moves what it "
    "offloads.",
    "colossal.zero.utils": "GeminiDDP of colossal.zero.gemini gathers parameters by itself.",
    "colossal.gemini.ophooks": "Use torch.nn.Module.register_forward_pre_hook, or BaseOpHook of "
    "colossal.legacy.engine.",
    "colossal.gemini.stateful_tensor": "GeminiDDP of colossal.zero.gemini moves tensors between memories by itself.",
    "colossal.gemini.tensor_utils": "Use torch.Tensor.to and torch.Tensor.nbytes.",
    "colossal.gemini.paramhooks": "Use torch.Tensor.register_post_accumulate_grad_hook.",
    "colossal.gemini.memory_tracer": "GeminiDDP of colossal.zero.gemini measures the first step by itself.",
    "colossal.engine.gradient_handler.utils": "Use torch.distributed.all_reduce in the handler.",
    "colossal.builder.builder": "Call the class that get_module of a registry of colossal.legacy.registry returns.",
    "colossal.cli.launcher": "Call colossal run, or torchrun with colossal.launch_from_torch in the program.",
    "colossal.cli.benchmark": "Use torch.profiler.profile, or the programs of benchmarks/ in the repository.",
    "colossal.context.process_group_initializer.initializer_data": "Ask colossal.legacy.context.global_context for the "
    "groups; derive from ProcessGroupInitializer for one of your own.",
    "colossal.context.process_group_initializer.initializer_1d": "Ask colossal.legacy.context.global_context for the "
    "groups; derive from ProcessGroupInitializer for one of your own.",
    "colossal.context.process_group_initializer.initializer_2d": "Ask colossal.legacy.context.global_context for the "
    "groups; derive from ProcessGroupInitializer for one of your own.",
    "colossal.context.random.seed_manager": "Use the functions of colossal.legacy.context.random.",
    "colossal.shardformer.layer.qkv_fused_linear.split_fused_qkv_in_gpt2_style": "ShardFormer of colossal.shardformer "
    "shards fused projections by heads itself.",
    "colossal.tensor.colo_tensor._convert_output": "Use colossal.legacy.tensor.ColoTensor.from_torch_tensor.",
    "colossal.moe.utils.get_moe_epsize_param_dict": "Ask colossal.tensor.placement_of(parameter) which ranks hold it.",
    "colossal.zero.gemini.gemini_optimizer.GeminiFP16MixedPrecisionMixin": "GeminiOptimizer of colossal.zero.gemini "
    "scales losses by itself.",
    "colossal.zero.gemini.chunk.TensorState": "A chunk belongs to GeminiDDP of colossal.zero.gemini.",
    "colossal.moe.set_moe_args": "Pass the arguments to the layer: colossal.nn.moe.MixtureOfExperts, or "
    "colossal.legacy.moe.SparseMLP.",
    "colossal.moe.utils.set_moe_args": "Pass the arguments to the layer: colossal.nn.moe.MixtureOfExperts, or "
    "colossal.legacy.moe.SparseMLP.",
    # ---------------------------------------------------------------- inference and automatic parallelism
    "colossal.inference.config.GenerationConfig": "InferenceEngine.generate of colossal.inference takes that of "
    "transformers, or colossal.inference.SamplingParams.",
    "colossal.inference.hybridengine": "Use colossal.inference.InferenceEngine.",
    "colossal.inference.tensor_parallel": "Pass tp_size in colossal.inference.InferenceConfig.",
    "colossal.inference.core": "Use colossal.inference.InferenceEngine, which schedules its requests by itself.",
    "colossal.inference.kv_cache": "Set the sizes of the cache in colossal.inference.InferenceConfig.",
    "colossal.inference.modeling": "colossal.inference.InferenceEngine runs the models of transformers as they are.",
    "colossal.inference.struct": "InferenceEngine.generate of colossal.inference returns "
    "colossal.inference.RequestOutput.",
    "colossal.auto_parallel": "No solver chooses a strategy: ask colossal.booster.plugin.plan_step what a step of a "
    "plugin holds and sends.",
    "colossal.autochunk": "Use torch.utils.checkpoint.checkpoint, or gradient_checkpointing_enable() of the model.",
    "colossal.fx.ColoTracer": "Use torch.fx.symbolic_trace, or torch.export.export.",
    "colossal.fx.symbolic_trace": "Use torch.fx.symbolic_trace, or torch.export.export.",
    "colossal.device.alpa_dp": "Pass num_layers_per_stage to colossal.booster.plugin.HybridParallelPlugin.",
}
"""The documented module or name, then what to use: a sentence."""
