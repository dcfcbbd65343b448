"""Names of the older documentation that have no counterpart, and what to use instead."""

from collections.abc import Mapping

WITHOUT_COUNTERPART: Mapping[str, str] = {
    # ---------------------------------------------------------------- pipelines
    "colossal.pipeline.weight_grad_store": "Use colossal.pipeline.WeightGrads, one for each pass.",
    "colossal.communication.ring": "Use colossal.nn.ring_attention, whose messages go around by themselves.",
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
    "colossal.nn.optimizer.NVMeOptimizer": "CPUAdam and HybridAdam of colossal.nn.optimizer keep states on disk: pass "
    "nvme_offload_fraction and nvme_offload_dir.",
}
"""The documented module or name, then what to use: a sentence."""
