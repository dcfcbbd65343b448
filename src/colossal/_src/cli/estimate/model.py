"""The model of a directory of Hugging Face, without values: from its configuration, or from its weights' headers."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from colossal.errors import ConfigError, UnsupportedError

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
_DEFAULT_LENGTH = 2048
_PER_SAMPLE = ("ForSequenceClassification", "ForImageClassification")


@final
@dataclass(frozen=True)
class ModelSource:
    """How to build the model, and what it takes."""

    build: Callable[[], nn.Module]  # called on the meta device
    batch_of: Callable[[nn.Module, int, int], dict[str, torch.Tensor]]  # of a model, for samples and tokens
    length: int  # tokens of a sample, unless others are asked for
    has_layers: bool  # whether there is more than parameters: activations, and layers to split


def read_model(directory: Path) -> ModelSource:
    """Find out what is in a directory."""
    if (directory / CONFIG).is_file():
        return _from_config(directory)
    shapes = _read_shapes(directory)
    return ModelSource(partial(_Weights, shapes), lambda *_: {"inputs": torch.zeros(1, device="meta")}, 1, False)


def loss_of(outputs: Any, _batch: Any) -> torch.Tensor:
    """Return the loss of a model, or of a base model something that a loss could be computed from."""
    loss = outputs if isinstance(outputs, torch.Tensor) else getattr(outputs, "loss", None)
    return outputs[0].float().mean() if loss is None else loss


def _from_config(directory: Path) -> ModelSource:
    import transformers

    try:
        config: Any = transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(
            f"{directory / CONFIG} describes a model that transformers knows. Found: {str(error).splitlines()[0]} "
            "Pass the directory of such a model, or one with safetensors files alone."
        ) from error
    name = next(iter(getattr(config, "architectures", None) or ()), None)
    model_class: Any = transformers.AutoModelForCausalLM if name is None else getattr(transformers, name, None)
    if model_class is None:
        raise UnsupportedError(
            f"transformers {transformers.__version__} has the class of the model. Found architectures: {name} in "
            f"{directory / CONFIG}. Update transformers, or name a class that it has."
        )
    if hasattr(config, "use_cache"):
        config.use_cache = False  # training has no use for it
    build = partial(model_class.from_config if name is None else model_class._from_config, config, dtype=torch.float32)  # noqa: SLF001 (its public name is that of another class)
    longest = getattr(config, "max_position_embeddings", None) or _DEFAULT_LENGTH
    return ModelSource(build, partial(_batch, config), min(_DEFAULT_LENGTH, longest), True)


def _batch(config: Any, model: nn.Module, samples: int, tokens: int) -> dict[str, torch.Tensor]:
    """Make the inputs of a model."""
    main = getattr(model, "main_input_name", None)
    empty = partial(torch.zeros, dtype=torch.int64, device="meta")
    batch = {"input_ids": empty(samples, tokens)}
    if main == "pixel_values":
        side = config.image_size
        size = (side, side) if isinstance(side, int) else tuple(side)
        batch = {main: torch.zeros(samples, config.num_channels, *size, device="meta")}
    elif main != "input_ids":
        raise UnsupportedError(
            f"A step is planned for models of tokens or images. Found {type(model).__name__}, which takes {main}. "
            "Use colossal.booster.plugin.plan_step, which takes any batch."
        )
    if "labels" in inspect.signature(model.forward).parameters:
        per_sample = type(model).__name__.endswith(_PER_SAMPLE)
        batch["labels"] = empty(samples) if per_sample else empty(samples, tokens)
    return batch


@final
class _Weights(nn.Module):
    """Parameters of these shapes, each of them used."""

    def __init__(self, shapes: Mapping[str, list[int]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes.values())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Add up all parameters."""
        return torch.stack([each.sum() for each in self.weights]).sum() + inputs.sum()


def _read_shapes(directory: Path) -> dict[str, list[int]]:
    """Read the shapes of all tensors from the headers of safetensors files."""
    files = sorted(directory.glob("*.safetensors"))
    if (directory / INDEX).is_file():
        weight_map = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = [directory / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if not files or missing:
        found = f"{INDEX}, but not {missing[0]}" if missing else "neither"
        raise ConfigError(
            f"A model is described by {CONFIG}, or by safetensors files. Found {found} in {directory}. Pass a directory"
            " that save_pretrained wrote, or that was downloaded from the Hugging Face Hub."
        )
    return {name: shape for file in files for name, shape in _shapes_in(file).items()}


def _shapes_in(file: Path) -> dict[str, list[int]]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as stored:
        return {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118 (no mapping)
