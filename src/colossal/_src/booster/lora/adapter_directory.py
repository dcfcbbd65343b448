"""The files of saved adapters, which are those of peft."""

from pathlib import Path
from typing import TYPE_CHECKING

from colossal._src.checkpoint_io import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILES
from colossal.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from peft import LoraConfig


def read_adapter_config(directory: Path) -> "LoraConfig":
    """Read the configuration of saved adapters, for training on."""
    from peft import LoraConfig, PeftConfig

    if not (directory / ADAPTER_CONFIG_FILE).is_file():
        found = "a directory without it" if directory.is_dir() else "no directory"
        raise CheckpointError(
            f"pretrained_dir is a directory with saved adapters, which holds {ADAPTER_CONFIG_FILE}. Found {found} at "
            f"{directory}. Check the path; booster.save_lora_as_pretrained and peft's save_pretrained write such "
            "directories."
        )
    adapter_weights_path(directory)
    try:
        config = PeftConfig.from_pretrained(str(directory))
    except Exception as error:
        raise CheckpointError(
            f"Adapters need a readable configuration. Found {directory / ADAPTER_CONFIG_FILE}, which peft cannot read: "
            f"{type(error).__name__}: {error}. Check that it was copied completely."
        ) from error
    if not isinstance(config, LoraConfig):
        raise CheckpointError(
            f"pretrained_dir holds LoRA adapters. Found {config.peft_type} in {directory}. "
            "Load those by peft.PeftModel.from_pretrained, and boost the result."
        )
    config.inference_mode = False
    config.base_model_name_or_path = None  # the model at hand decides; its name may be another on this machine
    return config


_OF_THE_DIRECTORY = ("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version")


def check_same_adapters(saved: "LoraConfig", given: "LoraConfig") -> None:
    """Require that a configuration beside saved adapters says of them what they are, where it says something."""
    from peft import LoraConfig

    default, found, wanted = LoraConfig().to_dict(), saved.to_dict(), given.to_dict()
    differing = [
        name
        for name, value in wanted.items()
        if name not in _OF_THE_DIRECTORY and value != default.get(name) and value != found.get(name)
    ]
    if differing:
        raise ConfigError(
            "Saved adapters bring their own configuration, which lora_config may repeat. Found another "
            f"{', '.join(f'{name}={wanted[name]!r} (saved: {found.get(name)!r})' for name in differing)}. Leave "
            "lora_config out, or pretrained_dir for new adapters."
        )


def adapter_weights_path(directory: Path) -> Path:
    """Return the file with the adapters, the one that peft would read if there are two."""
    for name in ADAPTER_WEIGHTS_FILES.values():
        if (directory / name).is_file():
            return directory / name
    raise CheckpointError(
        f"Saved adapters are in {' or '.join(ADAPTER_WEIGHTS_FILES.values())}. Found neither in {directory}. "
        "Check that the directory was copied completely."
    )
