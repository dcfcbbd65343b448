"""The configuration files that are stored next to the weights of a transformers model."""

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from colossal._src.checkpoint_io.index_and_names import ADAPTER_CONFIG_FILE
from colossal._src.interface import active_adapter, full_spec_of, model_without_adapters
from colossal.errors import CheckpointError


def model_config_files(model: nn.Module) -> dict[str, Callable[[Path], object]]:
    """Prepare the configuration of a model that has one.

    The names of the class and of the dtype are filled in on a copy, as ``from_pretrained`` expects them.
    """
    configs: list[Any] = []
    local_model, full_spec = model, full_spec_of(model)
    model = model_without_adapters(model if full_spec is None else full_spec.roots[0])
    # what is set below is for the file, not for the model that trains on
    config: Any = copy.deepcopy(getattr(model, "config", None) if full_spec is None else full_spec.config)
    if hasattr(config, "save_pretrained"):
        config.architectures = [_class_name(model)]
        config.dtype = str(getattr(model, "dtype", "float32")).removeprefix("torch.")
        configs.append(config)
        can_generate: Any = getattr(model, "can_generate", bool)
        configs.extend([model.generation_config] if can_generate() else [])
    with tempfile.TemporaryDirectory() as directory:
        for each in configs:
            _save(each, directory)
        texts = {entry.name: entry.read_bytes() for entry in Path(directory).iterdir()}
    files: dict[str, Callable[[Path], object]] = {name: partial(_write, text) for name, text in texts.items()}
    return files | adapter_config_file(local_model)


def adapter_config_file(model: nn.Module) -> dict[str, Callable[[Path], object]]:
    """Prepare the configuration of a model's adapters, as peft saves it."""
    full_spec = full_spec_of(model)
    root: Any = model if full_spec is None else full_spec.roots[0]
    configs = getattr(root, "peft_config", None)
    if not configs:
        return {}
    config: Any = copy.deepcopy(configs[active_adapter(root)])
    config.inference_mode = True
    if config.task_type is None:
        base = type(model_without_adapters(root))
        config.auto_mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
    with tempfile.TemporaryDirectory() as directory:
        _save(config, directory)
        text = Path(directory, ADAPTER_CONFIG_FILE).read_bytes()
    return {ADAPTER_CONFIG_FILE: partial(_write, text)}


def _class_name(model: nn.Module) -> str:
    """Return the name of the model's class as its author wrote it: `fully_shard` derives one of its own."""
    own = (cls for cls in type(model).__mro__ if not any(base.__name__ == "FSDPModule" for base in cls.__mro__))
    return next(own).__name__


def _write(text: bytes, path: Path) -> None:
    path.write_bytes(text)


def _save(config: Any, directory: str) -> None:
    try:
        config.save_pretrained(directory)
    except Exception as error:
        raise CheckpointError(
            f"Saving a directory includes the model's configuration. Found that its {type(config).__name__} cannot be "
            f"saved: {error}. Correct the configuration, or pass shard=False to save the weights alone."
        ) from error
