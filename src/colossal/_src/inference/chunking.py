"""How many tokens of a sequence are computed in one step.

[Note: shapes of a request alone]
A matrix product may round differently if it has more rows, so bits of a request depend on how many of its tokens are
computed at once. If that depends on what else a step computes, so do the bits. `FixedChunks` derives it from the prompt
alone: chunks of a fixed length from position 0, then one token at a time, after a preemption too. A page may then be
shared only between sequences that compute it in equal chunks: those that lie within one of full length.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from colossal._src.inference.requests import Sequence


class Chunking(ABC):
    """Decides how many tokens are computed, and which of them others may share."""

    @abstractmethod
    def next_tokens(self, sequence: Sequence, budget: int) -> int:
        """How many tokens of a sequence the next step computes, if that many may be; 0 for none."""

    @abstractmethod
    def shareable_tokens(self, sequence: Sequence) -> int:
        """How many tokens from position 0 have keys and values that any sequence with these tokens would compute."""

    @abstractmethod
    def whole_chunks(self, num_tokens: int) -> int:
        """Where the last chunk ends of so many tokens that are in pages."""


class AnyChunks(Chunking):
    """As many tokens as the budget has."""

    def next_tokens(self, sequence: Sequence, budget: int) -> int:
        """All that are missing, or the budget."""
        return min(sequence.num_uncomputed, budget)

    def shareable_tokens(self, sequence: Sequence) -> int:
        """All of them."""
        return sequence.num_tokens

    def whole_chunks(self, num_tokens: int) -> int:
        """A chunk may end anywhere."""
        return num_tokens


@dataclass(frozen=True)
class FixedChunks(Chunking):
    """Chunks of one length for the prompt, then one token at a time, whatever else a step computes."""

    length: int

    def next_tokens(self, sequence: Sequence, budget: int) -> int:
        """A full chunk, which the budget does not split: it only says whether there is another one in this step."""
        if budget < 1:
            return 0
        missing_prompt = len(sequence.prompt) - sequence.num_computed
        return min(self.length, missing_prompt) if missing_prompt > 0 else 1

    def shareable_tokens(self, sequence: Sequence) -> int:
        """Those of the full chunks of the prompt."""
        return len(sequence.prompt) // self.length * self.length

    def whole_chunks(self, num_tokens: int) -> int:
        """The last multiple of the length."""
        return num_tokens // self.length * self.length
