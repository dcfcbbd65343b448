"""Models whose gradients cannot be reduced in the way that a plugin does."""

from collections.abc import Iterable

import torch
from torch import nn

from colossal._src.tensor import placement_of
from colossal.errors import UnsupportedError


def check_equal_rounding(parameters: Iterable[torch.Tensor], *, has_tied_stages: bool = False) -> None:
    """Reject 8 bits where a replicated parameter would be quantized together with gradients that differ between ranks.

    Each block of a bucket has one scale. Next to shards, which differ between tensor-parallel ranks, the gradient of
    a replicated parameter would be rounded differently on each of them, and its copies would drift apart.
    """
    places = [placement_of(each) for each in parameters if each.requires_grad]
    is_mixed = any(each.is_compute_sharded for each in places) and any(
        not each.is_compute_sharded or each.replica_groups for each in places
    )
    if is_mixed or has_tied_stages:
        what = (
            "tied parameters of several pipeline stages" if has_tied_stages else "shards next to replicated parameters"
        )
        raise UnsupportedError(
            "Gradients in 8 bits are rounded by blocks, equally on ranks that hold the same parameter. "
            f"Found fp8_communication=True with {what}, which would drift apart. Leave fp8_communication out, or train "
            "without tensor parallelism and tied stages."
        )


def check_dense_gradients(model: nn.Module, reducer: str) -> None:
    """Reject embeddings whose gradients are sparse."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise UnsupportedError(
                f"{reducer} reduces dense gradients. Found sparse=True in {name or type(module).__name__}. "
                "Build the embedding with sparse=False, or take TorchDDPPlugin."
            )


def check_unwritten_weights(model: nn.Module, gatherer: str) -> None:
    """Reject embeddings that write their weight in a forward pass, where that is a gathered copy."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UnsupportedError(
                f"{gatherer} frees the full parameters after a forward pass, with what the pass wrote into them. Found "
                f"max_norm={module.max_norm} in {name or type(module).__name__}, which scales rows of its weight in "
                "each pass. Leave it out, and take TorchDDPPlugin or LowLevelZeroPlugin, under which a program can "
                f"scale them after each step: {_renorm(module)}."
            )


def check_equal_writes(model: nn.Module) -> None:
    """Reject embeddings that write the rows of their weight that a rank reads, where other ranks read others."""
    for name, module in model.named_modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_embedding and module.max_norm is not None and module.weight.requires_grad:
            raise UnsupportedError(
                "Replicas of a parameter are the same on all ranks. Found "
                f"max_norm={module.max_norm} in {name or type(module).__name__}, which in each pass scales the rows of "
                "its weight that the samples of this rank use. Leave it out, and scale all rows after each step: "
                f"{_renorm(module)}."
            )


def _renorm(module: nn.Embedding | nn.EmbeddingBag) -> str:
    return f"with torch.no_grad(): weight.renorm_({module.norm_type:g}, 0, {module.max_norm})"
