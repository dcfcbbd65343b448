"""``COLOSSAL_BUILD_EXT=1 pip install .`` compiles the own code, instead of leaving it to first use."""

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BuildHook(BuildHookInterface):
    """Puts compiled libraries into the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tag the wheel with the platform: its libraries do not depend on the version of Python.

        Args:
            version: Of the wheel: ``"editable"`` has no place for libraries.
            build_data: What the wheel is made from.

        Raises:
            ValueError: The variable is neither 0 nor 1, or an editable installation asks for what it cannot have.
        """
        wanted = os.environ.get("COLOSSAL_BUILD_EXT", "0")
        if wanted == "0":
            return
        if wanted != "1" or version == "editable":
            raise ValueError(
                "COLOSSAL_BUILD_EXT is 0 or 1, and 1 only where the package is copied. Found "
                f"COLOSSAL_BUILD_EXT={wanted} and the version {version}. Unset it: code is built when first used."
            )
        sys.path.insert(0, str(Path(self.root) / "src"))
        from colossal import _native as native  # needs nothing but Python

        self._folder = Path(tempfile.mkdtemp())
        for library in native.prebuild(self._folder):
            build_data["force_include"][str(library)] = f"colossal/_prebuilt/{library.name}"
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
