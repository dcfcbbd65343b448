"""`generate` of transformers on a model whose logits or experts ranks shard."""

import weakref
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from colossal._src import comm
from colossal._src.cluster import ParallelMesh
from colossal._src.comm import Channel, LostPeerGuard
from colossal._src.interface import SAVE_AND_GENERATE, refuse
from colossal.errors import UnsupportedError

_NUM_POSITIONAL = 5
"""Arguments of `generate` before `synced_gpus`."""


@dataclass(frozen=True)
class ShardedGeneration:
    """How ranks generate together with a model of which they have shards."""

    mesh: ParallelMesh
    shards_vocabulary: bool
    shards_tokens: bool
    shares_experts: bool  # between ranks that may have different prompts

    def full_logits(self, model: nn.Module) -> AbstractContextManager[None]:
        """Open a context in which the model returns logits of all vocabulary entries, without gradients."""
        return _full_logits(model, self.mesh) if self.shards_vocabulary else nullcontext()


_SHARDED: "weakref.WeakKeyDictionary[nn.Module, ShardedGeneration]" = weakref.WeakKeyDictionary()


def sharded_generation_of(model: nn.Module) -> ShardedGeneration | None:
    """Find how ranks generate together with a model; None if no plan shards it."""
    return _SHARDED.get(model)


def adapt_generate(model: nn.Module, mesh: ParallelMesh, *, shards_vocabulary: bool, shards_tokens: bool) -> None:
    """Let `generate` of a model see the logits of the full vocabulary, and all of its experts, or refuse it."""
    if not hasattr(model, "generate"):
        return
    # where tp is a multiple of ep, the ranks that share experts have the same prompts
    shares_experts = mesh.size("tp") % mesh.size("ep") != 0
    _SHARDED[model] = ShardedGeneration(mesh, shards_vocabulary, shards_tokens, shares_experts)
    if shards_tokens:
        found = "generate computes one token at a time. Found a model whose tokens are sharded over ranks."
        refuse([model], "generate", f"{found} {SAVE_AND_GENERATE}")
    elif shards_vocabulary or shares_experts:
        gathered = mesh if shards_vocabulary else None
        vars(model)["generate"] = partial(_generate, weakref.ref(model), gathered, shares_experts)


def _generate(
    model_ref: "weakref.ref[Any]", mesh: ParallelMesh | None, shares_experts: bool, *args: Any, **kwargs: Any
) -> Any:
    """Generate; all ranks call it, those of tp with the same prompt and, to sample, the same seed."""
    model: Any = model_ref()
    if shares_experts:
        _check_options(model, args, kwargs)
        kwargs |= {"synced_gpus": True}  # ranks that have finished compute for the tokens of the others
    with nullcontext() if mesh is None else _full_logits(model, mesh), LostPeerGuard():
        return type(model).generate(model, *args, **kwargs)


@contextmanager
def _full_logits(model: Any, mesh: ParallelMesh) -> Generator[None]:
    def gather(_head: nn.Module, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        length = sum(Channel("tp", mesh).lengths(logits.shape[-1]))  # ranks may have unequal parts of the vocabulary
        return comm.gather(logits, "tp", -1, mesh, length=length)

    hook = model.get_output_embeddings().register_forward_hook(gather)
    try:
        yield
    finally:
        hook.remove()


def _check_options(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Reject options with which ranks of different prompts run different numbers of forward passes."""
    chosen = args[1] if len(args) > 1 else kwargs.get("generation_config")
    config = model.generation_config if chosen is None else chosen

    def option(name: str) -> Any:
        found = kwargs.get(name)
        return getattr(config, name, None) if found is None else found

    refused = {
        "synced_gpus=False": kwargs.get("synced_gpus") is False,
        "assistant_model": kwargs.get("assistant_model") is not None,
        "custom_generate": kwargs.get("custom_generate") is not None,
        "prompt_lookup_num_tokens": option("prompt_lookup_num_tokens") is not None,
        "prefill_chunk_size": option("prefill_chunk_size") is not None,
        # others have the length of this rank's own sequences, which those of another rank may exceed
        "cache_implementation": option("cache_implementation") not in (None, "dynamic", "offloaded", "quantized"),
        "options without keywords": len(args) > _NUM_POSITIONAL,
    }
    if found := [name for name, is_refused in refused.items() if is_refused]:
        raise UnsupportedError(
            "Ranks that share experts run as many forward passes in generate as the longest of all their sequences "
            f"needs, one token at a time. Found {', '.join(found)}. Leave it out, and pass options by keywords."
        )
