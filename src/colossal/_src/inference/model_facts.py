"""What an engine needs to know of a model."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from colossal._src.inference.config import InferenceConfig
from colossal._src.lazy import LazyInitContext
from colossal.errors import ConfigError, UnsupportedError


def load_model(path: str, tokenizer: Any, dtype: torch.dtype | None, *, lazily: bool = False) -> tuple[Any, Any]:
    """Load a model of transformers from a folder, and its tokenizer if none is given and the folder has one.

    If it `lazily` does, weights are read when the model is materialized, after it was sharded. Only safetensors files
    can be read so; others are read in full by every rank.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with LazyInitContext() if lazily and any(Path(path).glob("*.safetensors")) else nullcontext():
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto" if dtype is None else dtype).eval()
    if tokenizer is None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError):  # the folder has none; a prompt of text says so
            tokenizer = None
    return model, tokenizer


def checked_config(tokenizer: Any, config: object) -> InferenceConfig:
    """The configuration that was given, or the default; refuse other objects, and one in the place of a tokenizer."""
    if not isinstance(config, InferenceConfig | None) or isinstance(tokenizer, InferenceConfig):
        found = f"tokenizer={tokenizer!r}" if isinstance(tokenizer, InferenceConfig) else f"inference_config={config!r}"
        raise ConfigError(
            f"An engine takes a model, a tokenizer or None, and an InferenceConfig. Found {found}. Write "
            "InferenceEngine(model, tokenizer, InferenceConfig(...)), or inference_config=InferenceConfig(...)."
        )
    return InferenceConfig() if config is None else config


def default_config(model: Any) -> InferenceConfig:
    """The default configuration, with shorter prompts and outputs where the model has fewer positions."""
    config, most = InferenceConfig(), num_positions(model.config)
    if most is None or config.max_length <= most:
        return config
    return InferenceConfig(max_input_len=max(most - most // 2, 1), max_output_len=max(most // 2, 1))


def num_positions(model_config: Any) -> int | None:
    """How many tokens a sequence in a batch may have; None if there is no limit."""
    config = model_config.get_text_config(decoder=True)
    limits = (getattr(config, "max_position_embeddings", None), _short_positions(config))
    return min((most for most in limits if most is not None), default=None)


def _short_positions(config: Any) -> int | None:
    """How many tokens a sequence has before longrope turns all keys by other frequencies; None for other models."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = (rope, *(each for each in rope.values() if isinstance(each, dict)))  # of the model, or a kind of layer
    limits = [each.get("original_max_position_embeddings") for each in kinds if each.get("rope_type") == "longrope"]
    return min((most for most in limits if most is not None), default=None)


def check_length(model: Any, config: InferenceConfig) -> None:
    """Reject a configuration that does not fit the model."""
    dtype = next(model.parameters()).dtype
    if config.dtype not in (None, dtype):
        raise ConfigError(
            f"A model that is loaded already is used as it is. Found dtype={config.dtype} for parameters in {dtype}. "
            f"Cast it by model.to({config.dtype}), or leave dtype out."
        )
    most = num_positions(model.config)
    if most is None or config.max_length <= most:
        return
    name, instead = type(model).__name__, "Lower one of them."
    found = (
        f"max_input_len={config.max_input_len} and max_output_len={config.max_output_len}, together {config.max_length}"
    )
    if most == _short_positions(model.config.get_text_config(decoder=True)):
        # the longest sequence decides for its whole batch, and keys in the pages are turned already
        raise UnsupportedError(
            f"With longrope, {name} computes sequences of up to {most} tokens and longer ones by different "
            f"frequencies: they cannot be in one batch. Found {found}. {instead} Or call generate of the model."
        )
    raise ConfigError(f"{name} has {most} positions. Found {found}. {instead}")


def pad_token_of(model: Any, tokenizer: Any) -> int | None:
    """The token that batches are padded with, of the tokenizer, or of the model where there is none."""
    source = model.config.get_text_config(decoder=True) if tokenizer is None else tokenizer
    return getattr(source, "pad_token_id", None)


def end_tokens_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """The end-of-sequence tokens of a model, wherever they are said: a generation config may lack them."""
    sources = (getattr(model, "generation_config", None), model.config.get_text_config(decoder=True), tokenizer)
    ends: set[int] = set()
    for source in sources:
        found = getattr(source, "eos_token_id", None)
        ends.update([found] if isinstance(found, int) else found or ())
    return frozenset(ends)
