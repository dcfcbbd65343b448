"""``CUDA_EXT=1 pip install .`` compiles the own code, instead of leaving it to first use."""

import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLES = ("COLOSSAL_BUILD_EXT", "CUDA_EXT")
"""Two names of one choice: the library's own, and the documented one."""


def is_wanted(version: str, environment: Mapping[str, str]) -> bool:
    """Read whether to compile.

    Args:
        version: Of the wheel: ``"editable"`` has no place for libraries.
        environment: Where the variables stand.

    Raises:
        ValueError: A variable is neither 0 nor 1, both are set and disagree, or an editable installation asks for what
            it cannot have.
    """
    found = {name: environment[name] for name in VARIABLES if environment.get(name)}
    words = " and ".join(f"{name}={value}" for name, value in found.items())
    names = " and ".join(VARIABLES)
    if not set(found.values()) <= {"0", "1"}:
        raise ValueError(f"{names} are 0 or 1. Found {words}. Set one of them to 1 to build now, or to 0 for later.")
    if len(set(found.values())) > 1:
        raise ValueError(f"{names} are two names of one choice. Found {words}, which contradict. Unset one of them.")
    if version == "editable" and "1" in found.values():
        raise ValueError(
            f"Building with the installation needs a copy of the package. Found {words} and an editable installation. "
            "Unset it: code is built when first used; or leave out -e."
        )
    return "1" in found.values()


class BuildHook(BuildHookInterface):
    """Puts compiled libraries into the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tag the wheel with the platform: its libraries do not depend on the version of Python.

        Args:
            version: Of the wheel: ``"editable"`` has no place for libraries.
            build_data: What the wheel is made from.

        Raises:
            ValueError: The environment asks for what cannot be, see `is_wanted`.
        """
        if not is_wanted(version, os.environ):
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from colossal._src import _native as native  # needs nothing but Python

        self._folder = Path(tempfile.mkdtemp())
        made = native.prebuild(self._folder)
        for library in made:
            build_data["force_include"][str(library)] = f"colossal/_prebuilt/{library.name}"
        if not any(library.name.startswith("cuda-") for library in made):
            self.app.display_warning(
                "colossal: only C++ was built. CUDA needs nvcc: install the CUDA toolkit, or let NVCC name it; else it "
                "is built when first used."
            )
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 (theirs)
        """Remove what the wheel holds now.

        Args:
            version: Of the wheel.
            build_data: What it was made from.
            artifact_path: The wheel.
        """
        folder = getattr(self, "_folder", None)
        if folder is not None:
            shutil.rmtree(folder)
