"""What a request asks for: how its tokens are chosen, and where it ends."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from colossal._src.interface import is_integer, is_number
from colossal.errors import ConfigError, UnsupportedError

_INFINITY = float("inf")
_NOT_DONE: dict[str, Any] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "typical_p", "encoder_repetition_penalty", "guidance_scale"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "diversity_penalty"), 0),
    **dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), False),
    **dict.fromkeys(("token_healing", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"), False),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "force_words_ids"), None),
    **dict.fromkeys(("exponential_decay_length_penalty", "constraints", "watermarking_config"), None),
    **dict.fromkeys(("max_time", "dola_layers", "top_h"), None),
}
"""Options of transformers that change what comes out, with the value at which they do nothing; None is one too."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen, and where it ends.

    Distributions are changed in the order of transformers: penalties, temperature, top-k, top-p, min-p.

    Args:
        temperature: Divides the logits; 0 takes the most probable token.
        top_k: Only so many of the most probable tokens are considered; 0 for all.
        top_p: Only the fewest tokens are considered whose probabilities sum to this.
        min_p: Only tokens are considered that have this part of the probability of the most probable one.
        repetition_penalty: Divides positive logits, and multiplies negative ones, of tokens that are in the prompt or
            in the output.
        presence_penalty: Is subtracted from the logits of tokens that are in the output.
        frequency_penalty: Is subtracted from the logits of tokens as often as they are in the output.
        seed: Of the random numbers of this request alone: the same seed gives the same tokens whatever else is in the
            batch. None takes another one each time.
        logprobs: How many log-probabilities are returned besides that of each token; None for none at all. They are
            those of the model, before penalties and temperature.
        n: How many outputs are generated for the prompt.
        stop: Strings that end an output before they occur in it.
        stop_token_ids: Tokens that end an output, which they belong to.
        max_tokens: The most tokens of an output; None for `max_output_len` of the engine.
        ignore_eos: Whether generation goes on after an end-of-sequence token.

    Raises:
        ConfigError: A value is out of range, or of another type.

    Source: the parameters of the OpenAI API, and those of `transformers.GenerationConfig`.

    Example:
        >>> from colossal.inference import SamplingParams
        >>> SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=32).is_greedy
        False
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1
    stop: Sequence[str] = field(default=())
    stop_token_ids: Sequence[int] = field(default=())
    max_tokens: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        ends = self.stop_token_ids
        object.__setattr__(self, "stop_token_ids", tuple(map(plain, ends if isinstance(ends, Iterable) else (ends,))))
        for each in fields(self):
            object.__setattr__(self, each.name, plain(getattr(self, each.name)))
        self._check_number("temperature", "a number of at least 0", 0.0, _INFINITY)
        self._check_count("top_k", 0)
        self._check_number("top_p", "a number above 0, and at most 1", math.nextafter(0.0, 1.0), 1.0)
        self._check_number("min_p", "a number from 0 to 1", 0.0, 1.0)
        self._check_number("repetition_penalty", "a number above 0", math.nextafter(0.0, 1.0), _INFINITY)
        self._check_number("presence_penalty", "a number", -_INFINITY, _INFINITY)
        self._check_number("frequency_penalty", "a number", -_INFINITY, _INFINITY)
        for name, least in (("logprobs", 0), ("max_tokens", 1)):
            if getattr(self, name) is not None:
                self._check_count(name, least)
        self._check_count("n", 1)
        if self.seed is not None and not is_integer(self.seed):
            raise _wrong("seed", "an integer or None", self.seed)
        if not all(isinstance(each, str) and each for each in self.stop):
            raise _wrong("stop", "strings that are not empty", self.stop)
        if not all(is_integer(each, 0) for each in self.stop_token_ids):
            raise _wrong("stop_token_ids", "integers of at least 0", self.stop_token_ids)
        if not isinstance(self.ignore_eos, bool):
            raise _wrong("ignore_eos", "True or False", self.ignore_eos)

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most probable one."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @classmethod
    def from_generation_config(cls, config: Any, *, prompt_length: int | None = None) -> "SamplingParams":
        """Read a `transformers.GenerationConfig`.

        Args:
            config: The configuration; what it leaves open has the defaults of `generate`, which is greedy. Its
                end-of-sequence tokens take the place of those of the model.
            prompt_length: Tokens of the prompt, which `max_length` counts too.

        Returns:
            Parameters that choose the same tokens.

        Raises:
            ConfigError: It is none, or `max_length` leaves no token for an output, or there is no `prompt_length`.
            UnsupportedError: It asks for beams, or for something else that the engine does not do.

        Example:
            >>> from transformers import GenerationConfig
            >>> from colossal.inference import SamplingParams
            >>> SamplingParams.from_generation_config(GenerationConfig(max_new_tokens=8)).is_greedy
            True
        """
        if not hasattr(config, "do_sample"):
            raise ConfigError(
                "A request has SamplingParams, or a GenerationConfig of transformers. Found "
                f"{config!r}. Write SamplingParams(max_tokens=...)."
            )

        def option(name: str, default: Any) -> Any:
            found = getattr(config, name, None)
            return default if found is None else found

        for name, neutral in _NOT_DONE.items():
            if option(name, neutral) not in (neutral, [], {}):
                raise UnsupportedError(
                    f"The engine samples or takes the most probable token. Found {name}={getattr(config, name)!r} in "
                    f"the generation config. Leave {name} out, or call generate of the model."
                )
        samples = option("do_sample", default=False)
        ends = option("eos_token_id", ())
        max_tokens, max_length = option("max_new_tokens", None), option("max_length", None)
        if max_tokens is None and max_length is not None:
            if prompt_length is None or prompt_length >= max_length:
                raise ConfigError(
                    "max_length counts the tokens of a prompt and at least one of its output. Found "
                    f"max_length={max_length} and {prompt_length or 'an unknown number of'} tokens of the prompt. Pass "
                    "max_new_tokens instead."
                )
            max_tokens = max_length - prompt_length
        return cls(
            temperature=option("temperature", 1.0) if samples else 0.0,
            top_k=option("top_k", 50) if samples else 0,
            top_p=option("top_p", 1.0) if samples else 1.0,
            min_p=option("min_p", 0.0) if samples else 0.0,
            repetition_penalty=option("repetition_penalty", 1.0),
            n=option("num_return_sequences", 1),
            stop=option("stop_strings", ()),
            stop_token_ids=ends,
            ignore_eos=ends != (),
            max_tokens=max_tokens,
        )

    def _check_number(self, name: str, required: str, least: float, most: float) -> None:
        value = getattr(self, name)
        if not is_number(value, least) or value > most or math.isinf(value):
            raise _wrong(name, required, value)

    def _check_count(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not is_integer(value, least):
            raise _wrong(name, f"an integer of at least {least}", value)


def plain(value: Any) -> Any:
    """Return the number of numpy or of a tensor that is given in place of one of Python."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _wrong(name: str, required: str, found: object) -> ConfigError:
    return ConfigError(
        f"{name} of SamplingParams is {required}. Found {found!r}. Pass another {name}, or leave it out."
    )
