"""Whether torch, CUDA and the library's own code fit together."""

import re
import subprocess
from collections.abc import Iterator

from colossal._src import _native as native
from colossal._src.cli.check.report import Row, Section
from colossal._src.cli.check.versions import PACKAGES, kind_of_build, release
from colossal._src.cli.common import VERSION

TITLE = "compatibility"
_LANGUAGES = {".cpp": "C++", ".cu": "CUDA"}


def look() -> Iterator[Row]:
    """Compare versions of torch, and of CUDA in torch and the system; show when the native code is built."""
    import torch

    yield _library(torch.__version__)
    needed = torch.version.cuda
    compiler = native.own_code(".cu").compiler
    found = _version_of(compiler) if compiler else None
    yield Row(TITLE, "CUDA of the system", "ok", f"{found}, {compiler}" if found else "none: no nvcc that runs", found)
    yield _match(needed, found)
    for suffix in _LANGUAGES:
        yield _code(suffix, native.own_code(suffix), needed=suffix == ".cpp" or bool(needed))


def _library(version: str) -> Row:
    name, least = "torch and colossal", next(package.least for package in PACKAGES if package.name == "torch")
    versions = f"{version}, and {VERSION}, which needs {least}"
    if release(version) < release(least):
        return Row(TITLE, name, "problem", f"differ: {versions}", False, f"Install torch {least} or newer.")
    return Row(TITLE, name, "ok", f"match: {versions}", True)


def _version_of(compiler: str) -> str | None:
    """The version of the CUDA toolkit that a compiler belongs to, such as 12.8."""
    command = [compiler, "--version"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    release = re.search(r"release (\d+\.\d+)", output)
    return release.group(1) if release else None


def _match(needed: str | None, found: str | None) -> Row:
    """The toolkit compiles code that runs with torch's own libraries: their major versions must be equal."""
    name = "CUDA of torch and system"
    if needed is None:
        return Row(TITLE, name, "ok", f"no need to match: torch is a build for {kind_of_build()}")
    if found is None:
        return Row(TITLE, name, "ok", f"torch brings its own {needed}; the system has none")
    if needed.partition(".")[0] == found.partition(".")[0]:
        return Row(TITLE, name, "ok", f"match: {needed} and {found}", True)
    advice = f"Install the CUDA toolkit {needed}, or let NVCC name its compiler, before own code is built."
    return Row(TITLE, name, "note", f"differ: {needed} and {found}", False, advice)


def _code(suffix: str, code: native.OwnCode, *, needed: bool) -> Row:
    """Show when the code in one language is built: at install (AOT) or at first use (JIT)."""
    language = _LANGUAGES[suffix]
    name = f"extensions in {language}"
    if code.at_install and not code.at_first_use:
        return Row(TITLE, name, "ok", f"built at install (AOT): {', '.join(code.at_install)}", "install")
    if not needed:
        return Row(TITLE, name, "ok", f"not needed: torch is a build for {kind_of_build()}")
    if code.compiler:
        names = ", ".join(code.at_first_use)
        return Row(TITLE, name, "ok", f"built at first use (JIT) by {code.compiler}: {names}", "first use")
    advice = f"All works without it, only slower. To have it, {code.advice}, or a wheel that was built with CUDA_EXT=1."
    found = f"neither built at install (AOT) nor to be built: no {language} compiler"
    return Row(TITLE, name, "note", found, None, advice)


SECTION = Section(TITLE, look)
