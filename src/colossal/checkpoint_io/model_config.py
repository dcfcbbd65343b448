"""The configuration files that stand beside the weights of a transformers model."""

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn


@contextmanager
def model_config_files(model: nn.Module) -> Iterator[dict[str, Callable[[Path], object]]]:
    """Prepare the configuration of a model that has one.

    The names of the class and of the dtype are filled in on a copy, as ``from_pretrained`` expects them.

    Args:
        model: Any model; a transformers model is known by its ``config`` with a ``save_pretrained`` method.

    Yields:
        By file name, what writes the file to a path; nothing for a model without a configuration.
    """
    configs: list[Any] = []
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if hasattr(config, "save_pretrained"):
        config.architectures = [type(model).__name__]
        config.dtype = str(getattr(model, "dtype", "float32")).removeprefix("torch.")
        configs.append(config)
        can_generate: Any = getattr(model, "can_generate", bool)
        configs.extend([model.generation_config] if can_generate() else [])
    with tempfile.TemporaryDirectory() as directory:
        for each in configs:
            each.save_pretrained(directory)
        yield {entry.name: partial(shutil.copyfile, entry) for entry in Path(directory).iterdir()}
