"""OPT models by their documented names, and their checkpoints in each documented form."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colossal.errors import CheckpointError, ConfigError
from colossal.logging import get_dist_logger

OPT_SIZES: Mapping[str, tuple[int, int, int]] = {
    "opt_125M": (12, 768, 12),
    "opt_6B": (32, 4096, 32),
    "opt_30B": (48, 7168, 56),
    "opt_66B": (64, 9216, 72),
    "opt_175B": (96, 12288, 96),
}
"""Layers, hidden size and heads."""

_TIED = {"lm_head.weight"}
_UNUSED = ("decoder.version", "decoder.output_projection.weight")  # the latter is that of the embedding


def load_opt(model_class: str | Callable[[], Any] | None, checkpoint: Path | None, *, half: bool) -> Any:
    """Load a model.

    Args:
        model_class: A documented name, or a function that returns the `OPTConfig` of another size; None for a
            directory of Hugging Face, whose own configuration is read.
        checkpoint: A directory of Hugging Face, a file `restored.pt` of metaseq, or a folder with fragments of one.
        half: Whether parameters are in float16.

    Returns:
        A directory of Hugging Face as it is, or the model in evaluation mode.

    Raises:
        ConfigError: There is no such class, or neither class nor checkpoint.
        CheckpointError: Files are missing, hold other objects than tensors, or are those of another model.
    """
    if checkpoint is not None and (checkpoint / "config.json").is_file():
        return checkpoint
    from transformers import OPTForCausalLM

    model: Any = OPTForCausalLM(_config(model_class))
    model = model.half() if half else model.float()
    if checkpoint is None:
        get_dist_logger().warning("The configuration file names no checkpoint: the model has random weights")
    else:
        _fill(model, dict(_renamed(_read(checkpoint))), checkpoint)
    return model.eval()


def _config(model_class: str | Callable[[], Any] | None) -> Any:
    from transformers import OPTConfig

    if model_class is not None and not isinstance(model_class, str):
        return model_class()
    if model_class is None or model_class not in OPT_SIZES:
        raise ConfigError(
            f"model_class is one of {', '.join(OPT_SIZES)}, or a function that returns an OPTConfig. Found "
            f"{model_class!r}. Name the class of the checkpoint; one of Hugging Face needs none."
        )
    layers, hidden, heads = OPT_SIZES[model_class]
    return OPTConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_dim=4 * hidden,
        word_embed_proj_dim=hidden,
    )


def _read(checkpoint: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, or of all files of a folder. Nothing that they hold is run."""
    files = sorted(checkpoint.glob("*.pt")) if checkpoint.is_dir() else [checkpoint]
    if not files or not files[0].is_file():
        raise CheckpointError(
            f"checkpoint is a directory of Hugging Face, a file restored.pt, or a folder of fragments. Found "
            f"{checkpoint}. Name one that is there."
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"A checkpoint that is served holds tensors only: a pickle can run anything when it is loaded. Found "
                f"{file}, which torch.load(weights_only=True) rejects: {error}. If you trust the file, load it once "
                "yourself and save its tensors."
            ) from error
        state = loaded.get("model", loaded) if isinstance(loaded, dict) else {}
        tensors |= {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors


def _renamed(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Give the tensors of metaseq their names of Hugging Face."""
    for name, value in state.items():
        new = name.removeprefix("model.")
        if new in _UNUSED or new == "lm_head.weight":
            continue
        new = new.replace("decoder.layer_norm.", "decoder.final_layer_norm.")
        if ".qkv_proj." not in new:
            yield f"model.{new}", value
            continue
        # Written by a fused layer of metaseq, whose order is not that of its name.
        for part, rows in zip(("k_proj", "v_proj", "q_proj"), value.chunk(3), strict=True):
            yield f"model.{new.replace('qkv_proj', part)}", rows


def _fill(model: Any, state: dict[str, Tensor], checkpoint: Path) -> None:
    expected = {name: value.shape for name, value in model.state_dict().items() if name not in _TIED}
    wrong = sorted(expected.keys() ^ state.keys())
    wrong += [name for name, shape in expected.items() if name in state and state[name].shape != shape]
    if wrong:
        raise CheckpointError(
            f"A checkpoint has the {len(expected)} tensors of the class that model_class names. Found {len(state)} in "
            f"{checkpoint}, where {wrong[0]} is missing, or has another shape, or is of another model. Name the class "
            "of this checkpoint."
        )
    model.load_state_dict(state, strict=False)
    model.tie_weights()
