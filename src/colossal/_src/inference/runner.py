"""Runs the model on the chunks of a step.

[Note: how a step is divided into batches]
A batch is a rectangle: all rows are as long as the longest. Sequences that compute one token, and those that compute a
part of a prompt, are batches of their own, and so are prompts of very different lengths. With `batch_invariant` each
sequence is: its shapes are then those that it would have alone, and so are its bits. Shapes that are only padded to a
fixed size would not do: another row of a matrix product is computed by another part of the kernel.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import nn

from colossal._src.inference.cache import BatchLayout, PagedCache
from colossal._src.inference.pages import NULL_PAGE
from colossal._src.inference.requests import Sequence
from colossal._src.inference.scheduler import Chunk, StepPlan

_MOST_PADDING = 2
"""How many times as long as a row the longest row of its batch may be."""

_SPARE_COLUMNS = 32
"""Tokens of each row for which a batch that computes one token a row has room, before it is read from pages again."""

_SHORT = 16
"""Rows up to this length are computed together in any case."""


@dataclass
class Row:
    """What the arrays of the runner hold of the sequence in one of their rows; a new table is another list."""

    table: list[int] | None = None
    num_tokens: int = 0
    num_pages: int = 0


class ModelRunner:
    """Turns chunks into batches, and batches into logits."""

    def __init__(
        self,
        model: nn.Module,
        *,
        num_rows: int,
        max_length: int,
        num_pages: int,
        page_size: int,
        batch_invariant: bool,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        self._forward_of_model = model if forward is None else forward
        self._page_size = page_size
        self._batch_invariant = batch_invariant
        self._device = next(model.parameters()).device
        self._cache = PagedCache(getattr(model, "config", None), (num_pages + 1) * page_size)
        parameters = signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._keeps_last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._last_tables: list[list[int]] = []
        self._last_ends = np.zeros(0, dtype=np.int64)
        self._spare_columns = 0
        # Of each row, which a running sequence has: all tokens so far, and the slots of all pages of its table.
        length = -(-max_length // page_size) * page_size
        self._rows = [Row() for _ in range(num_rows)]
        self._tokens = np.zeros((num_rows, length), dtype=np.int64)
        self._slots = np.zeros((num_rows, length), dtype=np.int64)

    def run(self, plan: StepPlan) -> dict[Sequence, torch.Tensor]:
        """Compute the chunks, and return logits of those sequences whose next token they decide, each (vocabulary,)."""
        for chunk in plan:
            self._update_row(chunk.sequence)
        found: dict[Sequence, torch.Tensor] = {}
        for batch in self._batches(plan):
            logits = self._forward(batch)
            found |= {chunk.sequence: row for chunk, row in zip(batch, logits, strict=True) if chunk.is_last}
        return found

    def _update_row(self, sequence: Sequence) -> None:
        """Copy tokens and pages that a row does not have yet."""
        row = self._rows[sequence.row]
        if row.table is not sequence.table:
            row = self._rows[sequence.row] = Row(sequence.table)
        count = sequence.num_tokens
        if row.num_tokens < count:
            self._tokens[sequence.row, row.num_tokens : count] = sequence.tokens(row.num_tokens, count)
            row.num_tokens = count
        if row.num_pages < len(sequence.table):
            size = self._page_size
            pages = np.array(sequence.table[row.num_pages :])
            slots = pages[:, None] * size + np.arange(size)
            self._slots[sequence.row, row.num_pages * size : len(sequence.table) * size] = slots.reshape(-1)
            row.num_pages = len(sequence.table)

    def _batches(self, plan: StepPlan) -> Iterator[list[Chunk]]:
        """Divide a plan into batches of similar lengths."""
        if self._batch_invariant:
            yield from ([chunk] for chunk in plan)
            return
        batch: list[Chunk] = []
        for chunk in sorted(plan, key=lambda chunk: -chunk.length):
            longest = batch[0].length if batch else 0  # and no later chunk is longer
            if longest > max(_SHORT, _MOST_PADDING * chunk.length) or longest > chunk.length == 1:
                yield batch
                batch = []
            batch.append(chunk)
        if batch:
            yield batch

    def _forward(self, batch: list[Chunk]) -> torch.Tensor:
        """Return the logits of the last token of each row, (rows, vocabulary)."""
        rows = np.array([chunk.sequence.row for chunk in batch])
        starts = np.array([chunk.start for chunk in batch])
        ends = starts + np.array([chunk.length for chunk in batch])
        kv_length, query_length = int(ends.max()), int((ends - starts).max())
        positions = np.arange(kv_length) - (kv_length - ends)[:, None]
        is_token = positions >= 0
        positions = np.maximum(positions, 0)
        slots = np.where(is_token, self._slots[rows[:, None], positions], NULL_PAGE)
        new = positions[:, kv_length - query_length :]
        is_new = is_token[:, kv_length - query_length :] & (new >= starts[:, None])
        has_padding = not is_new.all()
        tables = [chunk.sequence.table for chunk in batch]
        is_kept = query_length == 1 and not self._batch_invariant and bool(starts.any())  # else nothing is read
        continues = is_kept and self._continues(tables, starts)
        read = np.pad(slots, ((0, 0), (0, _SPARE_COLUMNS)), constant_values=NULL_PAGE) if is_kept else slots
        self._cache.begin(
            BatchLayout(
                query_length=query_length,
                kv_length=kv_length,
                write=self._tensor(slots[:, kv_length - query_length :][is_new]),
                written=self._tensor(np.flatnonzero(is_new)) if has_padding else None,
                read=self._tensor(read) if starts.any() or has_padding else None,
                is_kept=is_kept,
                continues=continues,
            )
        )
        arguments: dict[str, Any] = {
            "input_ids": self._tensor(np.where(is_new, self._tokens[rows[:, None], new], 0)),
            "attention_mask": self._tensor(is_token.astype(np.int64)),
            "past_key_values": self._cache,
            "use_cache": True,
            **self._keeps_last,
        }
        if self._takes_positions:
            arguments["position_ids"] = self._tensor(new)
        if is_kept:
            self._last_tables = []  # what an exception leaves half written is not continued
        with torch.no_grad():
            logits = self._forward_of_model(**arguments).logits[:, -1]
        if is_kept:
            self._last_tables, self._last_ends = tables, ends
            self._spare_columns = self._spare_columns - 1 if continues else _SPARE_COLUMNS
        return logits

    def _continues(self, tables: list[list[int]], starts: np.ndarray[Any, Any]) -> bool:
        """Whether a batch has the rows of the last one that computed one token a row, with this token behind them."""
        is_same = len(tables) == len(self._last_tables) and all(map(operator.is_, tables, self._last_tables))
        return is_same and self._spare_columns > 0 and bool((starts == self._last_ends).all())

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
