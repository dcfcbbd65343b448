"""Every test leaves the process as it found it."""

import gc
import importlib
import logging
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import tqdm
from durations import Durations
from hypothesis import HealthCheck, settings
from torch import distributed as dist

from colossal._src.cluster.mesh import _AMBIENT
from colossal._src.testing.limits import scaled
from colossal._src.testing.processes import PRELOADED, kept_pids
from colossal.logging import get_dist_logger
from colossal.testing import reuse_processes

OPEN_FILES = "/proc/self/fd"
TESTS = Path(__file__).parent
SUMMARY_WIDTH = 230
SLOW_FILE = re.compile(r"^pytestmark = .*\bpytest\.mark\.slow\b", re.MULTILINE)
PLUGIN_MODULES = (
    "colossal.nn.optimizer",
    "colossal._src.booster.plugin.ddp.torch_ddp",
    "colossal._src.booster.plugin.fsdp.torch_fsdp",
    "colossal._src.booster.plugin.gemini.gemini_plugin",
    "colossal._src.booster.plugin.hybrid.hybrid_parallel",
    "colossal._src.booster.plugin.zero.low_level_zero",
)
"""What `colossal.booster.plugin` imports of itself only when a plugin is asked for."""
CACHES = {".pytest_cache", ".hypothesis"}
WORKER = "PYTEST_XDIST_WORKER"  # a file may be that of another worker, in the same folder
SETTLE_SECONDS = scaled(30.0)
"""Some libraries tell their threads to end and do not wait for them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run choose its device, and write how long tests took."""
    parser.addoption("--device", default="cpu", help="what Booster and meshes take: cpu, or pretend (tests/device)")
    parser.addoption("--store-durations", action="store_true", help="write tests/durations.json; needs -n")


def pytest_configure(config: pytest.Config) -> None:
    """Test on one device, whatever the machine has, and keep ranks apart: OpenMP teams collapse on too few cores."""
    config.pluginmanager.register(Durations(config))
    os.environ["COLOSSAL_DEVICE"] = str(config.getoption("--device"))
    if os.environ["COLOSSAL_DEVICE"] == "pretend":
        _pretend()
    # How long an example takes is the machine's affair, and every machine looks at the same ones.
    unhurried = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("same", derandomize=True, database=None, **unhurried)
    settings.load_profile("same")
    torch.set_num_threads(1)
    # torch takes a kernel that was compiled for another vector width from its cache, and the results are wrong.
    width = torch.backends.cpu.get_cpu_capability()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}_{width}"))
    tqdm.tqdm.monitor_interval = 0  # no thread that watches progress bars and outlives the test that first shows one
    # A rank that imports these itself needs 0.3 s for pytest, and longer than for most of what it runs. Helpers are not
    # among them: before Python 3.14 the fork server does not look where pytest does.
    PRELOADED.extend(["pytest", "sklearn.datasets", "transformers.models.llama.modeling_llama", *PLUGIN_MODULES])


def _pretend() -> None:
    """Make the accelerator of ``tests/device`` known here, and to the processes that tests start."""
    folder = str(Path(__file__).with_name("device"))
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    importlib.import_module("pretend_device").register()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let the summary have the first line of each message where nobody set the width of the output."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and not sys.stdout.isatty():
        session.config.get_terminal_writer().fullwidth = SUMMARY_WIDTH


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import, on each worker, files of which no test is asked for: a third of them is slow as a whole."""
    if config.getoption("markexpr") != "not slow" or collection_path.suffix != ".py":
        return None
    return True if SLOW_FILE.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection_finish() -> None:
    """Leave what test files and libraries hold out of later collections: each would walk through a gigabyte of it."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU, with the reason."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and there is none here")


@pytest.fixture(autouse=True, scope="session")
def _processes() -> Iterator[None]:
    """Reuse the processes of `run_processes`; a test whose subject is their life or memory passes ``fresh=True``."""
    with reuse_processes():
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_generator() -> Iterator[None]:
    """Refuse to seed torch's generator on one of several ranks that are threads: they share it, and race for it."""
    seed = torch.manual_seed

    def checked(value: int) -> torch.Generator:
        is_rank = threading.current_thread() is not threading.main_thread() and dist.is_initialized()
        if is_rank and dist.get_world_size() > 1:
            caller = sys._getframe(1).f_code.co_filename  # the library seeds by itself, and may
            assert TESTS not in Path(caller).parents, "Seed outside of the ranks, or take run_processes."
        return seed(value)

    torch.manual_seed = checked
    yield
    torch.manual_seed = seed


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What the library has logged so far; pytest listens to a logger that keeps its messages, once it is set up."""
    with caplog.at_level(logging.INFO, get_dist_logger().name):
        yield lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture(autouse=True)
def _hygiene() -> Iterator[None]:
    before = _footprint()
    yield
    leaks = _leaks(before)
    deadline = time.monotonic() + SETTLE_SECONDS
    while leaks and time.monotonic() < deadline:
        time.sleep(0.02)
        leaks = _leaks(before)
    if dist.is_initialized():
        dist.destroy_process_group()
        leaks.append("a process group")
    if _AMBIENT.get() is not None:
        _AMBIENT.set(None)
        leaks.append("an ambient mesh")
    assert not leaks, f"A test must leave nothing behind. Found {'; '.join(leaks)}."


def _leaks(before: dict[str, set[str]]) -> list[str]:
    after = _footprint()
    found = [f"{what}: {sorted(after[what] - before[what])}" for what in after if after[what] - before[what]]
    lost = before["environment"] - after["environment"]
    return found + ([f"lost from the environment: {sorted(lost)}"] if lost else [])


def _footprint() -> dict[str, set[str]]:
    return {
        "thread": {thread.name for thread in threading.enumerate()},
        "process": {str(process.pid) for process in multiprocessing.active_children()} - set(map(str, kept_pids())),
        "environment": {f"{name}={value}" for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "socket": _sockets(),
        "file in the working folder": set()
        if WORKER in os.environ
        else {path.name for path in Path().iterdir()} - CACHES,
    }


def _sockets() -> set[str]:
    targets = set()
    for link in os.scandir(OPEN_FILES) if Path(OPEN_FILES).exists() else ():
        with suppress(FileNotFoundError):
            targets.add(os.readlink(link.path))  # noqa: PTH115 - twice a test: a Path costs more than what it reads
    return {target for target in targets if target.startswith("socket:")}
