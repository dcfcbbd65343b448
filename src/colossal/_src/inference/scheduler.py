"""Which sequences a step computes, and how many tokens of each.

There is no phase of prompts and none of outputs: a sequence has tokens whose keys and values are missing, and a step
computes some of them under a budget that all sequences share. The first step of a prompt, one of its later chunks, the
tokens behind a shared prefix, one more token of an output, and what a preemption threw away, are the same to a plan.
"""

import math
from collections import deque
from dataclasses import dataclass

from colossal._src.inference.chunking import Chunking
from colossal._src.inference.pages import ROOT_HASH, PagePool, hash_page
from colossal._src.inference.requests import Sequence, State


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence in one step: `length` of them from position `start`."""

    sequence: Sequence
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        """Whether the logits of its last token say which one comes next."""
        return self.start + self.length == self.sequence.num_tokens


StepPlan = tuple[Chunk, ...]
"""The chunks of one step, those of the longest running sequence first."""


class Scheduler:
    """Admits sequences in the order in which they came, plans steps, and takes pages back from the last ones.

    `output_reserve` is the part of the outputs still to come for which pages must be free before another sequence is
    admitted: with 1 none is ever preempted, with 0 only those are reserved that hold tokens already.
    """

    def __init__(
        self,
        pool: PagePool,
        chunking: Chunking,
        *,
        max_batch_size: int,
        max_tokens: int,
        output_reserve: float = 0.5,
        shares_prefixes: bool = True,
    ) -> None:
        self.pool = pool
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_hit_tokens = 0
        self.num_admitted_tokens = 0
        self.num_preempted = 0
        self._chunking = chunking
        self._max_tokens = max_tokens
        self._output_reserve = output_reserve
        self._shares_prefixes = shares_prefixes
        self._free_rows = list(reversed(range(max_batch_size)))

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        self.waiting.append(sequence)

    def can_hold(self, sequence: Sequence) -> bool:
        """Whether the pool has pages for the longest output, were the sequence alone."""
        return self.pool.pages_for(sequence.max_length) <= self.pool.num_pages

    def plan(self) -> StepPlan:
        """Plan a step, and allocate its pages; empty if nothing waits."""
        chunks: list[Chunk] = []
        budget = self._max_tokens
        preempted_before = self.num_preempted
        for sequence in list(self.running):
            length = self._chunking.next_tokens(sequence, budget)
            if sequence.state is State.RUNNING and length and self._make_room(sequence, length):
                chunks.append(Chunk(sequence, sequence.num_computed, length))
                budget -= length
        # A sequence that was just preempted is the first that waits: its pages would be taken back in the next step.
        while budget > 0 and self.num_preempted == preempted_before and (sequence := self._next_admitted()):
            self._admit(sequence)
            length = self._chunking.next_tokens(sequence, budget)
            self._allocate(sequence, length)
            chunks.append(Chunk(sequence, sequence.num_computed, length))
            budget -= length
        return tuple(chunks)

    def advance(self, plan: StepPlan) -> None:
        """Take note that the tokens of a plan are in the pages, and let others find the pages that are full."""
        for chunk in plan:
            sequence = chunk.sequence
            sequence.num_computed = chunk.start + chunk.length
            shareable = min(sequence.num_computed, self._shareable_tokens(sequence))
            first = chunk.start // self.pool.page_size
            for index in range(first, shareable // self.pool.page_size):
                self.pool.register(sequence.table[index], self._hash(sequence, index))

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence, wherever it is, and take its pages back."""
        if sequence.state is State.RUNNING:
            self._stop(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED
        sequence.finish_reason = reason

    def restart(self) -> None:
        """Let all sequences be computed anew, as no page holds what new weights would compute."""
        while self.running:
            self._preempt_last()
        self.pool.forget_prefixes()

    def check_integrity(self) -> None:
        """Compare the pool with the tables of all sequences."""
        self.pool.check_integrity(sequence.table for sequence in (*self.running, *self.waiting))

    # ------------------------------------------------------------------------------------------ questions

    def _next_admitted(self) -> Sequence | None:
        """The first sequence that waits for nothing but room, if there is room."""
        ready = (each for each in self.waiting if each.leader is None or _has_prompt(each.leader))
        sequence = next(ready, None) if self._free_rows else None
        if sequence is None or not self.running:  # alone it always has room: see `can_hold`
            return sequence
        shared = self._match(sequence)
        needed = self._pages_to_come(sequence) - len(shared) + sum(map(self._pages_to_come, self.running))
        return sequence if self.pool.can_allocate(needed, shared) else None

    def _pages_to_come(self, sequence: Sequence) -> int:
        """How many pages a sequence needs besides its own, for its tokens and a part of those that may follow."""
        future = math.ceil(self._output_reserve * (sequence.max_length - sequence.num_tokens))
        return max(self.pool.pages_for(sequence.num_tokens + future) - len(sequence.table), 0)

    def _match(self, sequence: Sequence) -> list[int]:
        """Find the pages of the longest prefix that others computed; the last token is computed in any case."""
        page_size, most = self.pool.page_size, self._shareable_tokens(sequence)
        pages = self.pool.match(self._hash(sequence, index) for index in range(most // page_size))
        limit = min(len(pages) * page_size, sequence.num_tokens - 1)
        return pages[: self._chunking.whole_chunks(limit) // page_size]

    def _shareable_tokens(self, sequence: Sequence) -> int:
        """How many tokens from position 0 have pages that others may use."""
        return self._chunking.shareable_tokens(sequence) if self._shares_prefixes else 0

    def _hash(self, sequence: Sequence, index: int) -> bytes:
        """The hash of a page of a sequence, which is computed once."""
        hashes, page_size = sequence.hashes, self.pool.page_size
        while len(hashes) <= index:
            start = len(hashes) * page_size
            parent = hashes[-1] if hashes else ROOT_HASH
            hashes.append(hash_page(parent, sequence.tokens(start, start + page_size)))
        return hashes[index]

    # ------------------------------------------------------------------------------------------ acts

    def _admit(self, sequence: Sequence) -> None:
        """Let a sequence run, on the pages of a prefix that others computed."""
        shared = self._match(sequence)
        self.pool.share(shared)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.table = shared
        sequence.num_computed = len(shared) * self.pool.page_size
        sequence.row = self._free_rows.pop()
        sequence.state = State.RUNNING
        self.num_hit_tokens += sequence.num_computed
        self.num_admitted_tokens += sequence.num_tokens

    def _make_room(self, sequence: Sequence, length: int) -> bool:
        """Allocate pages for more tokens, from the last sequences where none are free; False if it was itself last."""
        while not self.pool.can_allocate(self._missing_pages(sequence, length)):
            if self._preempt_last() is sequence:
                return False
        self._allocate(sequence, length)
        return True

    def _preempt_last(self) -> Sequence:
        """Take the pages of the last sequence back, which waits until it is computed again."""
        last = self.running[-1]
        self._stop(last)
        last.state = State.WAITING
        self.waiting.appendleft(last)
        self.num_preempted += 1
        return last

    def _missing_pages(self, sequence: Sequence, length: int) -> int:
        return max(self.pool.pages_for(sequence.num_computed + length) - len(sequence.table), 0)

    def _allocate(self, sequence: Sequence, length: int) -> None:
        sequence.table.extend(self.pool.allocate(self._missing_pages(sequence, length)))

    def _stop(self, sequence: Sequence) -> None:
        """Take row and pages of a sequence back."""
        self.running.remove(sequence)
        self.pool.release(sequence.table)
        self._free_rows.append(sequence.row)
        sequence.table, sequence.num_computed, sequence.row = [], 0, -1


def _has_prompt(sequence: Sequence) -> bool:
    """Whether the pages of the prompt can be shared, or never will be."""
    return sequence.is_finished or sequence.num_computed >= len(sequence.prompt)
