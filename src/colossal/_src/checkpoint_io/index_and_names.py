"""The index of a sharded checkpoint: which file holds which name."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, final

from colossal._src.checkpoint_io.staging import Staging, prepare_file
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

ADAPTER_WEIGHTS_FILES = {True: "adapter_model.safetensors", False: "adapter_model.bin"}
"""The names of the files with adapters, as peft has them; by whether they are safetensors, which it looks for first."""

ADAPTER_CONFIG_FILE = "adapter_config.json"
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


def full_path(path: str | Path, use_async: bool = False) -> Path:
    """Find where a path points; for a save in the background whatever the working directory is when it ends."""
    found = Path(path).expanduser()
    return found.absolute() if use_async else found


def listing(items: Iterable[object]) -> str:
    """Return the items with commas, the first few of them if they are many."""
    items = [str(item) for item in items]
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return ", ".join(items[:_MAX_LISTED]) + more


@final
class CheckpointIndexFile:
    """The index of a sharded checkpoint, in the JSON form of Hugging Face.

    It holds a weight map, from the name of each parameter to the file with its tensor, and metadata, such as the
    total size in bytes.

    Args:
        root_path: Directory of the files that the index names; the working directory if None.

    Attributes:
        metadata: What else the index says, such as the total size in bytes.
        weight_map: The name of the file that holds each parameter, by the parameter's name.

    Example:
        >>> import tempfile
        >>> from colossal.checkpoint_io import CheckpointIndexFile
        >>> index = CheckpointIndexFile(tempfile.mkdtemp())
        >>> index.append_weight_map("linear.weight", "pytorch_model-00001-of-00001.bin")
        >>> index.append_meta_data("total_size", 32)
        >>> index.write_index_file("pytorch_model.bin.index.json")
        >>> again = CheckpointIndexFile.from_file(index.root_path / "pytorch_model.bin.index.json")
        >>> again.get_all_param_names(), again.metadata["total_size"]
        (['linear.weight'], 32)
    """

    def __init__(self, root_path: str | Path | None = None) -> None:
        self.root_path = Path(root_path or ".").absolute()
        self.metadata: dict[str, Any] = {}
        self.weight_map: dict[str, str] = {}

    @classmethod
    def from_file(cls, index_path: str | Path) -> Self:
        """Read an index.

        Args:
            index_path: The JSON file; the files that it names are in its directory.

        Returns:
            The index that the file holds.

        Raises:
            CheckpointError: The file is missing or is not an index.
        """
        index = cls()
        index.load(index_path)
        return index

    def load(self, json_path: str | Path) -> None:
        """Replace the content by that of a file, and the root path by its directory.

        Args:
            json_path: The JSON file.

        Raises:
            CheckpointError: The file is missing or is not an index.
        """
        path = Path(json_path).absolute()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _not_an_index(path, str(error)) from error
        if not isinstance(content, dict) or not _maps_names_to_files(content.get("weight_map")):
            raise _not_an_index(path, "no weight_map from names to file names without a directory")
        metadata = content.get("metadata") or {}
        if (
            not isinstance(metadata, dict)
            or not _is_file_name(metadata.get("param_groups", "none"))
            or not _are_places(metadata.get("adapters", []))
        ):
            raise _not_an_index(path, f"the metadata {metadata!r}")
        self.root_path, self.metadata, self.weight_map = path.parent, metadata, content["weight_map"]

    def export(self, json_path: str | Path) -> None:
        """Write the index to a file, atomically.

        Args:
            json_path: The JSON file.

        Raises:
            CheckpointError: The file cannot be written.
        """
        with Staging() as staging:
            staging.add(prepare_file(Path(json_path)), self.write)
            staging.commit()

    def write_index_file(self, save_index_file: str) -> None:
        """Write the index to a file of the root path.

        Args:
            save_index_file: Name of the JSON file.

        Raises:
            CheckpointError: The file cannot be written.
        """
        self.export(self.root_path / save_index_file)

    def write(self, path: Path) -> None:
        """Write the JSON text in place: a reader may see half of it, where `export` shows all or nothing.

        Args:
            path: The JSON file; its directory exists.
        """
        content = {"metadata": self.metadata, "weight_map": self.weight_map}
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def contains_dtensor(self) -> bool:
        """Look for files of shards that some older programs wrote, one for each rank; here files have full tensors.

        Returns:
            Whether the index names such files.
        """
        return any("dtensor" in name for name in self.weight_map.values())

    def assert_no_dtensor_checkpoint(self) -> None:
        """Refuse files of shards.

        Raises:
            CheckpointError: The index names some.
        """
        if self.contains_dtensor():
            raise CheckpointError(
                f"The files of a checkpoint have full tensors. Found that the index in {self.root_path} names files of "
                "shards (dtensor). Save the model again with gather_dtensor=True, which is the default."
            )

    def append_weight_map(self, param_name: int | str, shard_file: str) -> None:
        """Say which file holds a parameter.

        Args:
            param_name: Name of the parameter, or its position in the optimizer.
            shard_file: File name, without a directory.
        """
        self.weight_map[str(param_name)] = shard_file

    def append_meta_data(self, name: str, val: Any) -> None:
        """Add one entry to the metadata.

        Args:
            name: Key of the entry.
            val: Anything that JSON can hold.
        """
        self.metadata[name] = val

    def get_checkpoint_filenames(self) -> list[str]:
        """List the files that hold parameters.

        Returns:
            Their paths, sorted, each once.
        """
        return [str(self.root_path / name) for name in sorted(set(self.weight_map.values()))]

    def get_checkpoint_file(self, param_name: str) -> str:
        """Find the file that holds a parameter.

        Args:
            param_name: Name of the parameter.

        Returns:
            The path of the file.

        Raises:
            CheckpointError: The index does not know the name.
        """
        if param_name not in self.weight_map:
            raise CheckpointError(
                f"The name of a parameter must be in the index. Found no {param_name!r} among {len(self.weight_map)} "
                f"names of the index in {self.root_path}. get_all_param_names() lists them."
            )
        return str(self.root_path / self.weight_map[param_name])

    def get_all_param_names(self) -> list[str]:
        """List the parameters.

        Returns:
            Their names, in the order of the index.
        """
        return list(self.weight_map)

    def get_param_group_filename(self) -> str | None:
        """Find the file with an optimizer's parameter groups.

        Returns:
            The path of the file; None if the index names none.
        """
        name = self.metadata.get("param_groups")
        return None if name is None else str(self.root_path / name)

    @property
    def adapter_files(self) -> list[Path]:
        """Files in the first of which that exists are the adapters of a model; empty without any."""
        return [self.root_path / place for place in self.metadata.get("adapters", [])]


def _maps_names_to_files(weight_map: object) -> bool:
    return isinstance(weight_map, Mapping) and all(map(_is_file_name, weight_map.values()))


def _is_file_name(name: object) -> bool:
    # an index may come from anywhere: its names must not lead out of the directory
    return isinstance(name, str) and name not in ("", ".", "..") and "\0" not in name and Path(name).name == name


def _are_places(places: object) -> bool:
    """Whether a list names only files in folders of the directory."""
    return isinstance(places, list) and all(
        isinstance(place, str) and place.count("/") == 1 and all(map(_is_file_name, place.split("/")))
        for place in places
    )


def _not_an_index(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"The index of a sharded checkpoint must be a JSON file with a weight_map. Found {path}: {found}. "
        "Check the path, and that the copy of the file is complete."
    )
