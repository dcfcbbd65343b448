"""The stamp of api.json: what it was made from, so that it is made again only when that has changed."""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pagebuild.api.contents import contents_files
from pagebuild.api.library import Library
from pagetest.model.page import Page

_PROGRAM = Path(__file__).resolve().parents[2]
_PARSERS = ("sphinx", "docutils", "myst-parser", "markdown-it-py", "torch")


@dataclass(frozen=True)
class Stamp:
    """A file next to a generated one: the hash of its inputs, to skip generating it again."""

    file: Path  # the file, which may not be there yet
    inputs: str  # the digest of all that it is made from

    @property
    def path(self) -> Path:
        """Where the stamp is kept."""
        return self.file.with_suffix(".stamp")

    @property
    def is_valid(self) -> bool:
        """Whether the file is there, as it was when it was stamped, and was made from these inputs."""
        if not self.path.is_file() or not self.file.is_file():
            return False
        return self.path.read_text(encoding="utf-8") == self._text

    def write(self) -> None:
        """Writes the stamp of the file as it is now."""
        self.path.write_text(self._text, encoding="utf-8")

    def remove(self) -> None:
        """Makes sure that the file counts as made from something else."""
        self.path.unlink(missing_ok=True)

    @property
    def _text(self) -> str:
        content = hashlib.sha256(self.file.read_bytes()).hexdigest()
        return json.dumps({"inputs": self.inputs, "content": content}) + "\n"


def inputs_of(library: Library, pages: Iterable[Page], program: Path = _PROGRAM) -> str:
    """The digest of all that the reference depends on: the library, names in hooks, its contents, and this program."""
    hooks = sorted({hook.text for page in pages for hook in page.hooks})
    parts = [sys.version, *map(_version, _PARSERS), library.package, *hooks]
    for folder in (library.folder, program):
        parts += ["", *_hash_folder(folder)]
    parts += ["", *(_hash(path) for path in contents_files(library.root) if path.is_file())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _hash_folder(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*.py")):
        yield from (path.relative_to(folder).as_posix(), _hash(path))


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _version(distribution: str) -> str:
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return f"no {distribution}"
