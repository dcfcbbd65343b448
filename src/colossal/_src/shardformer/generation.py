"""`generate` of transformers on a model whose logits ranks shard."""

import weakref
from functools import partial
from typing import Any

import torch
from torch import nn

from colossal._src import comm
from colossal._src.cluster import ParallelMesh
from colossal._src.comm import Channel
from colossal._src.interface import SAVE_AND_GENERATE, refuse


def adapt_generate(model: nn.Module, mesh: ParallelMesh, *, shards_vocabulary: bool, shards_tokens: bool) -> None:
    """Let `generate` of a model see the logits of the full vocabulary, or refuse it; training keeps them sharded."""
    if not hasattr(model, "generate"):
        return
    if shards_tokens:
        found = "generate computes one token at a time. Found a model whose tokens are sharded over ranks."
        refuse([model], "generate", f"{found} {SAVE_AND_GENERATE}")
    elif shards_vocabulary:
        vars(model)["generate"] = partial(_generate, weakref.ref(model), mesh)


def _generate(model_ref: "weakref.ref[Any]", mesh: ParallelMesh, *args: Any, **kwargs: Any) -> Any:
    """Generate; all tensor-parallel ranks call it with the same prompt and, to sample, the same seed."""
    model: Any = model_ref()

    def gather(_head: nn.Module, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        length = sum(Channel("tp", mesh).lengths(logits.shape[-1]))  # ranks may have unequal parts of the vocabulary
        return comm.gather(logits, "tp", -1, mesh, length=length)

    hook = model.get_output_embeddings().register_forward_hook(gather)
    try:
        return type(model).generate(model, *args, **kwargs)
    finally:
        hook.remove()
