"""The index of a sharded checkpoint: which file holds which name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, final

from colossal._src.checkpoint_io.staging import Staging, prepare_file
from colossal.errors import CheckpointError


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

    def append_weight_map(self, param_id: int | str, shard_file: str) -> None:
        """Say which file holds a parameter.

        Args:
            param_id: Name of the parameter, or its position in the optimizer.
            shard_file: File name, without a directory.
        """
        self.weight_map[str(param_id)] = shard_file

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
