"""The rows: for each older module, the modules of today and the names that it takes from them.

A name is written as it is, as ``older=newer`` where it has another name today, or as ``*`` for every public name of the
target. One section for each part of the older API; rows of modules of today hold only what they do not have themselves.
"""

from collections.abc import Mapping

_CONTEXT = "colossal.legacy.context"
_LAYERS = "colossal._src.legacy.nn"
_TENSORS = "colossal._src.legacy.tensor"
_UTILS = "colossal.legacy.utils"

PATHS: Mapping[str, Mapping[str, str]] = {
    # ---------------------------------------------------------------- start and context
    "colossal.core": {"colossal.legacy.context": "global_context", "colossal.legacy.moe": "moe_context=MOE_CONTEXT"},
    "colossal.context": {
        "colossal.cluster": "Config",
        "colossal.errors": "ConfigException=ConfigError",
        _CONTEXT: "*",
        f"{_CONTEXT}.random": "*",
    },
    "colossal.context.config": {"colossal.cluster": "Config", "colossal.errors": "ConfigException=ConfigError"},
    "colossal.context.dist_group_initializer": {_CONTEXT: "ProcessGroupInitializer"},
    "colossal.context.parallel_context": {_CONTEXT: "ParallelContext global_context"},
    "colossal.context.parallel_mode": {_CONTEXT: "ParallelMode"},
    "colossal.context.process_group_initializer": {_CONTEXT: "ProcessGroupInitializer"},
    "colossal.context.random": {f"{_CONTEXT}.random": "*"},
    "colossal.context.singleton_meta": {_CONTEXT: "SingletonMeta"},
    "colossal.context.moe_context": {"colossal.legacy.moe": "MOE_CONTEXT"},
    "colossal.global_variables": {"colossal.legacy.moe": "moe_env=MOE_CONTEXT"},
    "colossal.constants": {_CONTEXT: "INITIALIZER_MAPPING"},
    "colossal.initialize": {
        "colossal": "get_default_parser launch launch_from_openmpi launch_from_slurm launch_from_torch",
        "colossal.legacy": "initialize",
    },
    "colossal.registry": {"colossal.legacy.registry": "*"},
    "colossal.registry.registry": {"colossal.legacy.registry": "Registry"},
    # ---------------------------------------------------------------- engine and trainer
    "colossal": {"colossal.legacy": "initialize"},
    "colossal.engine": {"colossal.legacy.engine": "*"},
    "colossal.engine.gradient_handler": {
        "colossal.legacy.engine": "BaseGradientHandler DataParallelGradientHandler MoeGradientHandler "
        "PipelineSharedModuleGradientHandler SequenceParallelGradientHandler ZeROGradientHandler"
    },
    "colossal.engine.ophooks": {"colossal.legacy.engine": "BaseOpHook"},
    "colossal.engine.schedule": {
        "colossal.legacy.engine": "BaseSchedule InterleavedPipelineSchedule NonPipelineSchedule PipelineSchedule"
    },
    "colossal.trainer": {"colossal.legacy.trainer": "Trainer"},
    "colossal.trainer.hooks": {"colossal.legacy.trainer": "*"},
    # ---------------------------------------------------------------- communication
    "colossal.communication": {"colossal.legacy.communication": "*"},
    "colossal.communication.collective": {
        "colossal.legacy.communication": "all_gather all_reduce broadcast reduce reduce_scatter"
    },
    "colossal.communication.p2p": {
        "colossal.legacy.communication": "recv_backward recv_forward send_backward send_backward_recv_forward "
        "send_forward send_forward_recv_backward"
    },
    "colossal.communication.utils": {"colossal.legacy.communication": "recv_obj_meta send_obj_meta"},
    # ---------------------------------------------------------------- utils
    "colossal.utils": {_UTILS: "*", "colossal.legacy.testing": "free_port"},
    "colossal.utils.activation_checkpoint": {_UTILS: "checkpoint"},
    "colossal.utils.checkpointing": {
        _UTILS: "load_checkpoint save_checkpoint",
        "colossal._src.legacy.utils.checkpoint_file": "gather_pipeline_parallel_state_dict",
    },
    "colossal.utils.common": {
        _UTILS: "clip_grad_norm=clip_grad_norm_fp32 "
        "clip_grad_norm_fp32 conditional_context count_zeros_fp32 disposable "
        "ensure_path_exists free_storage get_current_device is_ddp_ignored "
        "is_dp_rank_0 is_no_pp_or_last_stage is_tp_rank_0 is_using_ddp "
        "is_using_pp is_using_sequence multi_tensor_applier print_rank_0 "
        "set_seed switch_virtual_pipeline_parallel_rank sync_model_param"
    },
    "colossal.utils.cuda": {_UTILS: "empty_cache get_current_device set_to_cuda synchronize"},
    "colossal.utils.device": {_UTILS: "empty_cache get_current_device set_to_cuda synchronize"},
    "colossal.utils.data_sampler": {_UTILS: "DataParallelSampler get_dataloader"},
    "colossal.utils.data_sampler.data_parallel_sampler": {_UTILS: "DataParallelSampler get_dataloader"},
    "colossal.utils.memory": {
        _UTILS: "colo_device_memory_capacity colo_set_process_memory_fraction report_memory_usage"
    },
    "colossal.utils.multi_tensor_apply": {_UTILS: "MultiTensorApply multi_tensor_applier"},
    "colossal.utils.tensor_detector": {_UTILS: "TensorDetector"},
    "colossal.utils.timer": {_UTILS: "MultiTimer Timer"},
    # ---------------------------------------------------------------- amp and zero
    "colossal.amp": {"colossal.legacy.amp": "*"},
    "colossal.amp.amp_type": {"colossal.legacy.amp": "AMP_TYPE"},
    "colossal.amp.apex_amp": {"colossal.legacy.amp": "convert_to_apex_amp"},
    "colossal.amp.naive_amp": {
        "colossal.legacy.amp": "BF16MixedPrecisionMixin FP16MixedPrecisionMixin MixedPrecisionMixin "
        "MixedPrecisionOptimizer convert_to_naive_amp"
    },
    "colossal.amp.naive_amp.grad_scaler": {"colossal.amp.naive_amp": "ConstantGradScaler DynamicGradScaler"},
    "colossal.amp.naive_amp.mixed_precision_mixin": {
        "colossal.legacy.amp": "BF16MixedPrecisionMixin FP16MixedPrecisionMixin MixedPrecisionMixin"
    },
    "colossal.amp.naive_amp.mixed_precision_optimizer": {"colossal.legacy.amp": "MixedPrecisionOptimizer"},
    "colossal.amp.torch_amp": {"colossal.legacy.amp": "convert_to_torch_amp"},
    "colossal.booster.booster": {"colossal.booster": "Booster"},
    "colossal.booster.accelerator": {_UTILS: "Accelerator=DeviceBinding"},
    "colossal.accelerator": {
        "colossal.legacy.accelerator": "BaseAccelerator CpuAccelerator CudaAccelerator NpuAccelerator"
    },
    "colossal.accelerator.api": {
        "colossal.legacy.accelerator": "get_accelerator set_accelerator",
        "colossal.accelerator": "auto_set_accelerator",
    },
    "colossal.accelerator.base_accelerator": {"colossal.legacy.accelerator": "BaseAccelerator"},
    "colossal.accelerator.cpu_accelerator": {"colossal.legacy.accelerator": "CpuAccelerator"},
    "colossal.accelerator.cuda_accelerator": {"colossal.legacy.accelerator": "CudaAccelerator"},
    "colossal.accelerator.npu_accelerator": {"colossal.legacy.accelerator": "NpuAccelerator"},
    "colossal.booster.plugin": {"colossal.legacy.booster": "MoeHybridParallelPlugin"},
    "colossal.booster.plugin.moe_hybrid_parallel_plugin": {"colossal.legacy.booster": "MoeHybridParallelPlugin"},
    "colossal.booster.plugin.dp_plugin_base": {"colossal.legacy.booster": "DPPluginBase"},
    "colossal.booster.plugin.pp_plugin_base": {"colossal.legacy.booster": "PipelinePluginBase"},
    "colossal.booster.plugin.gemini_plugin": {"colossal.booster.plugin": "GeminiPlugin"},
    "colossal.booster.plugin.hybrid_parallel_plugin": {
        "colossal.booster.plugin": "HybridParallelPlugin",
        "colossal.interface": "HybridParallelModule=ModelWrapper HybridParallelNaiveOptimizer=OptimizerWrapper "
        "HybridParallelAMPOptimizer=OptimizerWrapper HybridParallelZeroOptimizer=OptimizerWrapper",
        "colossal.legacy.interface": "get_param_info",
    },
    "colossal.booster.plugin.low_level_zero_plugin": {
        "colossal.booster.plugin": "LowLevelZeroPlugin",
        "colossal.interface": "LowLevelZeroModel=ModelWrapper",
    },
    "colossal.booster.plugin.torch_ddp_plugin": {
        "colossal.booster.plugin": "TorchDDPPlugin",
        "colossal.interface": "TorchDDPModel=ModelWrapper",
    },
    "colossal.booster.plugin.torch_fsdp_plugin": {
        "colossal.booster.plugin": "TorchFSDPPlugin",
        "colossal.interface": "TorchFSDPModel=ModelWrapper FSDPOptimizerWrapper=OptimizerWrapper",
    },
    "colossal.booster.plugin.plugin_base": {"colossal.legacy.booster": "Plugin=OlderPlugin"},
    "colossal.booster.mixed_precision.mixed_precision_base": {"colossal.booster.mixed_precision": "MixedPrecision"},
    "colossal.checkpoint_io": {"colossal.legacy.interface": "HybridParallelCheckpointIO MoECheckpointIO"},
    "colossal.checkpoint_io.moe_checkpoint": {"colossal.legacy.interface": "MoECheckpointIO"},
    "colossal.checkpoint_io.hybrid_parallel_checkpoint_io": {"colossal.legacy.interface": "HybridParallelCheckpointIO"},
    "colossal.interface": {"colossal.legacy.interface": "AMPModelMixin DistributedOptim"},
    "colossal.interface.model": {
        "colossal.interface": "ModelWrapper",
        "colossal.legacy.interface": "AMPModelMixin",
    },
    "colossal.interface.optimizer": {
        "colossal.interface": "OptimizerWrapper",
        "colossal.legacy.interface": "DistributedOptim",
    },
    "colossal.interface.pretrained": {"colossal.interface": "get_pretrained_path set_pretrained_path"},
    "colossal.shardformer.shard": {
        "colossal.legacy.interface": "ShardConfig=shard_config_of_groups",
        "colossal.shardformer": "ShardFormer",
    },
    "colossal.shardformer.shard.shard_config": {"colossal.legacy.interface": "ShardConfig=shard_config_of_groups"},
    "colossal.mixed_precision": {"colossal.booster.mixed_precision": "*"},
    "colossal.gemini": {"colossal.legacy.zero": "ChunkManager GeminiManager StatefulTensorMgr"},
    "colossal.gemini.chunk": {
        "colossal.legacy.zero": "ChunkManager init_chunk_manager "
        "search_chunk_configuration=search_configuration_of_chunks",
    },
    "colossal.gemini.gemini_mgr": {"colossal.legacy.zero": "GeminiManager"},
    "colossal.nn.metric": {"colossal.nn": "Accuracy", _LAYERS: "Accuracy1D Accuracy2D Accuracy2p5D Accuracy3D"},
    "colossal.nn.optimizer.adafactor": {"colossal.nn.optimizer": "Adafactor"},
    "colossal.nn.optimizer.came": {"colossal.nn.optimizer": "CAME"},
    "colossal.nn.optimizer.cpu_adam": {"colossal.nn.optimizer": "CPUAdam"},
    "colossal.nn.optimizer.distributed_adafactor": {"colossal.nn.optimizer": "DistributedAdaFactor"},
    "colossal.nn.optimizer.distributed_came": {"colossal.nn.optimizer": "DistributedCAME"},
    "colossal.nn.optimizer.distributed_lamb": {"colossal.nn.optimizer": "DistributedLamb"},
    "colossal.nn.optimizer.galore": {"colossal.nn.optimizer": "get_galore_param_groups"},
    "colossal.nn.optimizer.gemini_optimizer": {"colossal.zero.gemini": "GeminiAdamOptimizer"},
    "colossal.nn.optimizer.hybrid_adam": {"colossal.nn.optimizer": "HybridAdam"},
    "colossal.nn.optimizer.lamb": {"colossal.nn.optimizer": "Lamb"},
    "colossal.nn.parallel": {
        "colossal.legacy.zero": "ZeroDDP",
        "colossal.zero.gemini": "GeminiDDP",
        "colossal.zero": "zero_model_wrapper zero_optim_wrapper",
    },
    "colossal.nn.parallel.data_parallel": {"colossal.legacy.zero": "ZeroDDP"},
    "colossal.zero": {
        "colossal.legacy.zero": "ChunkManager GeminiManager LowLevelZeroOptimizer ShardedModelV2 ShardedOptimizerV2 "
        "ZeroDDP ZeroOptimizer convert_to_zero_v2 init_chunk_manager "
        "search_chunk_configuration=search_configuration_of_chunks",
        "colossal.legacy.tensor": "ColoInitContext",
        "colossal.zero.gemini": "GeminiAdamOptimizer GeminiDDP GeminiOptimizer get_static_torch_model",
    },
    "colossal.zero.gemini": {
        "colossal.legacy.zero": "ChunkManager GeminiManager StatefulTensorMgr ZeroDDP ZeroOptimizer init_chunk_manager"
    },
    "colossal.zero.gemini.chunk": {
        "colossal.legacy.zero": "ChunkManager init_chunk_manager "
        "search_chunk_configuration=search_configuration_of_chunks",
    },
    "colossal.zero.gemini.gemini_mgr": {"colossal.legacy.zero": "GeminiManager"},
    "colossal.zero.gemini.utils": {"colossal.zero.gemini": "get_static_torch_model"},
    "colossal.zero.gemini.memory_tracer": {"colossal.legacy.zero": "MemStatsCollector"},
    "colossal.zero.init_ctx": {"colossal.legacy.zero": "ZeroInitContext"},
    "colossal.zero.low_level": {"colossal.legacy.zero": "LowLevelZeroOptimizer"},
    "colossal.zero.shard_utils": {
        "colossal.legacy.zero": "BaseShardStrategy BucketTensorShardStrategy TensorShardStrategy"
    },
    "colossal.zero.sharded_model": {"colossal.legacy.zero": "ShardedModelV2"},
    "colossal.zero.sharded_optim": {"colossal.legacy.zero": "LowLevelZeroOptimizer ShardedOptimizerV2"},
    # ---------------------------------------------------------------- pipelines
    "colossal.builder": {"colossal.legacy.pipeline": "build_pipeline_model build_pipeline_model_from_cfg"},
    "colossal.builder.pipeline": {
        "colossal.legacy.pipeline": "build_pipeline_model build_pipeline_model_from_cfg partition_balanced "
        "partition_uniform"
    },
    "colossal.nn.layer.wrapper": {"colossal.legacy.pipeline": "PipelineSharedModuleWrapper"},
    "colossal.nn.model": {"colossal.legacy.pipeline": "ModelFromConfig"},
    "colossal.nn.model.model_from_config": {"colossal.legacy.pipeline": "ModelFromConfig"},
    "colossal.pipeline": {
        "colossal.legacy.pipeline": "InterleavedSchedule LayerSpec OneForwardOneBackwardSchedule PipelinableContext "
        "PipelineP2PCommunication PipelineSchedule=StageSchedule ZeroBubbleVPipeScheduler"
    },
    "colossal.pipeline.layer_spec": {"colossal.legacy.pipeline": "LayerSpec"},
    "colossal.pipeline.pipelinable": {"colossal.legacy.pipeline": "LayerSpec PipelinableContext"},
    "colossal.pipeline.p2p": {"colossal.legacy.pipeline": "PipelineP2PCommunication"},
    "colossal.pipeline.schedule": {
        "colossal.legacy.pipeline": "InterleavedSchedule OneForwardOneBackwardSchedule PipelineSchedule=StageSchedule "
        "ZeroBubbleVPipeScheduler"
    },
    "colossal.pipeline.schedule.base": {"colossal.legacy.pipeline": "PipelineSchedule=StageSchedule"},
    "colossal.pipeline.schedule.interleaved_pp": {"colossal.legacy.pipeline": "InterleavedSchedule"},
    "colossal.pipeline.schedule.one_f_one_b": {"colossal.legacy.pipeline": "OneForwardOneBackwardSchedule"},
    "colossal.pipeline.schedule.v_schedule": {"colossal.legacy.pipeline": "PipelineGraph ScheduledNode"},
    "colossal.pipeline.schedule.zero_bubble_pp": {"colossal.legacy.pipeline": "ZeroBubbleVPipeScheduler"},
    "colossal.pipeline.stage_manager": {"colossal.legacy.pipeline": "PipelineStageManager=GridStageManager"},
    "colossal.pipeline.utils": {"colossal.legacy.pipeline": "partition_balanced partition_uniform"},
    "colossal.utils.model.pipelinable": {"colossal.legacy.pipeline": "LayerSpec PipelinableContext"},
    # ---------------------------------------------------------------- tensors, meshes and layouts
    "colossal.tensor": {"colossal.legacy.tensor": "*"},
    "colossal.tensor.comm_spec": {"colossal.legacy.shape_consistency": "CollectiveCommPattern CommSpec"},
    "colossal.tensor.shape_consistency": {
        "colossal.legacy.shape_consistency": "CollectiveCommPattern CommSpec ShapeConsistencyManager"
    },
    "colossal.tensor.sharding_spec": {
        "colossal.legacy.shape_consistency": "ShardingSpec=MeshShardingSpec",
        "colossal.legacy.d_tensor": "DimSpec _DimSpec=DimSpec",
    },
    "colossal.tensor.d_tensor.comm_spec": {"colossal.legacy.shape_consistency": "CollectiveCommPattern CommSpec"},
    "colossal.cluster": {"colossal.legacy.cluster": "*"},
    "colossal.cluster.device_mesh_manager": {"colossal.legacy.cluster": "DeviceMeshInfo DeviceMeshManager"},
    "colossal.cluster.dist_coordinator": {
        "colossal.cluster": "DistCoordinator",
        "colossal.legacy.cluster": "priority_execution",
    },
    "colossal.cluster.process_group_mesh": {"colossal.legacy.cluster": "ProcessGroupMesh"},
    "colossal.cluster.process_group_manager": {"colossal.legacy.cluster": "ProcessGroupManager"},
    "colossal.device": {"colossal.legacy.device": "*"},
    "colossal.device.alpha_beta_profiler": {"colossal.legacy.device": "AlphaBetaProfiler"},
    "colossal.device.device_mesh": {"colossal.legacy.device": "DeviceMesh"},
    "colossal.tensor.d_tensor": {
        "colossal.legacy.d_tensor": "* Layout=DTensorLayout",
        _TENSORS: "clear_layout_converter",
    },
    "colossal.tensor.d_tensor.api": {
        "colossal.legacy.d_tensor": "* Layout=DTensorLayout",
        _TENSORS: "clear_layout_converter",
    },
    "colossal.tensor.d_tensor.layout": {"colossal.legacy.d_tensor": "Layout=DTensorLayout"},
    "colossal.tensor.d_tensor.layout_converter": {"colossal.legacy.d_tensor": "LayoutConverter"},
    "colossal.tensor.d_tensor.misc": {
        "colossal.errors": "DuplicatedShardingDimensionError=PlanError LayoutException=PlanError "
        "ShardingNotDivisibleError=PlanError ShardingOutOfIndexError=PlanError"
    },
    "colossal.tensor.d_tensor.sharding_spec": {"colossal.legacy.d_tensor": "DimSpec ShardingSpec"},
    "colossal.tensor.padded_tensor": {
        _TENSORS: "init_as_padded_tensor is_padded_tensor to_padded_tensor to_unpadded_tensor"
    },
    "colossal.tensor.padded_tensor.api": {
        _TENSORS: "init_as_padded_tensor is_padded_tensor to_padded_tensor to_unpadded_tensor"
    },
    "colossal.checkpoint_io.utils": {_TENSORS: "gather_distributed_param"},
    "colossal.tensor.process_group": {"colossal.legacy.tensor": "ProcessGroup"},
    "colossal.tensor.tensor_spec": {"colossal.legacy.tensor": "ColoTensorSpec"},
    "colossal.tensor.distspec": {"colossal.legacy.tensor": "ShardSpec ReplicaSpec DistPlacementPattern"},
    "colossal.tensor.compute_spec": {"colossal.legacy.tensor": "ComputeSpec ComputePattern"},
    "colossal.tensor.colo_tensor": {"colossal.legacy.tensor": "ColoTensor"},
    "colossal.tensor.colo_parameter": {"colossal.legacy.tensor": "ColoParameter"},
    "colossal.utils.model.colo_init_context": {"colossal.legacy.tensor": "ColoInitContext"},
    # ---------------------------------------------------------------- layers, models and policies
    "colossal.legacy.nn": {_LAYERS: "*"},
    "colossal.nn": {
        _LAYERS: "*",
        "colossal.nn.optimizer": "*",
        "colossal.nn.lr_scheduler": "*",
        "colossal.legacy.moe": "MoeCrossEntropyLoss MoeLoss",
    },
    "colossal.nn.init": {"colossal.legacy.nn.init": "*"},
    "colossal.nn.layer": {"colossal.nn": "*", _LAYERS: "*"},
    "colossal.nn.layer.base_layer": {"colossal.nn": "ParallelLayer"},
    "colossal.nn.layer.colossalai_layer": {
        "colossal.nn": "Classifier Dropout Embedding LayerNorm Linear PatchEmbedding",
        _LAYERS: "partition_batch",
    },
    "colossal.nn.layer.moe": {"colossal.legacy.moe": "*"},
    "colossal.nn.layer.moe.experts": {
        "colossal.legacy.moe": "BaseExperts Experts FFNExperts MoeExperts=BaseExperts TPExperts"
    },
    "colossal.nn.layer.moe.layers": {"colossal.legacy.moe": "MoeLayer MoeModule"},
    "colossal.nn.layer.moe.routers": {"colossal.legacy.moe": "Top1Router Top2Router TopKRouter"},
    "colossal.nn.layer.moe.utils": {
        "colossal.legacy.moe": "NormalNoiseGenerator UniformNoiseGenerator build_ffn_experts"
    },
    "colossal.moe": {
        "colossal.legacy.moe": "*",
        "colossal.legacy.interface": "MoECheckpointIO MoECheckpintIO=MoECheckpointIO",
    },
    "colossal.moe.checkpoint": {"colossal.legacy.interface": "MoECheckpointIO MoECheckpintIO=MoECheckpointIO"},
    "colossal.moe.experts": {"colossal.legacy.moe": "MLPExperts"},
    "colossal.moe.layers": {"colossal.legacy.moe": "SparseMLP"},
    "colossal.moe.load_balance": {"colossal.legacy.moe": "LoadBalancer"},
    "colossal.moe.loss": {"colossal.legacy.moe": "MoeCrossEntropyLoss MoeLoss"},
    "colossal.moe.manager": {"colossal.legacy.moe": "MOE_MANAGER MoEManager"},
    "colossal.moe.routers": {"colossal.legacy.moe": "Top1Router Top2Router TopKRouter"},
    "colossal.moe.utils": {"colossal.legacy.moe": "NormalNoiseGenerator UniformNoiseGenerator apply_load_balance"},
    "colossal.legacy.moe.experts": {"colossal.legacy.moe": "MLPExperts"},
    "colossal.legacy.moe.layers": {"colossal.legacy.moe": "SparseMLP"},
    "colossal.legacy.moe.load_balance": {"colossal.legacy.moe": "LoadBalancer"},
    "colossal.legacy.moe.manager": {"colossal.legacy.moe": "MOE_MANAGER MoEManager"},
    "colossal.legacy.moe.utils": {
        "colossal.legacy.moe": "NormalNoiseGenerator UniformNoiseGenerator apply_load_balance"
    },
    "colossal.tensor.moe_tensor": {"colossal.legacy.moe": "MoeParallelInfo"},
    "colossal.tensor.moe_tensor.api": {
        "colossal._src.legacy.moe.moe_tensor": "get_dp_group get_dp_group_ranks get_dp_rank get_dp_size get_ep_group "
        "get_ep_group_ranks get_ep_rank get_ep_size is_moe_tensor"
    },
    "colossal.tensor.moe_tensor.moe_info": {"colossal.legacy.moe": "MoeParallelInfo"},
    "colossal.shardformer.modeling.deepseek": {"colossal.legacy.moe": "EPDeepseekMoE"},
    "colossal.shardformer.modeling.deepseek_v3": {"colossal.legacy.moe": "EpDeepseekV3MoE"},
    "colossal.shardformer.modeling.mixtral": {"colossal.legacy.moe": "EPMixtralSparseMoeBlock"},
    "colossal.nn.layer.parallel_1d": {_LAYERS: "*", "colossal.nn": "Linear1D_Col Linear1D_Row"},
    "colossal.nn.layer.parallel_2d": {_LAYERS: "*"},
    "colossal.nn.layer.parallel_2p5d": {_LAYERS: "*"},
    "colossal.nn.layer.parallel_3d": {_LAYERS: "*"},
    "colossal.nn.layer.parallel_sequence": {_LAYERS: "AttnMaskType RingAV RingQK TransformerSelfAttentionRing"},
    "colossal.nn.layer.vanilla": {
        "colossal.nn": "DropPath",
        _LAYERS: "VanillaClassifier VanillaLayerNorm VanillaLinear VanillaPatchEmbedding WrappedDropPath "
        "WrappedDropout",
    },
    "colossal.legacy.model_zoo.gpt": {"colossal.legacy.model_zoo.gpt": "gpt2_8B=gpt2_8b"},
    "colossal.legacy.model_zoo.gpt.gpt": {"colossal.legacy.model_zoo.gpt": "* gpt2_8B=gpt2_8b"},
    "colossal.legacy.model_zoo.moe.models": {"colossal.legacy.model_zoo.moe": "*"},
    "colossal.legacy.model_zoo.vit": {"colossal.legacy.model_zoo.vit": "_create_vit_model=create_vit_model"},
    "colossal.legacy.model_zoo.vit.vit": {"colossal.legacy.model_zoo.vit": "* _create_vit_model=create_vit_model"},
    "colossal.shardformer": {
        "colossal.legacy.shardformer": "ModelSharder ModulePolicyDescription Policy SubModuleReplacementDescription",
    },
    "colossal.shardformer.layer": {
        "colossal.nn": "ParallelModule=ParallelLayer",
        "colossal.legacy.shardformer": "Linear1D_Col=GroupLinearCol Linear1D_Row=GroupLinearRow "
        "Embedding1D=GroupEmbedding VocabParallelEmbedding1D=GroupVocabEmbedding VocabParallelLMHead1D "
        "DropoutForParallelInput DropoutForReplicatedInput FusedLinear1D_Col FusedLinear1D_Row "
        "GPT2FusedLinearConv1D GPT2FusedLinearConv1D_Col GPT2FusedLinearConv1D_Row "
        "GPT2FusedLinearConv=GPT2FusedLinearConv1D "
        "FusedLinear=LinearWithGradAccum LinearWithGradAccum PaddingEmbedding PaddingLMHead LayerNorm=NormOfModule "
        "LayerNorm1D=NormOfModule RMSNorm=NormOfModule FusedLayerNorm=NormOfModule FusedRMSNorm=NormOfModule "
        "all_to_all_comm cross_entropy_1d dist_cross_entropy dist_log_prob dist_log_prob_1d",
        "colossal._src.legacy.shardformer.colo_attention": "AttnMaskType ColoAttention",
    },
    "colossal.shardformer.layer._operation": {
        "colossal.legacy.shardformer": "all_to_all_comm",
        "colossal._src.legacy.shardformer.exchanges": "gather_forward_reducescatter_backward "
        "gather_forward_split_backward reduce_backward reduce_forward reducescatter_forward_gather_backward "
        "split_forward_gather_backward",
    },
    "colossal.shardformer.layer.attn": {
        "colossal._src.legacy.shardformer.colo_attention": "AttnMaskType ColoAttention",
    },
    "colossal.shardformer.layer.linear": {
        "colossal.legacy.shardformer": "Linear1D_Col=GroupLinearCol Linear1D_Row=GroupLinearRow LinearWithGradAccum "
        "PaddingLMHead VocabParallelLMHead1D",
    },
    "colossal.shardformer.layer.embedding": {
        "colossal.legacy.shardformer": "Embedding1D=GroupEmbedding PaddingEmbedding "
        "VocabParallelEmbedding1D=GroupVocabEmbedding",
    },
    "colossal.shardformer.layer.dropout": {
        "colossal.legacy.shardformer": "DropoutForParallelInput DropoutForReplicatedInput",
    },
    "colossal.shardformer.layer.normalization": {
        "colossal.legacy.shardformer": "LayerNorm=NormOfModule RMSNorm=NormOfModule FusedLayerNorm=NormOfModule "
        "FusedRMSNorm=NormOfModule",
    },
    "colossal.shardformer.layer.parallel_module": {"colossal.nn": "ParallelModule=ParallelLayer"},
    "colossal.shardformer.layer.qkv_fused_linear": {
        "colossal.legacy.shardformer": "FusedLinear1D_Col FusedLinear1D_Row FusedLinear=LinearWithGradAccum "
        "GPT2FusedLinearConv1D GPT2FusedLinearConv1D_Col GPT2FusedLinearConv1D_Row",
    },
    "colossal.shardformer.layer.utils": {
        "colossal._src.legacy.context.randomizer": "Randomizer create_randomizer_with_offset"
    },
    "colossal.shardformer.layer.loss": {
        "colossal.legacy.shardformer": "cross_entropy_1d dist_cross_entropy dist_log_prob dist_log_prob_1d"
    },
    "colossal.shardformer._utils": {_TENSORS: "getattr_ setattr_"},
    "colossal.shardformer.policies.auto_policy": {
        "colossal.shardformer": "get_autopolicy=plan_of",
        "colossal.legacy.shardformer": "Policy",
    },
    "colossal.shardformer.policies.base_policy": {
        "colossal.legacy.shardformer": "ModulePolicyDescription Policy SubModuleReplacementDescription",
    },
    "colossal.lazy.lazy_init": {"colossal.lazy": "*"},
    # ---------------------------------------------------------------- kernels
    "colossal.kernel.jit": {
        "colossal.legacy.kernel": "bias_dropout_add_fused_inference bias_dropout_add_fused_train bias_gelu_impl "
        "set_jit_fusion_options"
    },
    "colossal.kernel.kernel_loader": {"colossal.legacy.kernel": "CPUAdamLoader FusedOptimizerLoader"},
    "colossal.quantization": {"colossal.legacy.quantization": "BnbQuantizationConfig quantize_model"},
    "colossal.quantization.bnb": {"colossal.legacy.quantization": "quantize_model"},
    "colossal.quantization.bnb_config": {"colossal.legacy.quantization": "BnbQuantizationConfig"},
    "colossal.quantization.fp8": {
        "colossal.legacy.quantization": "all_reduce_fp8 cast_from_fp8 cast_to_fp8 linear_fp8"
    },
    "colossal.testing": {"colossal.legacy.testing": "*"},
    "colossal.testing.comparison": {"colossal.legacy.testing": "*", "colossal.testing": "assert_close"},
    "colossal.testing.random": {_UTILS: "seed_all=set_seed"},
    "colossal.testing.pytest_wrapper": {"colossal.legacy.testing": "run_on_environment_flag"},
    "colossal.testing.utils": {"colossal.legacy.testing": "*"},
    "colossal.nn.loss": {
        "colossal.nn": "CrossEntropyLoss VocabParallelCrossEntropyLoss",
        _LAYERS: "*",
        "colossal.legacy.moe": "MoeCrossEntropyLoss MoeLoss",
    },
}
"""The older module, then the module of today and its names."""
