"""What a step computes, as numbers that every rank can be sent.

A record holds what is new: the tokens of the chunks, and the pages that their rows did not have before. A runner keeps
the rest in its rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from colossal._src.inference.scheduler import StepPlan

Integers = np.ndarray[Any, np.dtype[np.int64]]

_COLUMNS = 7


@dataclass(frozen=True)
class ChunkRecord:
    """Tokens of one sequence: `length` of them from position `start`, in a row of the runner."""

    row: int
    start: int
    length: int
    is_last: bool  # whether the logits of the last token are of interest
    table: int  # number of the table of pages; another one begins with no pages
    num_known_pages: int  # pages that the table had before
    num_pages: int  # pages that are new


@dataclass(frozen=True)
class StepRecord:
    """The chunks of a step, and their new tokens and pages, one chunk after the other."""

    chunks: tuple[ChunkRecord, ...]
    tokens: Integers
    pages: Integers

    def new_values(self) -> Iterator[tuple[ChunkRecord, Integers, Integers]]:
        """Yield each chunk with its tokens and its new pages."""
        token = page = 0
        for chunk in self.chunks:
            last_token, last_page = token + chunk.length, page + chunk.num_pages
            yield chunk, self.tokens[token:last_token], self.pages[page:last_page]
            token, page = last_token, last_page

    def to_integers(self) -> Integers:
        """Write the record as one array."""
        columns = [
            (each.row, each.start, each.length, each.is_last, each.table, each.num_known_pages, each.num_pages)
            for each in self.chunks
        ]
        return np.concatenate([_array([len(columns)]), _array(columns).reshape(-1), self.tokens, self.pages])

    @classmethod
    def from_integers(cls, values: Integers) -> "StepRecord":
        """Read what `to_integers` has written."""
        num_chunks, values = int(values[0]), values[1:]
        rows: list[list[int]] = values[: num_chunks * _COLUMNS].reshape(num_chunks, _COLUMNS).tolist()
        chunks = tuple(
            ChunkRecord(row, start, length, bool(is_last), *pages) for row, start, length, is_last, *pages in rows
        )
        values = values[num_chunks * _COLUMNS :]
        num_tokens = sum(chunk.length for chunk in chunks)
        return cls(chunks, values[:num_tokens], values[num_tokens:])


class StepRecorder:
    """Writes records of plans, and remembers which pages earlier ones had."""

    def __init__(self, num_rows: int) -> None:
        self._tables: list[list[int] | None] = [
            None
        ] * num_rows  # of the sequence in each row: a new one is another list
        self._numbers = [0] * num_rows
        self._num_pages = [0] * num_rows
        self._num_tables = 0

    def record(self, plan: StepPlan) -> StepRecord:
        """Record a plan, whose pages are allocated."""
        chunks: list[ChunkRecord] = []
        tokens: list[int] = []
        pages: list[int] = []
        for chunk in plan:
            sequence, row = chunk.sequence, chunk.sequence.row
            if self._tables[row] is not sequence.table:
                self._tables[row], self._num_pages[row] = sequence.table, 0
                self._num_tables += 1
                self._numbers[row] = self._num_tables
            known = self._num_pages[row]
            new = sequence.table[known:]
            self._num_pages[row] += len(new)
            chunks.append(
                ChunkRecord(row, chunk.start, chunk.length, chunk.is_last, self._numbers[row], known, len(new))
            )
            tokens += sequence.tokens(chunk.start, chunk.start + chunk.length)
            pages += new
        return StepRecord(tuple(chunks), _array(tokens), _array(pages))


def _array(values: Sequence[Any]) -> Integers:
    return np.array(values, dtype=np.int64)
