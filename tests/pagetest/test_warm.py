"""Warm processes: a run that was forked from a preloaded parent ends as a cold one does."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chosen import chosen

from pagetest.limits import VARIABLE, scaled

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
TWO = "torchrun --standalone --nproc_per_node=2 {}.py"


def table(name: str) -> dict[str, Any]:
    """A table of another test file."""
    spec = importlib.util.spec_from_file_location("cheats", HERE / "test_cheats.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def compiles(code: str) -> bool:
    try:
        compile(code, "page", "exec")
    except SyntaxError:
        return False
    return True


INSIDE = """
import inspect, io, json, multiprocessing, os, pickle, signal, sys, threading
from pathlib import Path
assert Path.cwd() == Path(__file__).parent
assert __name__ == "__main__" and __spec__ is None and __package__ is None and __cached__ is None
assert sys.modules["__main__"].__dict__ is globals()
class Thing:
    pass
assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
assert "class Thing" in inspect.getsource(Thing)
assert threading.current_thread() is threading.main_thread() and threading.active_count() == 1
print(sorted(globals()), type(__loader__).__name__)
print(sys.argv, sys.orig_argv, sys.path, sys.flags, sys.gettrace(), sys.excepthook.__name__)
print({number.name: str(signal.getsignal(number)) for number in signal.Signals})
print({name: os.environ[name] for name in sorted(os.environ) if name != "COLOSSAL_PAGE_RUN"})
print(os.getpid() == os.getpgid(0) == os.getsid(0), os.isatty(0), sys.stdin.read(), sys.stdout.encoding)
print(os.readlink("/proc/self/fd/0"), multiprocessing.current_process().name, multiprocessing.get_start_method())
print("to stderr", file=sys.stderr)
os.system("echo from a shell")
os.write(1, b"raw\\n")
threading.Thread(target=lambda: print("from a thread")).start()
"""

WORKERS = """
import multiprocessing as mp
def spawned(x):
    y = x + 1
    print(y)
if __name__ == "__main__":
    for method in ("spawn", "fork", "forkserver"):
        worker = mp.get_context(method).Process(target=spawned, args=(1,))
        worker.start()
        worker.join()
        assert worker.exitcode == 0
"""

RANKS = """
import os, sys, signal
import torch, torch.distributed as dist
names = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "COLOSSAL_PAGE_RUN")
dist.init_process_group("gloo")
for rank in range(2):
    if rank == dist.get_rank():
        print("page:", {name: "" if name in names else os.environ[name] for name in sorted(os.environ)}, flush=True)
        print("page:", sys.argv, sys.orig_argv, os.getpid() == os.getsid(0) == os.getpgid(0), flush=True)
    dist.barrier()
value = torch.ones(1)
dist.all_reduce(value)
assert value.item() == 2
dist.destroy_process_group()
"""

FIRST_FAILURE = """
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("boom")
dist.barrier()
"""

HANG = """
import time
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(600)
dist.barrier()
"""

ONE_RANK_KILLS_ITSELF = """
import os, signal, subprocess, time
if os.environ["RANK"] == "1":
    subprocess.Popen(["sleep", "987"])
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""

PLAIN = {
    "inside": INSIDE,
    "workers": WORKERS,
    "passes": "x = 1\nprint(x)",
    "exits_late": "import atexit\natexit.register(print, 'late')\nprint('early')",
    "interrupted": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nx = 1",
    "tells_its_parent": "import os, signal, time\nos.system('true')\nassert os.getppid() != 1",
    "hang": "import time\ntime.sleep(600)",
}
RANKED = {
    "ranks": RANKS,
    "first_failure": FIRST_FAILURE,
    "hang_of_a_rank": HANG,
    "one_rank_kills_itself": ONE_RANK_KILLS_ITSELF,
}
CHEATS = {f"cheat_{number}": code for number, (code, _, _) in enumerate(table("CHEATS").values())}
CHEATS = {name: CHEATS[name] for name in chosen([name for name in CHEATS if compiles(CHEATS[name])], 6, "warm cheats")}
LEFTOVERS = {f"left_{number}": code for number, code in enumerate(table("LEFTOVERS").values())}
SHOWS = """```python
print('one')
```

```text output
one
```

```python
print('two')
```

```text output
2
```
"""
GROUPS = {
    "alone": {name: f"```python\n{code.strip()}\n```\n" for name, code in (PLAIN | CHEATS | LEFTOVERS).items()},
    "ranks": {name: f"```python\n{code.strip()}\n```\n" for name, code in RANKED.items()},
}
GROUPS["alone"]["shows_output"] = SHOWS
ARGUMENTS = {"ranks": " --lr 1", "inside": " --flag"}


@pytest.fixture(scope="module")
def run_group(tmp_path_factory) -> Callable[[str], dict[str, Any]]:
    """Runs every page of a group cold and warm by one process, once."""

    @cache
    def run(group: str) -> dict[str, Any]:
        home = tmp_path_factory.mktemp("warm")
        (home / "source/en").mkdir(parents=True)
        for name, body in GROUPS[group].items():
            command = TWO.format(name) if name in RANKED else f"python {'-u ' if name == 'inside' else ''}{name}.py"
            comment = f"\n<!-- doc-test-command: {command}{ARGUMENTS.get(name, '')} -->\n"
            (home / f"source/en/{name}.md").write_text(f"# Title\n\n{body}{comment}", encoding="utf-8")
        words = [sys.executable, str(HERE / "run_twice.py"), str(home / "source"), str(home / "build")]
        outer = {**os.environ, VARIABLE: "0.2"}  # what outlives its page is waited for one second only
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=scaled(1800), env=outer)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.chosen
@pytest.mark.parametrize(("group", "name"), [(group, name) for group, pages in GROUPS.items() for name in pages])
def test_a_warm_run_ends_as_a_cold_one(run_group, group, name) -> None:
    page = run_group(group)[name]
    assert page["was_forked"]
    cold, warm = ({**page[manner], "seconds": 0} for manner in ("cold", "warm"))
    if name in RANKED:  # the launcher's own words differ, and so does the order of the ranks
        ours = [sorted(line for line in run.pop("log") if line.startswith("page:")) for run in (cold, warm)]
        assert ours[0] == ours[1]
    assert warm == cold


def passed(found: dict[str, Any]) -> set[str]:
    return {name for name, page in found.items() if page["warm"]["status"] == "PASS"}


@pytest.mark.parametrize("group", ["alone"])
def test_pages_end_as_they_should(run_group, group) -> None:
    found = run_group(group)
    assert passed(found) == {"inside", "workers", "passes", "exits_late", "tells_its_parent"}
    assert found["shows_output"]["warm"]["outputs_matched"] == 1


@pytest.mark.parametrize("group", ["ranks"])
def test_pages_of_several_ranks_end_as_they_should(run_group, group) -> None:
    found = run_group(group)
    assert passed(found) == {"ranks"}
    assert found["first_failure"]["warm"]["failure"]["message"] == "ValueError: boom"
    assert found["hang_of_a_rank"]["warm"]["failure"]["rank"] == 1
    assert (found["ranks"]["warm"]["backend"], found["ranks"]["warm"]["world"]) == ("gloo", 2)
