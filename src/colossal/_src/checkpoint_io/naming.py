"""The names of the files of a checkpoint directory, which are those of Hugging Face."""

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, final

from colossal.errors import CheckpointError, ConfigError

_MAX_LISTED = 10


@final
@dataclass(frozen=True)
class FileNames:
    """The names of the files of one checkpoint."""

    stem: str  # what the name starts with, after the prefix
    suffix: str  # what the name ends with
    prefix: str | None = None  # prepended to every name, with a dot; None for none

    def __post_init__(self) -> None:
        if self.prefix is not None and Path(self.prefix).name != self.prefix:
            raise ConfigError(
                f"A prefix is prepended to file names and must be a file name itself. Found prefix={self.prefix!r}. "
                "Put directories into the path of the checkpoint instead."
            )

    def with_prefix(self, prefix: str | None) -> Self:
        """Return the same names with a prefix."""
        return replace(self, prefix=prefix)

    @property
    def _start(self) -> str:
        return f"{self.prefix}.{self.stem}" if self.prefix else self.stem

    @property
    def index(self) -> str:
        """Name of the index."""
        return f"{self._start}{self.suffix}.index.json"

    def groups(self, revision: int = 0) -> str:
        """Name of the file with an optimizer's parameter groups; the first revision has none in its name."""
        return f"{self._start}_group{_revision(revision)}{self.suffix}"

    def shard(self, number: int, total: int, revision: int = 0) -> str:
        """Name of shard `number`, counted from 1, of `total`."""
        return f"{self._start}-{number:05d}-of-{total:05d}{_revision(revision)}{self.suffix}"

    def owns(self, name: str) -> bool:
        """Whether a file of this name belongs to such a checkpoint, of any number of shards and any revision."""
        pattern = re.escape(self._start) + r"(-\d{5}-of-\d{5}|_group)(\.\d+)?" + re.escape(self.suffix)
        return name == self.index or re.fullmatch(pattern, name) is not None

    def is_index(self, name: str) -> bool:
        """Whether a file of this name is an index, under any prefix."""
        return f".{name}".endswith(f".{self.stem}{self.suffix}.index.json")

    def is_single(self, name: str) -> bool:
        """Whether a file of this name is a single-file checkpoint, under any prefix."""
        return f".{name}".endswith(f".{self.stem}{self.suffix}")


MODEL = {False: FileNames("pytorch_model", ".bin"), True: FileNames("model", ".safetensors")}
"""The names of a model's files; by whether they are safetensors."""

OPTIMIZER = FileNames("pytorch_optim", ".safetensors")
"""The names of an optimizer's files."""

OLD_OPTIMIZER = FileNames("pytorch_optim", ".bin")
"""The names of an optimizer's files in PyTorch's format, which are read, and replaced by the next save."""

ADAPTERS = {True: "adapter_model.safetensors", False: "adapter_model.bin"}
"""The names of the files with adapters, as peft has them; by whether they are safetensors, which it looks for first."""

ADAPTER_CONFIG = "adapter_config.json"
"""The name of the configuration file of adapters, as peft has it."""


def adapter_folder(prefix: str | None) -> str:
    """Return the name of the folder with the adapters of a sharded checkpoint."""
    return f"{prefix}.adapter" if prefix else "adapter"


def find_checkpoint(path: Path, kinds: Sequence[FileNames]) -> Path:
    """Return the index or the single file that a checkpoint consists of."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(
            f"Loading needs a checkpoint that exists. Found nothing at {path}. Check the path and that it is visible "
            "from every machine."
        )
    names = sorted(entry.name for entry in path.iterdir())
    indices = [name for name in names if any(kind.is_index(name) for kind in kinds)]
    found = _without_replaced(path, indices) or [name for name in names if any(kind.is_single(name) for kind in kinds)]
    if len(found) != 1:
        wanted = " or ".join(kind.index for kind in kinds)
        what = f"several checkpoints, {listing(found)}" if found else f"none among its files: {listing(names)}"
        raise CheckpointError(
            f"Loading from a directory needs one checkpoint in it, such as {wanted}. Found in {path} {what}. "
            "Pass the path of the index or of the file itself."
        )
    return path / found[0]


def _without_replaced(directory: Path, indices: list[str]) -> list[str]:
    """Drop the indices that another one says it replaces: a save that was killed before it could delete them."""
    if len(indices) < 2:  # noqa: PLR2004
        return indices
    replaced: dict[str, str] = {}
    for name in indices:
        with suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
            replaced.update(json.loads((directory / name).read_text(encoding="utf-8"))["metadata"].get("replaces", {}))
    return [name for name in indices if replaced.get(name) != digest_of_file(directory / name)]


def digest_of_file(path: Path) -> str:
    """Return the digest of a small file, by which an index says which one it replaces."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(path.read_bytes())


def _revision(number: int) -> str:
    return f".{number}" if number else ""


def listing(items: Iterable[object]) -> str:
    """Return the items with commas, the first few of them if they are many."""
    items = [str(item) for item in items]
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return ", ".join(items[:_MAX_LISTED]) + more
