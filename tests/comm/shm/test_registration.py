"""`import colossal` makes torch.distributed know the backend, in any order of imports, and costs next to nothing."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from ports import free_port
from torch import distributed as dist

import colossal
from colossal.errors import ConfigError
from colossal.testing import run_processes

pytestmark = pytest.mark.slow

REGISTERED = """
from torch import distributed as dist
assert dist.is_backend_available("shm")
assert dist.Backend.SHM == "shm"
assert dist.Backend.backend_capability["shm"] == ["cpu"]
assert not [finder for finder in sys.meta_path if type(finder).__module__ == "colossal._src._registration"]
import colossal._src._registration
colossal._src._registration.register()  # once more changes nothing
assert not [finder for finder in sys.meta_path if type(finder).__module__ == "colossal._src._registration"]
assert dist.Backend.backend_list.count("shm") == 1
assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
print("registered")
"""

USED = """
dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() == "shm"
dist.destroy_process_group()
print("used")
"""

COLOSSAL_FIRST = """
import sys
before = list(sys.meta_path)
import colossal
assert not [name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy")]
assert "colossal._src.comm" not in sys.modules
(older, finder) = [each for each in sys.meta_path if each not in before]
import importlib
assert finder.find_spec("json", None, None) is None and older.find_spec("json", None, None) is None
importlib.reload(colossal)
assert len(sys.meta_path) == len(before) + 2  # one of each finder, however often it is imported
try:
    import torch.there_is_no_such_module
except ModuleNotFoundError:
    pass
import torch.distributed.distributed_c10d as c10d
assert c10d.__spec__.loader is not None
assert "colossal._src.comm" not in sys.modules
"""

TORCH_FIRST = """
import sys
import torch.distributed
before = list(sys.meta_path)
import colossal
assert sys.meta_path[1:] == before  # only the finder of older names
assert "colossal._src.comm" not in sys.modules
"""

PARTS_FIRST = """
import sys
import colossal.booster
import colossal._src.comm._shm
"""


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False, env=environment()
    )
    assert not done.stderr
    assert not done.returncode
    return done.stdout


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "COLOSSAL_BACKEND"} | {"OMP_NUM_THREADS": "1"}


BEGINNINGS = {"colossal": COLOSSAL_FIRST, "torch": TORCH_FIRST, "a part": PARTS_FIRST}


@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
def test_the_backend_is_known_in_any_order_of_imports(beginning) -> None:
    used = USED if beginning == COLOSSAL_FIRST else ""
    assert run(beginning + REGISTERED + used).split() == ["registered"] + ["used"] * bool(used)


def launched(port: int, backend: str | None) -> tuple[str, float]:
    colossal.launch(int(os.environ["NUMBER"]), 2, "127.0.0.1", port, backend, verbose=False)
    value = torch.ones(3)
    dist.all_reduce(value)
    return dist.get_backend(), value.sum().item()


@pytest.mark.parametrize(
    ("argument", "variable", "expected"),
    [(None, "", "shm"), (None, "gloo", "gloo"), ("gloo", "", "gloo"), ("shm", "gloo", "shm"), (None, "shm", "shm")],
)
def test_launch_takes_shared_memory_unless_it_is_told_otherwise(argument, variable, expected) -> None:
    variables = {"NUMBER": "{rank}", "COLOSSAL_BACKEND": variable}
    found = run_processes(launched, 2, free_port(), argument, form=False, environment=variables)
    assert found == [(expected, 6.0)] * 2


def backend_of_world() -> str:
    return dist.get_backend()


def test_the_worlds_of_tests_do_the_same() -> None:
    assert run_processes(backend_of_world, 2) == ["shm"] * 2
    assert run_processes(backend_of_world, 2, environment={"COLOSSAL_BACKEND": "gloo"}) == ["gloo"] * 2


def test_shared_memory_is_not_for_one_of_several_devices() -> None:
    with pytest.raises(ConfigError, match="'shm'|'nccl', which this torch lacks"):
        colossal.launch(0, 1, "127.0.0.1", 29500, "cpu:shm,cuda:nccl")
    assert not dist.is_initialized()


@pytest.mark.parametrize("backend", ["cpu:shm", "cpu:gloo,cuda:shm", "shm,gloo"])
def test_shared_memory_stands_alone(backend) -> None:
    with pytest.raises(ConfigError) as caught:
        colossal.launch(0, 1, "127.0.0.1", 29500, backend)
    required, found, advice = str(caught.value).split(". ")
    assert required == "The backend 'shm' moves tensors in host memory, and stands alone"
    assert found == f"Found {backend!r} for the device 'cpu'"
    assert advice.startswith("Use ")
    assert not dist.is_initialized()


def names_for_devices() -> list[str]:
    """Leave out the backend, or name it for a device: torch makes a group that hands out its tensors by device."""
    found = []
    for backend in (None, "cpu:shm"):
        group: Any = dist.new_group(backend=backend)
        value = torch.ones(3)
        dist.all_reduce(value, group=group)
        assert value.sum().item() == 6.0
        found.append(dist.get_backend(group))
    return found


def test_groups_take_the_backend_of_the_world() -> None:
    for backend, _ in run_processes(names_for_devices, 2):
        assert backend == "shm"
