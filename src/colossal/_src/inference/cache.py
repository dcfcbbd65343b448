"""Pages behind the cache of transformers, which any model reads and writes with its own forward.

[Note: rows end in the same column]
The tokens of a batch have different lengths. Rows are aligned at their ends, as in padded prompts: what a model derives
from columns alone (which tokens are behind which, how far apart two are) is then right for each row, also in families
that give attention masks and positions no thought beyond the padding mask.
"""

from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from colossal._src.inference.attention_in_pages import InPages, PagedBatch
from colossal.errors import UnsupportedError


@dataclass(frozen=True)
class BatchLayout:
    """Where the pages have the tokens of a batch; a slot is the place of one token.

    `write` has the slots of the new tokens, and `written` where they are in the flat batch, None if it has no padding.
    `read` has those of all tokens, (rows, kv_length), in place of padding one that holds zeros, for which a model may
    compute values that are not finite; it is None if all are new and there is no padding. If it `is_kept` it has more
    columns, for the next tokens, and if it `continues` it is that of the last batch, which has the same rows and is a
    token shorter. With `in_pages`, attention reads the pages itself.
    """

    query_length: int
    kv_length: int
    write: torch.Tensor
    written: torch.Tensor | None
    read: torch.Tensor | None
    is_kept: bool = False
    continues: bool = False
    in_pages: PagedBatch | None = None


class PagedStates:
    """Keys, or values, of one layer.

    A batch whose rows all compute one token is most often the last one with another token each. What was read from the
    pages for that one is therefore kept next to them, and grows by a column, until rows come or go.
    """

    def __init__(self, num_slots: int, states: torch.Tensor) -> None:
        self._pages = states.new_zeros(num_slots, states.shape[1] * states.shape[3])
        self._kept: torch.Tensor | None = None

    def write(self, states: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
        """Write new states, (rows, heads, query_length, head_dim), and return them as they are in pages."""
        rows, heads, length, head_dim = states.shape
        tokens = states.transpose(1, 2).reshape(rows * length, heads * head_dim)
        self._pages.index_copy_(0, layout.write, tokens if layout.written is None else tokens[layout.written])
        return tokens

    def view(self, states: torch.Tensor) -> torch.Tensor:
        """Return the pages, (slots, heads, head_dim), of states such as these."""
        return self._pages.view(-1, states.shape[1], states.shape[3])

    def update(self, states: torch.Tensor, layout: BatchLayout, num_columns: int) -> torch.Tensor:
        """Write new states, and return the last columns of all tokens."""
        _, heads, _, head_dim = states.shape
        tokens = self.write(states, layout)
        if layout.read is None:
            return states
        if layout.continues and self._kept is not None:
            self._kept[:, layout.kv_length - 1] = tokens
            found = self._kept[:, layout.kv_length - num_columns : layout.kv_length]
        elif layout.is_kept:
            self._kept = self._read(layout.read)
            found = self._kept[:, layout.kv_length - num_columns : layout.kv_length]
        else:
            return self.gather(states, layout, num_columns)
        return found.unflatten(-1, (heads, head_dim)).transpose(1, 2)

    def gather(self, states: torch.Tensor, layout: BatchLayout, num_columns: int) -> torch.Tensor:
        """Return the last columns of all tokens, of heads such as these states have."""
        assert layout.read is not None
        found = self._read(layout.read[:, layout.kv_length - num_columns :])
        return found.unflatten(-1, (states.shape[1], states.shape[3])).transpose(1, 2)

    def _read(self, slots: torch.Tensor) -> torch.Tensor:
        return self._pages.index_select(0, slots.flatten()).view(*slots.shape, -1)


class PagedLayer(CacheLayerMixin):
    """Keys and values of one layer, for all pages."""

    is_compileable = False

    def __init__(self, num_slots: int, window: int | None) -> None:
        super().__init__()
        self.is_sliding = window is not None
        self.has_gathered = False
        """Whether the model wanted tokens that attention in pages would not have needed."""
        self._num_slots = num_slots
        self._window = window
        self._layout: BatchLayout
        self._states: tuple[PagedStates, PagedStates]

    def begin(self, layout: BatchLayout) -> None:
        """Take the batch that the next call of `update` is about."""
        self._layout = layout

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate as the first keys and values are shaped; multi-head latent attention has values of another size."""
        self._states = PagedStates(self._num_slots, key_states), PagedStates(self._num_slots, value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values, (rows, heads, query_length, head_dim), and return those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_columns, _ = self.get_mask_sizes(key_states.shape[2])
        keys, values = self._states
        if self._layout.in_pages is not None:
            return self._in_pages(keys, key_states, num_columns), self._in_pages(values, value_states, num_columns)
        return keys.update(key_states, self._layout, num_columns), values.update(
            value_states, self._layout, num_columns
        )

    def _in_pages(self, states: PagedStates, new: torch.Tensor, num_columns: int) -> torch.Tensor:
        states.write(new, self._layout)
        return InPages.of(new, states.view(new), self._window, partial(self._gather, states, new, num_columns))

    def _gather(self, states: PagedStates, new: torch.Tensor, num_columns: int) -> torch.Tensor:
        self.has_gathered = True
        return states.gather(new, self._layout, num_columns)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many columns `update` returns, and which is the first of them."""
        length = self._layout.kv_length
        if self._window is not None and self._layout.read is not None:
            length = min(length, self._window - 1 + query_length)
        return length, self._layout.kv_length - length

    def get_seq_length(self) -> int:
        """How many columns are before the new ones."""
        return self._layout.kv_length - self._layout.query_length

    def get_max_length(self) -> int:
        """There is no limit of a layer."""
        return -1


class PagedCache(Cache):
    """The cache that a model is given: pages of all its layers."""

    def __init__(self, config: Any, num_slots: int) -> None:
        super().__init__(layers=[PagedLayer(num_slots, window) for window in _windows_of(config)])

    @property
    def has_gathered(self) -> bool:
        """Whether the model does something else with keys and values than attention in pages does."""
        return any(layer.has_gathered for layer in self.layers)  # pyright: ignore[reportAttributeAccessIssue] (as below)

    def begin(self, layout: BatchLayout) -> None:
        """Take the batch that the next forward is about."""
        for layer in self.layers:
            layer.begin(layout)  # pyright: ignore[reportAttributeAccessIssue] (all are ours)


def check_model(model: Any) -> None:
    """Reject a model that does not generate from keys and values of earlier tokens alone."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        raise UnsupportedError(
            f"The engine generates with a causal language model of transformers. Found {name}, which has no head that "
            "returns logits. Load it by AutoModelForCausalLM."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"The engine generates with models that only decode. Found {name}, whose decoder also attends to the "
            "output of an encoder. Call its generate."
        )
    if getattr(model, "_is_stateful", False):
        raise UnsupportedError(_stateful(name, "which keeps a recurrent state for each sequence"))
    if isinstance(model, PreTrainedModel) and "past_key_values" not in signature(model.forward).parameters:
        raise UnsupportedError(
            f"The engine keeps keys and values of earlier tokens for the model. Found {name}, whose forward takes no "
            "past_key_values. Call its generate."
        )
    _windows_of(config)


def _windows_of(config: Any) -> list[int | None]:
    """The sliding window of each layer, or None, as the cache that transformers would make has them."""
    text_config = config.get_text_config(decoder=True)
    layers = DynamicCache(config=text_config).layers or [DynamicLayer() for _ in range(text_config.num_hidden_layers)]
    kinds = {type(layer) for layer in layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if kinds:
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise UnsupportedError(_stateful(type(config).__name__, f"with layers whose cache is a {found}"))
    return [getattr(layer, "sliding_window", None) for layer in layers]


def _stateful(name: str, why: str) -> str:
    return (
        "Pages hold keys and values of tokens, which later tokens attend to, and which can be read again from any "
        f"token on. Found {name}, {why}: it cannot be put into pages. Call generate of the model."
    )
