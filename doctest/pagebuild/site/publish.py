"""Writes the generated files: all of them or none, changed ones only, and stale ones are removed."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PublishResult:
    """What publishing did."""

    written: tuple[str, ...]  # files that are new or have changed
    removed: tuple[str, ...]  # files that nothing generates any more
    kept: int


def publish(files: Mapping[str, bytes], folder: Path, owned: Sequence[str]) -> PublishResult:
    """Makes the owned parts of a folder hold these files and no others."""
    strange = [name for name in files if not any(name == part or name.startswith(f"{part}/") for part in owned)]
    assert not strange, f"generated outside the owned parts: {strange}"
    removed = sorted(name for name in _published_files(folder, owned) if name not in files)
    for name in removed:
        (folder / name).unlink()
    _drop_empty(folder, owned)
    written = [name for name, content in sorted(files.items()) if _write(folder / name, content)]
    return PublishResult(tuple(written), tuple(removed), len(files) - len(written))


def _published_files(folder: Path, owned: Sequence[str]) -> Iterator[str]:
    for part in owned:
        place = folder / part
        found = [place] if place.is_file() or place.is_symlink() else place.rglob("*")
        yield from (path.relative_to(folder).as_posix() for path in found if path.is_symlink() or not path.is_dir())


def _drop_empty(folder: Path, owned: Sequence[str]) -> None:
    for part in owned:
        inner = sorted((folder / part).rglob("*"), reverse=True)
        for path in [*inner, folder / part]:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def _write(path: Path, content: bytes) -> bool:
    """Replaces the file in one step if it differs, so that whoever reads it sees the old content or the new."""
    if path.is_file() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)
    return True
