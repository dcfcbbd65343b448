"""Loads what a server serves."""

from dataclasses import replace
from pathlib import Path

from colossal._src.inference.config import InferenceConfig
from colossal._src.inference.engine import InferenceEngine
from colossal._src.inference.online.fitting import fit_config
from colossal._src.inference.server.settings import ServerSettings
from colossal.accelerator import get_current_device
from colossal.errors import ConfigError


def load_engine(settings: ServerSettings) -> InferenceEngine:
    """Load model and tokenizer, and build an engine of the greatest lengths that fit.

    Raises:
        ConfigError: There is no model, or lengths do not fit it.
        UnsupportedError: It is none that the engine can generate with, or ranks cannot shard it.
    """
    config = InferenceConfig(
        max_batch_size=settings.max_batch_size,
        dtype=settings.dtype,
        tp_size=settings.tp_size,
        pp_size=settings.pp_size,
    )
    tokenizer = None if settings.tokenizer is None else _load_tokenizer(settings.tokenizer)
    model = settings.model
    if isinstance(model, str | Path):
        if not (Path(model) / "config.json").is_file():
            raise ConfigError(
                f"A directory of Hugging Face with a config.json is served. Found none in {model}. Save the model "
                "there by save_pretrained, and its tokenizer."
            )
        model_config = _load_config(model)
    else:
        model_config = model.config
        if config.num_ranks == 1:  # else each rank moves its shard
            model.to(get_current_device())
    fitted = fit_config(
        model_config, config, max_input_len=settings.max_input_len, max_output_len=settings.max_output_len
    )
    return InferenceEngine(model, tokenizer, replace(fitted, num_blocks=settings.num_blocks))


def _load_config(path: str | Path) -> object:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path)


def _load_tokenizer(path: str | Path) -> object:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)
