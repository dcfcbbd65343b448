"""How much an engine holds and computes at once."""

from dataclasses import dataclass, fields
from typing import Any

import torch

from colossal._src.interface import is_integer
from colossal.errors import ConfigError

_NAMES: Any = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_CHUNK = 256
"""Tokens of a step by default, where no prompt is longer."""


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """How much an `InferenceEngine` holds and computes at once.

    Args:
        max_batch_size: The most sequences that are computed in one step.
        max_input_len: The most tokens of a prompt.
        max_output_len: The most tokens of an output, and how many there are if a request does not say.
        max_tokens_per_step: The most tokens that are computed in one step, of prompts and outputs together; a longer
            prompt is computed in several. None takes 256, or `max_batch_size` if that is more.
        block_size: The tokens of a page of keys and values.
        num_blocks: The pages of all sequences together. None takes as many as `max_batch_size` sequences of the
            greatest length need.
        output_reserve: For which part of the outputs still to come pages have to be free before another request is
            admitted. With 1 no request is preempted, and fewer run at once.
        prefix_cache: Whether pages are used again for prompts that begin with the same tokens.
        batch_invariant: Whether tokens and log-probabilities of a request are the same, bit by bit, whatever else is
            computed with it. Each sequence is then a batch of its own, which costs as much as requests one by one.
        dtype: Of parameters, and so of keys and values, of a model that is loaded; None for that of its files. Also
            by its name, ``"fp32"``, ``"fp16"`` or ``"bf16"``.
        tp_size: Ranks that shard the model, by the tables of Shardformer; each has the pages of its own heads.
        pp_size: Stages of the model, each on `tp_size` ranks, which have its layers and their pages.

    Raises:
        ConfigError: A value is out of range, or of another type.

    Example:
        >>> from colossal.inference import InferenceConfig
        >>> InferenceConfig(max_batch_size=16, max_input_len=64, max_output_len=64).total_blocks
        128
    """

    max_batch_size: int = 8
    max_input_len: int = 256
    max_output_len: int = 256
    max_tokens_per_step: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    output_reserve: float = 0.5
    prefix_cache: bool = True
    batch_invariant: bool = False
    dtype: torch.dtype | None = None
    tp_size: int = 1
    pp_size: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _NAMES.get(self.dtype, self.dtype))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", int) or (field.type in ("int | None", int | None) and value is not None):
                self._check(field.name, "an integer of at least 1", is_integer(value, 1))
            elif field.type in ("bool", bool):
                self._check(field.name, "True or False", isinstance(value, bool))
        is_part = isinstance(self.output_reserve, int | float) and 0 <= self.output_reserve <= 1
        self._check("output_reserve", "a number from 0 to 1", is_part)
        is_dtype = self.dtype is None or isinstance(self.dtype, torch.dtype)
        self._check("dtype", "a torch.dtype, its name among 'fp32', 'fp16' and 'bf16', or None", is_dtype)
        if self.step_tokens < self.max_batch_size:
            raise ConfigError(
                "A step has at least one token for each sequence of the batch. Found "
                f"max_tokens_per_step={self.max_tokens_per_step} and max_batch_size={self.max_batch_size}. Raise "
                "max_tokens_per_step, or lower max_batch_size."
            )
        if self.total_blocks < self.longest_blocks:
            raise ConfigError(
                f"All pages together hold at least one sequence of {self.max_length} tokens: num_blocks is at least "
                f"{self.longest_blocks}. Found num_blocks={self.num_blocks} of block_size={self.block_size}. Raise "
                "num_blocks, or lower max_input_len or max_output_len."
            )

    @property
    def num_ranks(self) -> int:
        """Ranks that have the model together."""
        return self.tp_size * self.pp_size

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_input_len + self.max_output_len

    @property
    def longest_blocks(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_length // self.block_size)

    @property
    def total_blocks(self) -> int:
        """Pages of all sequences together."""
        return self.max_batch_size * self.longest_blocks if self.num_blocks is None else self.num_blocks

    @property
    def step_tokens(self) -> int:
        """The most tokens of a step."""
        return max(_CHUNK, self.max_batch_size) if self.max_tokens_per_step is None else self.max_tokens_per_step

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk of a prompt where chunks have one length, a multiple of `block_size`."""
        return max(self.step_tokens // self.block_size, 1) * self.block_size

    def _check(self, name: str, required: str, is_right: bool) -> None:
        if not is_right:
            found: Any = getattr(self, name)
            raise ConfigError(
                f"{name} of InferenceConfig is {required}. Found {found!r}. Pass another {name}, or leave it out."
            )
