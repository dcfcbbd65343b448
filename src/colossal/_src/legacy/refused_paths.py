"""Names of the older documentation that have no counterpart, and what to use instead."""

from collections.abc import Mapping

WITHOUT_COUNTERPART: Mapping[str, str] = {
    # ---------------------------------------------------------------- pipelines
    "colossal.pipeline.weight_grad_store": "Use colossal.pipeline.WeightGrads, one for each pass.",
    "colossal.communication.ring": "Use colossal.nn.attention.ring_attention, whose messages go around by themselves.",
    "colossal.communication.ring_forward": "Use colossal.nn.attention.ring_attention, whose messages go around by "
    "themselves.",
    # ---------------------------------------------------------------- layers
    "colossal.shardformer.layer.RingAttention": "Use colossal.nn.attention.ring_attention, or HybridParallelPlugin of "
    "colossal.booster.plugin with sequence_parallelism_mode='ring_attn', which shards the batch too.",
    "colossal.shardformer.layer.utils.SeqParallelUtils": "HybridParallelPlugin of colossal.booster.plugin sums the "
    "gradients of what computes shards of sequences.",
    "colossal.shardformer.layer.utils.split_batch_zigzag": "HybridParallelPlugin of colossal.booster.plugin with "
    "sequence_parallelism_mode='ring_attn' shards the batch; colossal.nn.attention.SequenceSharding does it by itself.",
    "colossal.nn.layer.MixedFusedLayerNorm": "Use torch.nn.LayerNorm, which is one kernel.",
    "colossal.nn.layer.scaled_softmax": "Use torch.nn.functional.scaled_dot_product_attention for the whole.",
    "colossal.nn.layer.layernorm": "Use torch.nn.LayerNorm, which is one kernel.",
    # ---------------------------------------------------------------- tensors
    "colossal.tensor.param_op_hook": "Use torch.nn.Module.register_forward_pre_hook for what uses parameters, and "
    "torch.Tensor.register_post_accumulate_grad_hook for their gradients.",
    "colossal.tensor.d_tensor.layout_converter.set_layout_converting_options": "Paths are the cheapest of all; "
    "colossal.tensor.plan_relayout returns one.",
    "colossal.tensor.shape_consistency.to_global": "Use colossal.tensor.d_tensor.to_global, or "
    "colossal.tensor.unshard.",
    # ---------------------------------------------------------------- utils
    "colossal.utils.rank_recorder": "Use torch.profiler.profile on each rank, or colossal.comm.CommCounter.",
    "colossal.utils.safetensors": "Use Booster.save_model(..., use_async=True) of colossal.booster, which writes "
    "in the background.",
    # ---------------------------------------------------------------- collectives in 8 bits
    "colossal.quantization.fp8.all_gather_fp8": "Pass fp8_communication=True to a plugin of colossal.booster.plugin.",
    "colossal.quantization.fp8.reduce_scatter_fp8": "Pass fp8_communication=True to a plugin of "
    "colossal.booster.plugin.",
    "colossal.quantization.fp8.all_to_all_fp8": "Use colossal.comm.all_to_all, in the dtype of the tensor.",
    "colossal.quantization.fp8.all_to_all_single_fp8": "Use colossal.comm.all_to_all, in the dtype of the tensor.",
    # ---------------------------------------------------------------- experts
    "colossal.moe._operation": "Use colossal.nn.moe.dispatch and colossal.nn.moe.combine, which send tokens to their "
    "experts and back; gradients need no scaling.",
    # ---------------------------------------------------------------- kernels and optimizers
    "colossal.kernel.kernel_loader.KernelLoader": "A kernel of a program's own needs no registry: torch.library has "
    "torch.library.custom_op.",
    "colossal.kernel.kernel_loader.LayerNormLoader": "Use torch.nn.LayerNorm, which is one kernel.",
    "colossal.kernel.kernel_loader.MoeLoader": "torch.compile fuses what routes tokens.",
    "colossal.kernel.kernel_loader.ScaledMaskedSoftmaxLoader": "Use torch.nn.functional.softmax, "
    "or scaled_dot_product_attention for the whole.",
    "colossal.kernel.kernel_loader.ScaledUpperTriangleMaskedSoftmaxLoader": "Use torch.nn.functional.softmax, "
    "or scaled_dot_product_attention for the whole.",
    "colossal.kernel.kernel_loader.FlashAttentionLoader": "Use torch.nn.functional.scaled_dot_product_attention.",
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
}
"""The documented module or name, then what to use: a sentence."""
