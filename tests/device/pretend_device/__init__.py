"""A pretend accelerator for tests: real values in host memory, on a device that is not the CPU.

It refuses what a GPU refuses: tensors of two devices in one operator, host tensors in a collective, the generator of
the CPU, a copy into pageable memory that does not block. It has streams and events. What nothing puts in order is an
error, and what is copied to the host is not there before the host has waited for it. It counts how often the host
waits.

torch loads it as it loads any accelerator of another project: by the entry point ``torch.backends``, if the folder
above is on ``PYTHONPATH`` and ``COLOSSAL_DEVICE`` is ``pretend``. It knows nothing of speed, of kernels, and of NCCL.
"""

import fcntl
import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

NAME = "pretend"
FOLDER = Path(__file__).parents[1]
"""What has to be on ``PYTHONPATH`` for a process to have the device."""

_HERE = Path(__file__).parent
_FLAGS = ("-std=c++20", "-O1", "-g0", "-w", "-fPIC", "-shared", "-pthread", "-DTORCH_EXTENSION_NAME=pretend_native")
_OF_THE_COMPILER = ("Scheduling", "PythonWrapperCodegen", "CppWrapperCodegen", "WrapperFxCodegen")
_LIBRARIES = ("-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python")


def register() -> None:
    """Make the device known to torch; called by torch's import where this folder is on the path."""
    if os.environ.get("COLOSSAL_DEVICE") != NAME or hasattr(torch, NAME):
        return
    native = _load()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    native.init()
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.distributed.Backend.register_backend(NAME, _create_group, extended_api=True, devices=[NAME])


def native() -> Any:
    """Return the compiled part: counters, and views of the device's memory."""
    return sys.modules["pretend_native"]


@contextmanager
def counted_waits() -> Iterator[dict[str, int]]:
    """Count how often the host waits for the device, by what makes it wait; complete when the block is left."""
    found: dict[str, int] = {}
    before = dict(native().waits())
    yield found
    found.update({what: n - before.get(what, 0) for what, n in native().waits().items() if n > before.get(what, 0)})


@contextmanager
def refused_waits() -> Iterator[None]:
    """Let everything that makes the host wait raise, which shows where it is."""
    before = native().refuse_waits(True)
    try:
        yield
    finally:
        native().refuse_waits(before)


@contextmanager
def total_memory(num_bytes: int) -> Iterator[None]:
    """Let the device have so much memory, and no more."""
    before = native().set_total_memory(num_bytes)
    try:
        yield
    finally:
        native().set_total_memory(before)


def _create_group(options: Any, _: object = None) -> Any:
    from pretend_device.group import PretendGroup

    return PretendGroup(options)


class _Module(types.ModuleType):
    """What torch looks up as ``torch.pretend``; what only torch.compile asks for is imported when it does."""

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_THE_COMPILER:
            raise AttributeError(name)
        return getattr(importlib.import_module("pretend_device.compiler"), name)


def _module() -> types.ModuleType:
    module = _Module(f"torch.{NAME}")
    table: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda _: nullcontext(),
        "set_device": torch.accelerator.set_device_index,
        "synchronize": torch.accelerator.synchronize,
        "Stream": lambda *_, **__: torch.Stream(NAME),
        "Event": lambda *_, **__: torch.Event(NAME),
        "stream": lambda stream: stream,
        "current_stream": torch.accelerator.current_stream,
        "default_stream": lambda *_: torch.Stream(stream_id=0, device_index=0, device_type=_device_number()),
        "set_stream": torch.accelerator.set_stream,
        "manual_seed": lambda seed: _generator().manual_seed(seed),
        "manual_seed_all": lambda seed: _generator().manual_seed(seed),
        "initial_seed": lambda: _generator().initial_seed(),
        "get_rng_state": lambda *_: _generator().get_state(),
        "set_rng_state": lambda state, *_: _generator().set_state(state),
        "get_rng_state_all": lambda: [_generator().get_state()],
        "set_rng_state_all": lambda states: _generator().set_state(states[0]),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda *_: True,
        "empty_cache": torch.accelerator.empty_cache,
        "memory_allocated": torch.accelerator.memory_allocated,
        "max_memory_allocated": torch.accelerator.max_memory_allocated,
        "memory_reserved": torch.accelerator.memory_reserved,
        "max_memory_reserved": torch.accelerator.max_memory_reserved,
        "memory_stats": torch.accelerator.memory_stats,
        "reset_peak_memory_stats": torch.accelerator.reset_peak_memory_stats,
        "mem_get_info": torch.accelerator.get_memory_info,
    }
    vars(module).update(table)
    return module


def _generator() -> torch.Generator:
    return native().default_generator()


def _device_number() -> int:
    return torch.Stream(NAME).device_type


def _load() -> Any:
    path = _built()
    spec = importlib.util.spec_from_file_location("pretend_native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pretend_native"] = module
    spec.loader.exec_module(module)
    return module


def _built() -> Path:
    """Build the compiled part once for its sources, this torch and this interpreter."""
    sources = sorted([*_HERE.glob("*.h"), *_HERE.glob("*.cpp")])
    key = hashlib.sha256(f"{torch.__version__}{sys.version}{_FLAGS}".encode())
    for source in sources:
        key.update(source.read_bytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "colossal" / "pretend"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = folder / f"pretend-{key.hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _build(target)
    return target


def _build(target: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    root = Path(torch.__file__).parent
    includes = (root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder, target.name)
        command = [compiler, *_FLAGS, *(f"-I{each}" for each in includes), str(_HERE / "pretend.cpp")]
        command += ["-o", str(made), f"-L{root / 'lib'}", *_LIBRARIES]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"The pretend device must compile. Found:\n{done.stderr[:4000]}")
        made.rename(target)


register()
