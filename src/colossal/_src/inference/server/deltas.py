"""What is new in outputs that hold everything so far."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from colossal._src.inference.requests import RequestOutput, TokenLogprob


@dataclass(frozen=True)
class Delta:
    """What has come to one choice of an answer."""

    index: int  # of the choice: prompts in their order, each with its n outputs
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None
    offset: int  # characters before the text
    is_first: bool  # of the choice


class DeltaReader:
    """Remembers how much of each choice has been read."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._num_characters: dict[int, int] = defaultdict(int)
        self._num_logprobs: dict[int, int] = defaultdict(int)
        self._begun: set[int] = set()
        self._finished: set[int] = set()

    def read(self, outputs: Sequence[RequestOutput | None]) -> Iterator[Delta]:
        """Yield what is new; nothing for a token that is not a character yet."""
        for number, output in enumerate(outputs):
            for choice in () if output is None else output.outputs:
                index = number * self._n + choice.index
                start, first = self._num_characters[index], self._num_logprobs[index]
                logprobs = (choice.logprobs or ())[first:]
                if index in self._finished or not (len(choice.text) > start or logprobs or choice.finish_reason):
                    continue
                self._num_characters[index], self._num_logprobs[index] = len(choice.text), first + len(logprobs)
                if choice.is_finished:
                    self._finished.add(index)
                is_first = index not in self._begun
                self._begun.add(index)
                yield Delta(index, choice.text[start:], logprobs, choice.finish_reason, start, is_first)
