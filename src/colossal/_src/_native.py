"""Own code in C++ and CUDA: built once for a machine, when first needed, and loaded through its plain C interface."""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple, final

from colossal.errors import UnsupportedError

_PACKAGE = Path(__file__).parents[1]
_BUILD_SECONDS = 600.0  # it ends a compiler that hangs; a busy machine needs minutes
_QUIET_SECONDS = 1.0
_WITHOUT = "Everything works without it, only slower"


@final
class _Language(NamedTuple):
    """How sources of one suffix are compiled."""

    name: str  # of the compilers
    variable: str  # of the environment, which names the compiler to use
    names: tuple[str, ...]  # of the compilers to look for otherwise
    flags: tuple[str, ...]  # of each build
    # the flag more of a library for all devices; one built on first use is for the device at hand
    portable: tuple[str, ...]
    advice: str  # what to do if there is no compiler


_LANGUAGES = {
    ".cpp": _Language(
        "C++",
        "CXX",
        ("c++", "g++", "clang++"),
        ("-std=c++17", "-O3", "-fno-math-errno", "-pthread", "-shared", "-fPIC"),
        (),
        "install g++",
    ),
    ".cu": _Language(
        "CUDA",
        "NVCC",
        ("nvcc", "/usr/local/cuda/bin/nvcc"),
        ("-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC"),
        ("-arch=all-major",),
        "install the CUDA toolkit",
    ),
}


@final
class OwnCode(NamedTuple):
    """What there is in one language, and when it is built."""

    at_install: tuple[str, ...]  # names of the sources whose libraries came with the package
    at_first_use: tuple[str, ...]  # those of the others
    compiler: str | None  # what builds the others; None if there is none
    advice: str  # what to do then


def own_code(suffix: str) -> OwnCode:
    """Return what was built with the package, and what is built on first use."""
    names: dict[bool, list[str]] = {True: [], False: []}
    for source in sorted(_sources().glob(f"*/*{suffix}")):
        names[(_prebuilt_folder() / _prebuilt_name(source)).exists()].append(source.stem)
    language = _LANGUAGES[suffix]
    return OwnCode(tuple(names[True]), tuple(names[False]), _found(language), language.advice)


def library(source: str) -> ctypes.CDLL:
    """Load a library of our own, and build it before if this machine has not done so yet.

    A library that came with the package is taken where it fits, see `prebuild`. What was built is kept in the user's
    cache folder, under a name that is made from the source, the compiler and the flags. It is only loaded from a folder
    that no other user can write to.
    """
    found = _attempt(source)
    if isinstance(found, UnsupportedError):
        raise found
    return found


@cache
def _attempt(source: str) -> ctypes.CDLL | UnsupportedError:
    try:
        file = _file_of(source)
        prebuilt = _prebuilt_folder() / _prebuilt_name(file)
        if prebuilt.exists():
            with suppress(OSError):  # made for another C library: build one for this
                return ctypes.CDLL(str(prebuilt))
        return ctypes.CDLL(str(_built(file)))
    except OSError as error:
        return UnsupportedError(
            f"The native code must be built and loaded. Found for {source}: {error}. {_WITHOUT}; `colossal check` "
            "shows what is missing."
        )
    except UnsupportedError as error:
        return error


def prebuild(folder: Path) -> list[Path]:
    """Build libraries for a package that is made now, for all machines like this one."""
    made: list[Path] = []
    for source in sorted(_sources().glob("*/*")):
        language = _LANGUAGES.get(source.suffix)
        if language is None:
            continue
        if source.suffix == ".cu" and not (os.environ.get(language.variable) or _found(language)):
            continue
        made.append(folder / _prebuilt_name(source))
        _build([_compiler(language), *language.flags, *language.portable], source, made[-1])
    return made


def _sources() -> Path:
    """Return the folder of the sources: inside an installed package, next to it in a checkout."""
    inside = _PACKAGE / "csrc"
    return inside if inside.is_dir() else _PACKAGE.parents[1] / "csrc"


def _prebuilt_folder() -> Path:
    return _PACKAGE / "_prebuilt"


def _prebuilt_name(source: Path) -> str:
    return f"{source.parent.name}-{source.stem}-{_key(source, platform.machine())}.so"


def _file_of(source: str) -> Path:
    """Find the source, whatever language it is in."""
    for suffix in _LANGUAGES:
        file = _sources() / f"{source}{suffix}"
        if file.is_file():
            return file
    raise UnsupportedError(
        f"Code of its own needs its source. Found none for {source} in {_sources()}. {_WITHOUT}; install the package "
        "anew."
    )


def _key(source: Path, *parts: str) -> str:
    """Make a name of what a library is made from.

    Headers are next to a source, in a folder of its name, or one level up, where several folders include them.
    """
    key = hashlib.sha256()
    for folder in (source.parents[1], source.parent, source.with_suffix("")):
        for file in sorted(folder.glob("*.h")):
            key.update(file.read_bytes())
    key.update(source.read_bytes())
    for part in parts:
        key.update(part.encode())
    return key.hexdigest()[:16]


def _built(source: Path) -> Path:
    language = _LANGUAGES[source.suffix]
    command = [_compiler(language), *language.flags, *_flags_of_device(language)]
    folder = _cache()
    target = folder / f"{source.stem}-{_key(source, _version(command[0]), platform.machine(), *command)}.so"
    if not target.exists():
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # processes that start together build once
            if not target.exists():
                for left in folder.glob(f"{tempfile.gettempprefix()}*.so"):  # by a build that was killed
                    left.unlink(missing_ok=True)
                _build(command, source, target)
    return target


def _flags_of_device(language: _Language) -> list[str]:
    """Return for which GPU to compile: a library for one is built several times as fast."""
    if language is _LANGUAGES[".cpp"]:
        return []
    import torch

    if not torch.cuda.is_available():
        return list(language.portable)
    major, minor = torch.cuda.get_device_capability()
    return [f"-arch=sm_{major}{minor}"]


def _found(language: _Language) -> str | None:
    wanted = os.environ.get(language.variable)
    return next(filter(None, map(shutil.which, (wanted,) if wanted else language.names)), None)


def _compiler(language: _Language) -> str:
    path = _found(language)
    if path:
        return path
    raise UnsupportedError(
        f"Code of its own needs a {language.name} compiler. Found none: "
        f"{os.environ.get(language.variable) or ', '.join(language.names)}. {_WITHOUT}; {language.advice}, or let "
        f"{language.variable} name a compiler."
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
        "What is built needs a folder that you own and that no other user can write to. Found none: "
        f"{', '.join(map(str, places))}. {_WITHOUT}; let XDG_CACHE_HOME name one."
    )


def _build(command: list[str], source: Path, target: Path) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    variable = _LANGUAGES[source.suffix].variable
    try:
        code, message = _run([*command, "-o", name, str(source)], source)
        if code:
            reason = (message.strip() or "no message").splitlines()[0]
            raise UnsupportedError(
                f"Code of its own must compile. Found that {command[0]} refuses {source.name}: {reason}. {_WITHOUT}; "
                f"let {variable} name another compiler."
            )
        Path(name).chmod(0o755)
        Path(name).rename(target)
    except subprocess.TimeoutExpired as error:
        raise UnsupportedError(
            f"Code of its own must compile within {_BUILD_SECONDS:g} s. Found that {command[0]} had not finished "
            f"{source.name}. {_WITHOUT}; let {variable} name another compiler."
        ) from error
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: list[str], source: Path) -> tuple[int, str]:
    """Run a compiler, log it if it takes longer than a moment, and end all of its processes."""
    compiling = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)  # noqa: S603
    try:
        try:
            _, message = compiling.communicate(timeout=min(_QUIET_SECONDS, _BUILD_SECONDS))
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"colossal: building {source.parent.name}/{source.name} once for this machine\n")
            _, message = compiling.communicate(timeout=max(0.0, _BUILD_SECONDS - _QUIET_SECONDS))
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(compiling.pid, signal.SIGKILL)
        compiling.communicate()
        raise
    return compiling.returncode, message
