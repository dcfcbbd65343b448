"""Requests while they are generated, and what comes out of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from colossal._src.inference.sampling_params import SamplingParams


class State(Enum):
    """Where a sequence is on its way."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of one token of an output.

    Args:
        token_id: The token.
        logprob: Its log-probability under the model.
        top: Log-probabilities of the most probable tokens by token, the highest first.

    Example:
        >>> from colossal.inference import TokenLogprob
        >>> TokenLogprob(token_id=7, logprob=-0.5, top={7: -0.5}).logprob
        -0.5
    """

    token_id: int
    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True)
class CompletionOutput:
    """One of the `n` outputs of a request, as far as it is generated.

    Args:
        index: Which of them.
        token_ids: All tokens so far, the one that ends it included.
        text: All text so far. What may turn out to be the beginning of a stop string is kept back until that is known.
        logprobs: One entry a token, or None where none were asked for.
        finish_reason: `"stop"` after an end-of-sequence token, a stop token or a stop string, `"length"` after
            `max_tokens`, `"abort"`, or None while it is generated.

    Example:
        >>> from colossal.inference import CompletionOutput
        >>> CompletionOutput(index=0, token_ids=(5, 6), text="a b", finish_reason="length").is_finished
        True
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether no token will follow."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """What there is of a request after a step.

    Args:
        request_id: Of the request.
        prompt: Its text, or None if it was given as tokens.
        prompt_token_ids: Its tokens.
        outputs: One for each of `n`.

    Example:
        >>> from colossal.inference import CompletionOutput, RequestOutput
        >>> RequestOutput(0, "a", (5,), (CompletionOutput(0, (6,), "b"),)).is_finished
        False
    """

    request_id: int | str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]

    @property
    def is_finished(self) -> bool:
        """Whether no token will follow in any output."""
        return all(output.is_finished for output in self.outputs)


@dataclass(eq=False)
class Sequence:
    """The tokens of a prompt and of one output, and the pages that hold their keys and values.

    Tokens before `num_computed` are in the pages. All counts follow from these fields, so that nothing is stored twice.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    end_tokens: frozenset[int] = frozenset()
    index: int = 0
    outputs: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    row: int = -1
    state: State = State.WAITING
    finish_reason: str | None = None
    leader: "Sequence | None" = None
    """Of the same request: computes the pages of the prompt, which the others share."""

    @property
    def num_tokens(self) -> int:
        """Of prompt and output."""
        return len(self.prompt) + len(self.outputs)

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys and values are not in the pages; the last one always is among them."""
        return self.num_tokens - self.num_computed

    @property
    def max_length(self) -> int:
        """Tokens at the end of the longest output."""
        return len(self.prompt) + self.max_tokens

    @property
    def is_finished(self) -> bool:
        """Whether no token will follow."""
        return self.state is State.FINISHED

    def tokens(self, start: int, stop: int) -> list[int]:
        """The tokens of prompt and output at positions from `start` to `stop`."""
        split = len(self.prompt)
        return [*self.prompt[start:stop], *self.outputs[max(start - split, 0) : max(stop - split, 0)]]

    def reason_to_finish(self) -> str | None:
        """Why the last token ends the output, as far as tokens can say."""
        if self.outputs[-1] in self.end_tokens:
            return "stop"
        return "length" if len(self.outputs) >= self.max_tokens else None
