"""Runs the model on the chunks of a step.

[Note: how a step is divided into batches]
A batch is a rectangle: all rows are as long as the longest. Sequences that compute one token, and those that compute a
part of a prompt, are batches of their own, and so are prompts of very different lengths. With `batch_invariant` each
sequence is: its shapes are then those that it would have alone, and so are its bits. Shapes that are only padded to a
fixed size would not do: another row of a matrix product is computed by another part of the kernel.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import signature
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from colossal._src.inference.attention_in_pages import PagedBatch, attention_in_pages, configs_to_replace
from colossal._src.inference.cache import BatchLayout, PagedCache
from colossal._src.inference.pages import NULL_PAGE
from colossal._src.inference.sharding import ModelShard
from colossal._src.inference.step_record import ChunkRecord, StepRecord
from colossal._src.kernel import PagedTokens

_MOST_PADDING = 2
"""How many times as long as a row the longest row of its batch may be."""

_SPARE_COLUMNS = 32
"""Tokens of each row for which a batch that computes one token a row has room, before it is read from pages again."""

_SHORT = 16
"""Rows up to this length are computed together in any case."""


class ModelRunner:
    """Turns chunks into batches, and batches into logits, by a model, a function that runs it, or a shard of it."""

    def __init__(
        self,
        model: nn.Module,
        *,
        parts: Sequence[nn.Module],
        num_rows: int,
        max_length: int,
        num_pages: int,
        page_size: int,
        batch_invariant: bool,
        forward: Callable[..., Any] | None = None,
        shard: ModelShard | None = None,
    ) -> None:
        self._forward_of_model = shard.forward if shard else forward or model
        self._shard = shard
        self._page_size = page_size
        self._batch_invariant = batch_invariant
        self._device = next(model.parameters()).device
        self._cache = PagedCache(getattr(model, "config", None), (num_pages + 1) * page_size)
        parameters = signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._keeps_last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._last_tables: list[int] = []
        self._last_ends = np.zeros(0, dtype=np.int64)
        self._spare_columns = 0
        # Of each row, which a running sequence has: tokens that were computed, and the slots of all pages of its table.
        length = -(-max_length // page_size) * page_size
        self._tokens = np.zeros((num_rows, length), dtype=np.int64)
        self._slots = np.zeros((num_rows, length), dtype=np.int64)
        # one token is attended to in pages in another order than in a batch of several
        found = [] if batch_invariant else [configs_to_replace(part, self._device) for part in parts]
        self._configs = list(chain(*found)) if all(found) else []

    def run(self, record: StepRecord) -> dict[int, torch.Tensor]:
        """Compute the chunks; return the logits of each that is the last, (vocabulary,), by its place in the record.

        Of the ranks that have a stage each, those of the last one and the first rank get them.
        """
        size = self._page_size
        for chunk, tokens, pages in record.new_values():
            self._tokens[chunk.row, chunk.start : chunk.start + chunk.length] = tokens
            first, last = chunk.num_known_pages * size, (chunk.num_known_pages + chunk.num_pages) * size
            self._slots[chunk.row, first:last] = (pages[:, None] * size + np.arange(size)).reshape(-1)
        last_places: list[list[int]] = []
        found: list[torch.Tensor] = []
        for places in self._batches(record.chunks):
            batch = [record.chunks[place] for place in places]
            logits = self._forward(batch)
            if last_rows := [row for row, chunk in enumerate(batch) if chunk.is_last]:
                last_places.append([places[row] for row in last_rows])
                if logits is not None:
                    found.append(self._full_logits(logits if len(last_rows) == len(batch) else logits[last_rows]))
        # only now, so that no stage waits for logits before it has computed all batches
        found += self._receive_logits(map(len, last_places))
        return {
            place: row
            for places, logits in zip(last_places, found, strict=bool(found))
            for place, row in zip(places, logits, strict=True)
        }

    def prompt_logits(self, prompt: Sequence[int]) -> torch.Tensor | None:
        """Compute the logits of all tokens of a prompt, (tokens, vocabulary), without pages.

        Returns None on a rank to which `run` gives no logits.
        """
        ids = torch.tensor([list(prompt)], device=self._device)
        with torch.no_grad():
            outputs = self._forward_of_model(input_ids=ids, use_cache=False)
        found = [] if outputs is None else [self._full_logits(outputs.logits[0])]
        return next(iter(found + self._receive_logits([len(prompt)])), None)

    def _full_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._shard is None else self._shard.full_logits(logits)

    def _receive_logits(self, num_rows: Iterable[int]) -> list[torch.Tensor]:
        """Wait for the logits of batches that later stages have computed."""
        return [] if self._shard is None else self._shard.receive_logits(list(num_rows))

    def _batches(self, chunks: Sequence[ChunkRecord]) -> Iterator[list[int]]:
        """Divide chunks into batches of similar lengths; yields their places."""
        if self._batch_invariant:
            yield from ([place] for place in range(len(chunks)))
            return
        batch: list[int] = []
        for place in sorted(range(len(chunks)), key=lambda place: -chunks[place].length):
            length = chunks[place].length
            longest = chunks[batch[0]].length if batch else 0  # and no later chunk is longer
            if longest > max(_SHORT, _MOST_PADDING * length) or longest > length == 1:
                yield batch
                batch = []
            batch.append(place)
        if batch:
            yield batch

    def _forward(self, batch: Sequence[ChunkRecord]) -> torch.Tensor | None:
        """Return the logits of the last token of each row, (rows, vocabulary); None before the last stage."""
        rows = np.array([chunk.row for chunk in batch])
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
        tables = [chunk.table for chunk in batch]
        is_single = query_length == 1 and not self._batch_invariant and bool(starts.any())  # else nothing is read
        in_pages = self._in_pages(rows, ends) if is_single and not self._cache.has_gathered else None
        is_kept = is_single and in_pages is None
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
                in_pages=in_pages,
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
        with torch.no_grad(), attention_in_pages(self._configs, in_pages):
            outputs = self._forward_of_model(**arguments)
        if is_kept:
            self._last_tables, self._last_ends = tables, ends
            self._spare_columns = self._spare_columns - 1 if continues else _SPARE_COLUMNS
        return None if outputs is None else outputs.logits[:, -1]

    def _in_pages(self, rows: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> PagedBatch | None:
        if not self._configs:
            return None
        tokens = PagedTokens(torch.from_numpy(self._slots), torch.from_numpy(rows), torch.from_numpy(ends))
        return PagedBatch(tokens, int(ends.max()))

    def _continues(self, tables: list[int], starts: np.ndarray[Any, Any]) -> bool:
        """Whether a batch has the rows of the last one that computed one token a row, with this token behind them."""
        return tables == self._last_tables and self._spare_columns > 0 and bool((starts == self._last_ends).all())

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
