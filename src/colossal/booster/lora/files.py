"""The files of saved adapters, which are those of peft."""

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from colossal.checkpoint_io.staging import Staging, prepare_directory
from colossal.errors import CheckpointError

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG = "adapter_config.json"
WEIGHTS = {True: "adapter_model.safetensors", False: "adapter_model.bin"}
"""The names of the files with the adapters; by whether they are safetensors, which peft prefers."""


def read_adapter_config(directory: Path) -> "LoraConfig":
    """Read the configuration of saved adapters, for training on.

    Raises:
        CheckpointError: The directory holds no adapters, or some of another kind.
    """
    from peft import LoraConfig, PeftConfig

    if not (directory / CONFIG).is_file():
        found = "a directory without it" if directory.is_dir() else "no directory"
        raise CheckpointError(
            f"pretrained_dir is a directory with saved adapters, which holds {CONFIG}. Found {found} at {directory}. "
            "Check the path; booster.save_lora_as_pretrained and peft's save_pretrained write such directories."
        )
    weights_in(directory)
    try:
        config = PeftConfig.from_pretrained(str(directory))
    except Exception as error:
        raise CheckpointError(
            f"Adapters need a readable configuration. Found {directory / CONFIG}, which peft cannot read: "
            f"{type(error).__name__}: {error}. Check that it was copied whole."
        ) from error
    if not isinstance(config, LoraConfig):
        raise CheckpointError(
            f"pretrained_dir holds LoRA adapters. Found {config.peft_type} in {directory}. "
            "Load those by peft.PeftModel.from_pretrained, and boost the result."
        )
    config.inference_mode = False
    config.base_model_name_or_path = None  # the model at hand decides; its name may be another on this machine
    return config


def weights_in(directory: Path) -> Path:
    """Return the file with the adapters, the one that peft would read if there are two.

    Raises:
        CheckpointError: There is none.
    """
    for name in WEIGHTS.values():
        if (directory / name).is_file():
            return directory / name
    raise CheckpointError(
        f"Saved adapters are in {' or '.join(WEIGHTS.values())}. Found neither in {directory}. "
        "Check that the directory was copied whole."
    )


def prepare_adapter_directory(directory: Path) -> None:
    """Create the directory.

    Raises:
        CheckpointError: It is a file, or it cannot be created.
    """
    if directory.is_file():
        raise CheckpointError(
            f"save_lora_as_pretrained writes a directory. Found the file {directory}. Choose another path."
        )
    prepare_directory(directory)


def publish(directory: Path, aside: Path, config: "LoraConfig", use_safetensors: bool) -> None:
    """Move adapters and configuration into place, and remove adapters in the other format: peft would prefer them.

    Raises:
        CheckpointError: A file cannot be written.
    """
    try:
        with Staging() as staging:
            staging.add(directory / WEIGHTS[use_safetensors], aside.replace)
            staging.add(directory / CONFIG, lambda target: _write_config(config, target))
            staging.commit()
        (directory / WEIGHTS[not use_safetensors]).unlink(missing_ok=True)
    finally:
        aside.unlink(missing_ok=True)


def _write_config(config: "LoraConfig", target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        shutil.copyfile(Path(folder) / CONFIG, target)
