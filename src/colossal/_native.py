"""Own C++ code: built once for a machine, when it is first needed, and loaded through its plain C interface."""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from colossal.errors import UnsupportedError

_PACKAGE = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-pthread", "-shared", "-fPIC")
_COMPILERS = ("c++", "g++", "clang++")
_BUILD_SECONDS = 120.0


def library(source: str) -> ctypes.CDLL:
    """Load a library of our own, and build it before if this machine has not done so yet.

    What was built is kept in the user's cache folder, under a name that is made from the source, the compiler and the
    flags. It is only loaded from a folder that nobody else can write to.

    Args:
        source: The file below ``csrc``, without suffix, such as ``cpu/copy``.

    Returns:
        The library; calls of its functions release the interpreter's lock.

    Raises:
        UnsupportedError: There is no compiler, the build failed, or there is no safe place for what it makes. The same
            is raised by every later call, without a new attempt.
    """
    found = _attempt(source)
    if isinstance(found, UnsupportedError):
        raise found
    return found


@cache
def _attempt(source: str) -> ctypes.CDLL | UnsupportedError:
    try:
        return ctypes.CDLL(str(_built(_sources() / f"{source}.cpp")))
    except OSError as error:
        return UnsupportedError(
            f"Code of its own needs to be built and loaded. Found for {source}: {error}. Everything works without it, "
            "only slower; `colossal check` tells what is missing."
        )
    except UnsupportedError as error:
        return error


def _sources() -> Path:
    """Return the folder of the sources: inside of an installed package, beside it in a checkout."""
    inside = _PACKAGE / "csrc"
    return inside if inside.is_dir() else _PACKAGE.parents[1] / "csrc"


def _built(source: Path) -> Path:
    compiler = _compiler()
    key = hashlib.sha256()
    for file in (source, *sorted(source.with_suffix("").glob("*.h"))):
        key.update(file.read_bytes())
    for part in (compiler, _version(compiler), platform.machine(), *_FLAGS):
        key.update(part.encode())
    folder = _cache()
    target = folder / f"{source.stem}-{key.hexdigest()[:16]}.so"
    if not target.exists():
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # processes that start together build once
            if not target.exists():
                _build(compiler, source, target)
    return target


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        path = shutil.which(name)
        if path:
            return path
    raise UnsupportedError(
        f"Code of its own needs a C++ compiler. Found none: {wanted or ', '.join(_COMPILERS)}. Everything works "
        "without it, only slower; install g++, or let CXX name a compiler."
    )


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout  # noqa: S603


def _cache() -> Path:
    """Return a folder for libraries that only this user can write to."""
    places = [Path(tempfile.gettempdir()) / f"colossal-native-{os.getuid()}"]
    with suppress(RuntimeError):  # a user without a home
        places.insert(0, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "colossal" / "native")
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = place.lstat()
        except OSError:
            continue
        is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
        if is_own and os.access(place, os.W_OK):
            return place
    raise UnsupportedError(
        "What is built needs a folder that you own and nobody else can write to. Found none: "
        f"{', '.join(map(str, places))}. Everything works without it, only slower; let XDG_CACHE_HOME name one."
    )


def _build(compiler: str, source: Path, target: Path) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    try:
        command = [compiler, *_FLAGS, "-o", name, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_BUILD_SECONDS)  # noqa: S603
        if done.returncode:
            raise UnsupportedError(
                f"Code of its own must compile. Found that {compiler} refuses {source.name}: "
                f"{(done.stderr.strip() or 'no message').splitlines()[0]}. Everything works without it, only slower; "
                "let CXX name another compiler."
            )
        Path(name).rename(target)
    except subprocess.TimeoutExpired as error:
        raise UnsupportedError(
            f"Code of its own must compile within {_BUILD_SECONDS:g} s. Found that {compiler} had not finished "
            f"{source.name}. Everything works without it, only slower; let CXX name another compiler."
        ) from error
    finally:
        Path(name).unlink(missing_ok=True)
