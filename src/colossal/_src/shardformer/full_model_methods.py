"""Methods that take a model for the full one: ranks that shard its tensors count all elements, or are told."""

import math
import weakref
from functools import partial
from typing import Any

from torch import nn

from colossal._src.interface import refuse
from colossal._src.nn.layer import VocabParallelEmbedding
from colossal._src.tensor import placement_of

_APPLY = (
    "apply calls a function with each module, to initialize layers by their kind or shape. Found a model whose layers "
    "tensor-parallel ranks shard, which are no torch.nn.Linear and have parts of its weights. Call it before boost, or "
    "go through model.modules()."
)
_RESIZE = (
    "resize_token_embeddings changes the embeddings of the full vocabulary. Found a model whose vocabulary "
    "tensor-parallel ranks shard. Call it before boost, and build the optimizer after it."
)


def adapt_full_model_methods(model: nn.Module) -> None:
    """Let methods of a model that is sharded over tp see the full tensors, or refuse them."""
    refuse([model], "apply", _APPLY)
    if hasattr(model, "resize_token_embeddings"):
        refuse([model], "resize_token_embeddings", _RESIZE)
    if hasattr(model, "num_parameters"):
        vars(model)["num_parameters"] = partial(_num_parameters, weakref.ref(model))


def _num_parameters(
    model_ref: "weakref.ref[Any]", only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """Count the elements of the full tensors, as transformers does those of a model in one process."""
    model: Any = model_ref()
    kinds = (nn.Embedding, VocabParallelEmbedding)
    excluded = {f"{name}.weight" for name, each in model.named_modules() if isinstance(each, kinds)}
    return sum(
        math.prod(placement_of(each).shape)
        for name, each in model.named_parameters()
        if (each.requires_grad or not only_trainable) and not (exclude_embeddings and name in excluded)
    )
