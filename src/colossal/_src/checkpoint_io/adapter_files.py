"""The adapter files next to the shards of a model, in the format of peft."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import final

from colossal._src.checkpoint_io.index_and_names import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILES
from colossal._src.checkpoint_io.staging import Staging, prepare_directory, sync

# [Note: adapters and the index] peft reads adapters under one name only, so that new ones cannot be stored next to
# the earlier ones until the index names them, as new shards are. They are first written under a temporary name. The
# rename of the index publishes the new checkpoint, and only then they replace the earlier ones. A process killed in
# between leaves an index that names both paths: the temporary one is read if it still exists.


@final
class AdapterFiles:
    """The folder with the adapters of a sharded checkpoint."""

    def __init__(
        self, directory: Path, folder: str, use_safetensors: bool, config: Callable[[Path], object] | None
    ) -> None:
        self._folder, self._config = directory / folder, config
        self._weights = ADAPTER_WEIGHTS_FILES[use_safetensors]
        self._waiting = self._weights.replace(".", f"-{os.urandom(4).hex()}.")

    @property
    def weights(self) -> Path:
        """Where the weights are in the end."""
        return self._folder / self._weights

    @property
    def places(self) -> list[str]:
        """Where the weights are, relative to the directory of the checkpoint; the place where they wait comes first."""
        return [f"{self._folder.name}/{name}" for name in (self._waiting, self._weights)]

    def reserve(self, staging: Staging, num_bytes: int) -> Path:
        """Create the temporary file of the weights."""
        prepare_directory(self._folder)
        return staging.reserve(self.weights, num_bytes)

    def stage(self, staging: Staging) -> None:
        """Let the weights wait, once they are written."""
        staging.move(self.weights, self._waiting)

    def stage_config(self, staging: Staging) -> None:
        """Write the configuration, to be put in place after the index."""
        if self._config is not None:
            staging.add(self._folder / ADAPTER_CONFIG_FILE, self._config)

    def publish(self) -> None:
        """Let the weights take their place, after the index was put in its own, and delete what they replace."""
        (self._folder / self._waiting).replace(self.weights)
        remove_adapters(self._folder, kept={self._weights, ADAPTER_CONFIG_FILE if self._config is not None else ""})


def remove_adapters(folder: Path, kept: set[str] | None = None) -> None:
    """Delete the files of adapters in a folder that a save wrote, and the folder if nothing else is in it."""
    if not folder.is_dir():
        return
    names = [ADAPTER_CONFIG_FILE, *ADAPTER_WEIGHTS_FILES.values()]
    patterns = [*names, *(name.replace(".", "-????????.") for name in names), *(f".{name}.*.tmp" for name in names)]
    for entry in list(folder.iterdir()):
        if entry.name not in (kept or ()) and any(entry.match(pattern) for pattern in patterns):
            entry.unlink()
    if any(folder.iterdir()):
        sync(folder)
    else:
        folder.rmdir()
