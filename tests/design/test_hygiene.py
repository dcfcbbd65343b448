"""The fixture that keeps tests clean sees what it is there to see."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONFTEST = Path(__file__).parents[1] / "conftest.py"

LEAKS = {
    "thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(20,), daemon=True).start()",
    "environment": "import os\nos.environ['LEFT_BEHIND'] = '1'",
    "lost from the environment": "import os\ndel os.environ['TO_BE_LOST']",
    "socket": "import socket\nglobal kept\nkept = socket.socket()",
    "process": (
        "import multiprocessing, time\nmultiprocessing.Process(target=time.sleep, args=(20,), daemon=True).start()"
    ),
    "file in the working folder": "open('left', 'w').close()",
    "a process group": (
        "from torch import distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    ),
    "an ambient mesh": (
        "from colossal.cluster import current_mesh\nfrom torch import distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "current_mesh()\ndist.destroy_process_group()"
    ),
}


def name_of(what: str) -> str:
    return f"test_{what.replace(' ', '_')}"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("leaks")
    settings = CONFTEST.read_text(encoding="utf-8").replace("SETTLE_SECONDS = scaled(30.0)", "SETTLE_SECONDS = 0.1")
    (folder / "conftest.py").write_text(settings)
    bodies = {name_of(what): code.replace("\n", "\n    ") for what, code in LEAKS.items()} | {"test_clean": "pass"}
    tests = [f"def {name}():\n    {body}\n" for name, body in bodies.items()]
    (folder / "test_leaks.py").write_text("\n\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "test_leaks.py"]
    paths = os.pathsep.join(str(CONFTEST.parents[1] / each) for each in ("tests/helpers", "doctest"))
    environment = os.environ | {"TO_BE_LOST": "1", "COLUMNS": "1000", "PYTHONPATH": paths}
    environment.pop("PYTEST_XDIST_WORKER", None)  # this run has the folder alone
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout


@pytest.mark.parametrize("what", LEAKS)
def test_a_leak_is_an_error_that_names_it(what, report) -> None:
    (line,) = [line for line in report.splitlines() if line.startswith(f"ERROR test_leaks.py::{name_of(what)} ")]
    assert what in line.partition("Found ")[2]


def test_a_clean_test_passes(report) -> None:
    assert f"{len(LEAKS) + 1} passed, {len(LEAKS)} errors" in report
