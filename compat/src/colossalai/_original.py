"""Refuses to run beside the original: a program would get modules of both."""

import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

_OWN = {"__init__.py", "_alias.py", "_original.py", "__pycache__"}


def refuse(version: str) -> None:
    """Raise if another package of this name is installed.

    Args:
        version: The version of this package.

    Raises:
        ImportError: There is one; says where, and what to do.
    """
    found = next(_others(version), None)
    if found is not None:
        raise ImportError(
            "Only one package named colossalai can be installed; this one runs programs by colossal. Found another at "
            f"{found}. Call `pip uninstall colossalai` until it finds none, then install the one that you want.",
            name="colossalai",
        )


def _others(version: str) -> Iterator[Path | str]:
    own = Path(__file__).parent
    yield from (each for each in own.iterdir() if each.name not in _OWN)
    for entry in dict.fromkeys(sys.path):
        folder = Path(entry or ".", "colossalai")
        if (folder / "__init__.py").is_file() and not folder.samefile(own):
            yield folder
    for each in distributions(name="colossalai"):
        if each.version != version:
            yield f"{each.locate_file('')} (version {each.version})"
