"""Attention of models of Hugging Face to the tokens of several ranks, through their registry of functions."""

import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, final

import torch
from torch import nn

from colossal._src import comm
from colossal._src.cluster import ParallelMesh
from colossal._src.nn.attention import Mask, ring_attention
from colossal._src.shardformer.shard_config import SequenceParallelConfig
from colossal.errors import PlanError, UnsupportedError

_numbers = itertools.count()
_SINKS = "s_aux"  # one for each head
_REFUSED_BY_RING = ("softcap", _SINKS, "position_bias")
_IMPLEMENTATIONS_OF_RING = ("sdpa", "eager", "flash_attention_2")


def parallelize_attention(model: nn.Module, sp_config: SequenceParallelConfig) -> None:
    """Let attention see the tokens of all ranks, and refuse another attention function that is chosen afterwards."""
    from transformers import AttentionInterface, AttentionMaskInterface

    other: Any = model
    if not getattr(model, "_supports_attention_backend", False):
        raise PlanError(
            f"The mode {sp_config.mode!r} needs a model that takes its attention function from the registry of "
            f"transformers. Found {type(model).__name__}, which computes it by itself. Use the mode 'split_gather' "
            "with tp_size."
        )
    base = str(other.config._attn_implementation)  # noqa: SLF001 (has no public name)
    if sp_config.mode == "ring_attn" and base not in _IMPLEMENTATIONS_OF_RING:
        raise UnsupportedError(
            f"The mode 'ring_attn' computes attention by itself, equal to {', '.join(_IMPLEMENTATIONS_OF_RING)}. Found "
            f"a model with attn_implementation={base!r}. Choose one of these, or the mode 'all_to_all'."
        )
    # A name for each model: the registry is global, and what is registered knows the mesh of one model.
    name = f"{base}_of_sequence_{next(_numbers)}"
    if sp_config.mode == "ring_attn":
        AttentionInterface.register(name, _OfOneModel(RingAttentionFunction(sp_config), model))
        AttentionMaskInterface.register(name, mask_by_position)
    else:
        AttentionInterface.register(name, _OfOneModel(Ulysses(base, sp_config.sharding.mesh), model))
        AttentionMaskInterface.register(name, AttentionMaskInterface()[base])
    other.set_attn_implementation(name)
    model.register_forward_pre_hook(partial(_refuse_other_attention, other.config._attn_implementation))  # noqa: SLF001


def _refuse_other_attention(name: str, model: Any, _args: Any) -> None:
    found = model.config._attn_implementation  # noqa: SLF001 (has no public name)
    if found != name:
        raise UnsupportedError(
            "Attention sees the tokens of all ranks by a function that boost has chosen. Found a model with "
            f"attn_implementation={found!r}, set afterwards, which would see those of one rank. Set it before boost, "
            "as in from_pretrained(..., attn_implementation=...)."
        )


@final
class _OfOneModel:
    """An attention function, of the modules of a model and of its copies."""

    def __init__(self, function: Callable[..., Any], model: nn.Module) -> None:
        self._function, self._mark = function, f"_attention_{next(_numbers)}"
        for module in model.modules():
            setattr(module, self._mark, True)  # which a copy has too

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(module, self._mark):
            raise UnsupportedError(
                "Attention of a model whose sequences are sharded exchanges tokens with other ranks. Found a layer of "
                f"another model, a {type(module).__name__}, that has the same configuration object, as of a student "
                "and its teacher. Build one of them of copy.deepcopy(config)."
            )
        return self._function(module, *args, **kwargs)


@final
class Ulysses:
    """Attention in which each rank has some heads of all tokens; before and after it, all heads of some tokens.

    Source: Jacobs et al., "DeepSpeed Ulysses", 2023, https://arxiv.org/abs/2309.14509.

    Communication: all_to_all, sp, twice: queries, keys and values together, and the output; backward the same.
    """

    def __init__(self, base: str, mesh: ParallelMesh) -> None:
        self._base, self._mesh = base, mesh

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention."""
        size, groups = self._mesh.size("sp"), query.shape[1] // key.shape[1]
        # Heads of keys that do not divide by the number of ranks are repeated until there is one for each of queries.
        if key.shape[1] % size and groups > 1:
            key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
            groups = 1
        query, key, value = self._to_heads(query, key, value)
        seen: dict[str, Any] = {"num_key_value_groups": groups}
        if kwargs.get(_SINKS) is not None:  # eager attention takes them from the layer
            kwargs[_SINKS] = seen["sinks"] = kwargs[_SINKS].chunk(size)[self._mesh.rank("sp")]
        out, _ = self._function_of(module)(_AsSeen(module, **seen), query, key, value, attention_mask, **kwargs)
        return comm.all_to_all(out, "sp", 1, 2, self._mesh), None

    def _to_heads(self, *parts: torch.Tensor) -> list[torch.Tensor]:
        """Exchange all heads of some tokens for some heads of all tokens, in one all-to-all."""
        most, size = max(each.shape[-1] for each in parts), self._mesh.size("sp")
        # To one number of features, and by target rank first, so that one all-to-all moves all three.
        padded = [nn.functional.pad(each, (0, most - each.shape[-1])).unflatten(1, (size, -1)) for each in parts]
        moved = comm.all_to_all(torch.cat(padded, 2).flatten(1, 2), "sp", 1, 2, self._mesh)
        received_parts = moved.split([each.shape[2] for each in padded], 1)
        return [received[..., : each.shape[-1]] for received, each in zip(received_parts, parts, strict=True)]

    def _function_of(self, module: nn.Module) -> Callable[..., Any]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        modeling_file: Any = sys.modules[type(module).__module__]
        functions = getattr(modeling_file, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
        return functions.get_interface(self._base, modeling_file.eager_attention_forward)


@final
class _AsSeen:
    """An attention layer, as its function sees it: with attributes for the heads of this rank."""

    def __init__(self, module: nn.Module, **attributes: Any) -> None:
        self._module = module
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@final
@dataclass(frozen=True)
class PositionMask:
    """What a token sees, by position."""

    function: Callable[..., torch.Tensor]  # of transformers: takes batch, head, query and key indices
    padding: torch.Tensor | None  # true for tokens that are there, (batch, tokens); None for all
    batch_size: int  # sequences in a batch

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return which keys each query attends to."""
        batch = torch.arange(self.batch_size, device=keys.device)[:, None, None, None]
        head = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=keys.device)
        seen = self.function(batch, head, queries[None, None], keys[None, None])
        if self.padding is not None:
            seen = seen & self.padding[:, keys[0]][:, None, None]
        return seen.expand(self.batch_size, 1, queries.shape[0], keys.shape[1])


def mask_by_position(
    batch_size: int,
    q_length: int,  # noqa: ARG001 (what the registry passes)
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    **_others: Any,
) -> PositionMask | None:
    """Make what stands for a mask, as transformers' registry of masks has it."""
    if use_vmap:
        raise UnsupportedError(
            "The mode 'ring_attn' computes masks for some tokens at a time. Found a model with a mask function of its "
            "own. Use the mode 'all_to_all'."
        )
    padding = attention_mask
    # A padding mask without padding would keep the blocks from the fast kernels, which take no mask.
    if padding is not None and bool(padding.all()):
        padding = None
    can_skip = allow_is_causal_skip or allow_is_bidirectional_skip
    if padding is None and can_skip and (local_size is None or kv_length <= local_size):
        return None
    return PositionMask(mask_function, padding, batch_size)


@final
@dataclass(frozen=True)
class _GivenMask:
    """A mask that the program passes, of all queries and keys; transformers hands it to attention as it is."""

    seen: torch.Tensor  # (batch or 1, heads or 1, queries, keys), true where a query attends to a key

    @classmethod
    def of(cls, mask: torch.Tensor) -> Self:
        if mask.dtype != torch.bool:
            raise UnsupportedError(
                "The mode 'ring_attn' takes an attention_mask of four dimensions that says which keys each query "
                f"attends to. Found one of {mask.dtype}, which is added to scores. Pass booleans, such as mask == 0 of "
                "one with 0 and -inf, or use the mode 'all_to_all'."
            )
        return cls(mask)

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return which keys each query attends to."""
        return self.seen[:, :, queries, keys]


@final
class RingAttentionFunction:
    """`colossal.nn.attention.ring_attention` as transformers calls attention functions."""

    def __init__(self, sp_config: SequenceParallelConfig) -> None:
        self._sp_config = sp_config

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Mask | torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention."""
        _refuse(dropout, kwargs)
        if isinstance(attention_mask, torch.Tensor):
            attention_mask = _GivenMask.of(attention_mask)
        causal = attention_mask is None and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        sp_config = self._sp_config
        out = ring_attention(
            query,
            key,
            value,
            sp_config.sharding,
            is_causal=causal,
            mask=attention_mask,
            scale=scaling,
            inner_ring_size=sp_config.inner_ring_size,
        )
        return out.transpose(1, 2).contiguous(), None


def _refuse(dropout: float, others: Mapping[str, Any]) -> None:
    wanted = {name: others[name] for name in _REFUSED_BY_RING if others.get(name) is not None}
    if dropout:
        wanted["dropout"] = dropout
    if wanted:
        raise UnsupportedError(
            "The mode 'ring_attn' has attention without dropout, caps and biases. Found an attention layer with "
            f"{', '.join(wanted)}. Set the dropout of attention to 0 in the model's configuration, or use the mode "
            "'all_to_all'."
        )
