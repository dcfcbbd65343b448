"""Pages that hide what fails, or run less than they show, and honest ones that look alike. All are run at once."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagetest.limits import scaled

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FIRST = 4  # the line of the Markdown on which the code begins
LAST = 0  # stands for the line of the command, where no other is known
HIDDEN = "a check that fails must end the page"
PADDING = "x = 1\n" * 30
SWALLOW = """
class Swallow:
    def __enter__(self):
        return self
    def __exit__(self, *_):
        return True
"""

# The line of the code that is named, what is said, and the code; a line `# PADDING` stands for many that run.
CAUGHT = {
    "an_alias": (
        4,
        HIDDEN,
        """
import builtins
E = getattr(builtins, 'Assertion' + 'Error')
try:
    assert 1 == 2 * len('')
except E:
    x = 1
""",
    ),
    "a_base_of_it": (
        3,
        HIDDEN,
        """
E = ValueError.__mro__[1]
try:
    assert not len('a')
except (OSError, E):
    x = 1
""",
    ),
    "a_group": (
        3,
        HIDDEN,
        """
E = ValueError.__mro__[1]
try:
    assert not len('a')
except* E:
    x = 1
""",
    ),
    "a_manager": (
        7,
        HIDDEN,
        SWALLOW
        + """with Swallow():
    assert not len('a')
""",
    ),
    "a_check_of_numpy": (
        8,
        HIDDEN,
        SWALLOW
        + """import numpy as np
with Swallow():
    np.testing.assert_array_equal([1], [2])
""",
    ),
    "a_check_in_a_call": (
        8,
        HIDDEN,
        SWALLOW
        + """import numpy as np
def check():
    return np.testing.assert_equal(1, 2)
with Swallow():
    x = check()
""",
    ),
    "a_pool": (
        3,
        HIDDEN,
        """
from concurrent.futures import ThreadPoolExecutor
def check():
    assert not len('a')
with ThreadPoolExecutor() as pool:
    pool.submit(check)
""",
    ),
    "a_test_case": (
        4,
        HIDDEN,
        """
import unittest
class T(unittest.TestCase):
    def test(self):
        self.assertEqual(1, 2)
unittest.main(exit=False)
""",
    ),
    "an_error_that_does_not_come": (
        8,
        HIDDEN,
        SWALLOW
        + """from colossal.testing import expect_error
with Swallow():
    with expect_error(ValueError):
        x = 1
""",
    ),
    "an_exit_stack": (
        9,
        HIDDEN,
        SWALLOW
        + """from contextlib import ExitStack
with ExitStack() as stack:
    stack.enter_context(Swallow())
    assert not len('a')
""",
    ),
    "a_child": (
        3,
        HIDDEN,
        """
import multiprocessing as mp
def check():
    assert not len('a')
child = mp.get_context('fork').Process(target=check)
child.start()
child.join()
""",
    ),
    "a_forked_child": (
        4,
        HIDDEN,
        """
import os
if os.fork() == 0:
    try:
        assert not len('a')
    finally:
        os._exit(0)
os.wait()
""",
    ),
}
EXITS = {
    "exit_beside_an_assert": (
        3,
        "before its last statement",
        """
import sys
x = 1
sys.exit(0); assert x == 2
""",
    ),
    "hard_exit_beside_an_assert": (
        3,
        "os._exit(0): the page ends here",
        """
import os
x = 1
os._exit(0); assert x == 2
""",
    ),
    "hard_exit_at_the_end": (
        3,
        "os._exit(0)",
        """
import os
x = 1
os._exit(0)
""",
    ),
    "exit_in_a_function": (
        2,
        "before its last",
        """
def f():
    raise SystemExit
for _ in range(9):
    f()
x = 1
assert x == 2
""",
    ),
    "another_program": (
        LAST,
        "was gone before the page came to its end",
        """
import os, sys
x = 1
os.execv(sys.executable, [sys.executable, '-c', ''])
""",
    ),
    "libc_exit": (
        LAST,
        "was gone before the page came to its end",
        """
import ctypes
x = 1
ctypes.CDLL(None)._exit(0)
""",
    ),
    "a_return_before_an_assert": (
        2,
        "this assert never ran",
        """
def f(x):
    return x; assert x == 2
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
y = f(1)
""",
    ),
    "a_branch_not_taken": (
        32,
        "this assert never ran",
        """
# PADDING
if x == 2:
    assert x == 1
""",
    ),
    "an_expected_error_not_reached": (
        33,
        "this assert never ran",
        """
from colossal.testing import expect_error
# PADDING
if x == 2:
    with expect_error(ValueError):
        raise ValueError
""",
    ),
    "a_check_not_reached": (
        33,
        "this assert never ran",
        """
import numpy as np
# PADDING
if x == 2:
    np.testing.assert_equal(x, 1)
""",
    ),
}
IDLE = {
    "a_lambda": (
        31,
        "this lambda never ran",
        """
# PADDING
f = lambda: 1 / 0
""",
    ),
    "a_lambda_as_default": (
        31,
        "this lambda never ran",
        """
# PADDING
def f(g=lambda: 1 / 0):
    return 1
f()
""",
    ),
    "a_generator_expression": (
        31,
        "this generator expression never ran",
        """
# PADDING
y = (1 / 0 for _ in range(3))
""",
    ),
    "a_generator": (
        32,
        "this assert never ran",
        """
# PADDING
def f():
    assert x == 2
    yield
y = f()
""",
    ),
    "a_nested_function": (
        33,
        "function `g` never ran",
        """
# PADDING
def f():
    def g():
        return 1 / 0
    return g
f()
""",
    ),
    "a_coroutine": (
        32,
        "function `f` never ran",
        """
# PADDING
async def f():
    return 1 / 0
y = f()
y.close()
""",
    ),
    "a_method_in_one_line": (
        32,
        "function `f` never ran",
        """
# PADDING
class C:
    def f(self): return 1 / 0
C()
""",
    ),
    "all_of_nothing": (
        31,
        "this generator expression never ran",
        """
# PADDING
assert all(y == 2 for y in [])
""",
    ),
    "a_list_of_nothing": (
        31,
        "this comprehension never ran",
        """
# PADDING
assert not [1 / 0 for y in ()]
""",
    ),
    "a_generator_asserted": (
        4,
        "this asserts a generator, which is always true",
        """
x = 1
def f():
    yield x
assert f()
list(f())
""",
    ),
    "a_function_asserted": (
        4,
        "this asserts a function, which is always true",
        """
def f():
    return 0
f()
assert f
""",
    ),
    "a_map_asserted": (
        2,
        "this asserts a map",
        """
y = map(str, [1])
assert y
list(y)
""",
    ),
}
ASIDE = {
    "a_thread": (
        3,
        "ValueError: boom (in a thread)",
        """
import threading
def f():
    raise ValueError('boom')
t = threading.Thread(target=f)
t.start()
t.join()
""",
    ),
    "a_thread_of_a_class": (
        4,
        "IndexError: list index out of range (in a thread)",
        """
import threading
class T(threading.Thread):
    def run(self):
        [][0]
T().start()
""",
    ),
    "an_assert_in_a_thread": (
        4,
        "AssertionError: no (in a thread)",
        """
import threading
x = 1
def f():
    assert x == 2, 'no'
threading.Thread(target=f).start()
""",
    ),
    "a_timer": (
        2,
        "ZeroDivisionError: division by zero (in a thread)",
        """
import threading
threading.Timer(0.01, lambda: 1 / 0).start()
""",
    ),
    "atexit": (
        4,
        "ValueError: boom",
        """
import atexit
@atexit.register
def f():
    raise ValueError('boom')
""",
    ),
    "atexit_assert": (
        5,
        "AssertionError",
        """
import atexit
x = 1
@atexit.register
def f():
    assert x == 2
""",
    ),
    "a_finalizer": (
        3,
        "ValueError: boom",
        """
class C:
    def __del__(self):
        raise ValueError('boom')
C()
""",
    ),
    "a_finalizer_at_the_end": (
        3,
        "ValueError: boom",
        """
class C:
    def __del__(self):
        raise ValueError('boom')
c = C()
""",
    ),
    "a_weak_callback": (
        5,
        "ZeroDivisionError",
        """
import weakref
class C:
    pass
c = C()
r = weakref.ref(c, lambda _: 1 / 0)
del c
""",
    ),
    "a_task": (
        3,
        "ValueError: boom (in asyncio",
        """
import asyncio
async def f():
    raise ValueError('boom')
async def main():
    t = asyncio.create_task(f())
    await asyncio.sleep(0.01)
asyncio.run(main())
""",
    ),
    "a_callback_of_a_loop": (
        3,
        "ZeroDivisionError: division by zero (in asyncio",
        """
import asyncio
async def main():
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0.01)
asyncio.run(main())
""",
    ),
}
REPLACED = {
    "a_check_of_numpy": (
        3,
        "`numpy.testing.assert_equal` was replaced",
        """
import numpy as np
np.testing.assert_equal = lambda *_, **__: None
np.testing.assert_equal(1, 2)
""",
    ),
    "a_check_and_back": (
        4,
        "`numpy.testing.assert_equal` was replaced",
        """
import numpy as np
old = np.testing.assert_equal
np.testing.assert_equal = lambda *_, **__: None
np.testing.assert_equal(1, 2)
np.testing.assert_equal = old
""",
    ),
    "a_code": (
        LAST,
        "assert_allclose` was replaced",
        """
import numpy as np
def fake(*_, **__):
    return None
np.testing.assert_allclose.__code__ = fake.__code__
np.allclose([1], [2])
fake()
""",
    ),
    "an_expected_error": (
        4,
        "`_ExpectedError.__exit__` was replaced",
        """
from colossal.testing import expect_error
import colossal._src.testing.expected_error as own
own._ExpectedError.__exit__ = lambda *_: True
with expect_error(ValueError):
    x = 1
""",
    ),
    "a_comparison_of_models": (
        6,
        "assert_equal_to_one_process` was replaced",
        """
import colossal.testing, torch
def fake(*_, **__):
    return None
net = torch.nn.Linear(1, 1)
colossal.testing.assert_equal_to_one_process.__code__ = fake.__code__
colossal.testing.assert_equal_to_one_process(net, net)
fake()
""",
    ),
    "a_mock": (
        4,
        "was replaced",
        """
from unittest import mock
import numpy as np
with mock.patch('numpy.testing.assert_equal'):
    np.testing.assert_equal(1, 2)
""",
    ),
    "another_builtin": (
        3,
        "`builtins.any` was replaced",
        """
import builtins
builtins.any = lambda *_: True
assert any([])
""",
    ),
    "a_builtin": (
        3,
        "`builtins.all` was replaced",
        """
import builtins
builtins.all = bool
assert all([0])
""",
    ),
    "a_test_case": (
        3,
        "`TestCase.assertEqual` was replaced",
        """
import unittest
unittest.TestCase.assertEqual = lambda *_, **__: None
unittest.TestCase().assertEqual(1, 2)
""",
    ),
    "a_hook": (
        LAST,
        "`threading.excepthook` was replaced",
        """
import threading
threading.excepthook = print
threading.Thread(target=lambda: 1 / 0).start()
""",
    ),
    "another_hook": (
        LAST,
        "`sys.unraisablehook` was replaced",
        """
import sys
sys.unraisablehook = print
x = 1
""",
    ),
    "an_exit": (
        LAST,
        "`os._exit` was replaced",
        """
import os
os._exit = print
x = 1
""",
    ),
    "a_comparison_of_torch": (
        3,
        "`torch.equal` was replaced",
        """
import torch
torch.equal = torch.is_tensor
assert torch.equal(torch.ones(1))
""",
    ),
    "a_tensor": (
        3,
        "`Tensor.__eq__` was replaced",
        """
import torch
torch.Tensor.__eq__ = lambda a, b: torch.tensor(True)
assert torch.ones(1) == 2
""",
    ),
    "inside_torch": (
        3,
        "not_close_error_metas` was replaced",
        """
import torch
torch.testing._comparison.not_close_error_metas = lambda *_, **__: []
torch.testing.assert_close(1, 2)
""",
    ),
}
WRITES = {
    "into_the_docs_tree": (
        4,
        "a page writes into its own folder",
        """
from pathlib import Path
here = Path(__file__)
tree = here.parents[4] / 'source'
(tree / 'en' / 'new.txt').write_text('x')
""",
    ),
    "a_page_away": (
        3,
        "a page writes into its own folder",
        """
import os
name = '../../../../source/en/away'
os.mkdir(name)
os.rmdir(name)
""",
    ),
    "into_the_project": (
        4,
        "a page writes into its own folder",
        """
import colossal, os
from pathlib import Path
new = Path(colossal.__file__).parent / 'new.txt'
open(new, 'w').close()
os.remove(new)
""",
    ),
    "into_the_tests": (
        5,
        "a page writes into its own folder",
        f"""
import os
import shutil
open('own.txt', 'w').close()
new = {str(ROOT / "tests" / "new.txt")!r}
shutil.copyfile('own.txt', new)
os.rename(new, 'old.txt')
""",
    ),
}
SIGNALS = {
    "to_its_parent": (
        2,
        "a page must not signal what runs it",
        "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)",
    ),
    "to_its_parent_in_a_try": (
        4,
        "a page must not signal what runs it",
        """
import os
x = 1
try:
    os.kill(os.getppid(), 2)
except PermissionError:
    x = 2
""",
    ),
    "to_the_group_of_its_parent": (
        2,
        "a page must not signal what runs it",
        "import os, signal\nos.killpg(os.getpgid(os.getppid()), signal.SIGINT)",
    ),
    "by_a_shell": (LAST, "was killed by SIGTERM", "import os\nos.system(f'kill -TERM {os.getppid()}')"),
    "killed_by_a_shell": (LAST, "was killed by SIGKILL", "import os\nos.system(f'kill -KILL {os.getppid()}')"),
    "by_a_shell_and_ignored": (
        LAST,
        "was killed by SIGTERM",
        """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.system(f'kill -TERM {os.getppid()}')
time.sleep(0.3)
""",
    ),
    "to_the_parent_s_parent": (
        LAST,
        "the process that ran this page ended with",
        """
import os, time
from pathlib import Path
above = Path(f'/proc/{os.getppid()}/stat').read_text().rpartition(')')[2].split()[1]
os.system(f'kill -TERM {above}')
time.sleep(1000)
""",
    ),
    "killing_the_parent_s_parent": (
        LAST,
        "the process that ran this page ended with -9",
        """
import ctypes, os, time
from pathlib import Path
above = Path(f'/proc/{os.getppid()}/stat').read_text().rpartition(')')[2].split()[1]
ctypes.CDLL(None).kill(int(above), 9)
time.sleep(1000)
""",
    ),
    "to_the_group_of_the_parent_s_parent": (
        LAST,
        "the process that ran this page ended with",
        """
import ctypes, os, time
from pathlib import Path
above = Path(f'/proc/{os.getppid()}/stat').read_text().rpartition(')')[2].split()[1]
ctypes.CDLL(None).killpg(os.getpgid(int(above)), 15)
time.sleep(1000)
""",
    ),
}
TABLES = {
    "caught": CAUGHT,
    "exits": EXITS,
    "idle": IDLE,
    "aside": ASIDE,
    "replaced": REPLACED,
    "signals": SIGNALS,
    "writes": WRITES,
}
CHEATS = {f"{prefix}_{name}": cheat for prefix, table in TABLES.items() for name, cheat in table.items()}

HONEST = {
    "refusals": """
# PADDING
try:
    int('x')
except ValueError as error:
    print(error)
else:
    raise AssertionError('it was accepted')
""",
    "suppressed": """
from contextlib import suppress
with suppress(FileNotFoundError):
    open('none')
x = 1
assert x
""",
    "a_helper": """
# PADDING
def refused(action):
    try:
        action()
    except (ValueError, TypeError) as error:
        return error
    raise AssertionError('it was accepted')
assert refused(lambda: int('x'))
""",
    "an_error_of_a_library": """
import numpy as np
from numpy.linalg import LinAlgError
try:
    np.linalg.inv(np.zeros((2, 2)))
except LinAlgError:
    x = 1
""",
    "generators": """
def f():
    yield 1
assert list(f()) == [1]
assert sum(x for x in range(3)) == 3
assert next(x for x in [5]) == 5
assert all(x > y for x in [2] for y in [1])
assert {k: v for k, v in [(1, 2)] if k} == {1: 2}
assert not [x for x in [1] if x > 1]
""",
    "lambdas": """
f = lambda x: x + 1
nothing = lambda: None
assert f(1) == 2
assert sorted([2, 1], key=lambda x: (x, 1)) == [1, 2]
""",
    "messages_that_are_not_needed": """
# PADDING
import torch
torch.testing.assert_close(1, 1, msg=lambda text: f'{text}!')
assert x == 1, ', '.join(str(y) for y in [x])
if x == 2:
    raise ValueError(', '.join(str(y) for y in [x]))
""",
    "an_empty_list_aside": """
missing = [x / 0 for x in ()]
assert not missing
""",
    "threads": """
import threading
def f(found):
    found.append(1)
    assert found
found = []
thread = threading.Thread(target=f, args=(found,), daemon=True)
thread.start()
thread.join()
assert found == [1]
""",
    "a_pool": """
from concurrent.futures import ThreadPoolExecutor
def fail():
    raise ValueError('boom')
with ThreadPoolExecutor() as pool:
    future = pool.submit(fail)
assert str(future.exception()) == 'boom'
""",
    "tasks": """
import asyncio
async def f(x):
    return x
async def main():
    return await asyncio.gather(f(1), f(2))
assert asyncio.run(main()) == [1, 2]
""",
    "an_end": """
import sys
def main():
    return 0
if __name__ == '__main__':
    sys.exit(main())
""",
    "a_forked_child": """
import os
if os.fork() == 0:
    os._exit(0)
assert os.wait()[1] == 0
""",
    "a_branch_for_a_device": """
import torch
# PADDING
if torch.cuda.is_available() and torch.version.cuda == 'none':
    assert x == 2
""",
    "replaces_what_proves_nothing": """
import os, time
before, os.fsync = os.fsync, print
os.fsync('x')
time.sleep = print
time.sleep(1)
""",
    "finalizers": """
import atexit, gc
class C:
    def __del__(self):
        print('gone')
c = C()
atexit.register(print, 'end')
del c
""",
    "checks": """
import unittest
import numpy as np
import torch
np.testing.assert_allclose([1.0], [1.0])
torch.testing.assert_close(torch.ones(2), torch.ones(2))
unittest.TestCase().assertEqual(1, 1)
assert torch.ones(2).equal(torch.ones(2))
""",
    "managers": """
from contextlib import ExitStack, contextmanager
@contextmanager
def held():
    try:
        yield 1
    finally:
        print('free')
with ExitStack() as stack:
    assert stack.enter_context(held()) == 1
""",
    "a_signal_to_the_page": """
import os, signal
found = []
signal.signal(signal.SIGUSR1, lambda *_: found.append(1))
if os.fork() == 0:
    os.kill(os.getppid(), signal.SIGUSR1)
    os._exit(0)
assert os.wait()[1] == 0
assert found
""",
    "writes_of_its_own": """
import os, tempfile
from pathlib import Path
Path('new').mkdir()
Path('new/own.txt').write_text('x')
os.rename('new/own.txt', 'own.txt')
with tempfile.TemporaryDirectory() as folder:
    Path(folder, 'x').touch()
assert open(__file__).read()
""",
    "signals_to_children": """
import os, signal, subprocess
child = subprocess.Popen(['sleep', '1000'], start_new_session=True)
os.kill(child.pid, 0)
os.kill(os.getppid(), 0)
os.killpg(child.pid, signal.SIGTERM)
assert child.wait() == -signal.SIGTERM
""",
    "signals_of_its_own": """
import os, signal
found = []
signal.signal(signal.SIGTERM, lambda *_: found.append(1))
os.kill(os.getpid(), signal.SIGTERM)
assert found
""",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """The record of every page, run by one call of the front door."""
    home = tmp_path_factory.mktemp("hidden")
    pages = {name: code for name, (_, _, code) in CHEATS.items()} | {f"honest_{name}": HONEST[name] for name in HONEST}
    (home / "source/en").mkdir(parents=True)
    for name, code in pages.items():
        text = f"# Title\n\n```python\n{padded(code)}\n```\n<!-- doc-test-command: python {name}.py -->\n"
        (home / f"source/en/{name}.md").write_text(text, encoding="utf-8")
    command = [sys.executable, str(ROOT / "docs_test.py"), "--all", "--lang", "en", "--source", str(home / "source")]
    done = subprocess.run(
        [*command, "--build", str(home / "build/pages")],
        capture_output=True,
        text=True,
        check=False,
        timeout=scaled(3600),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.endswith(f"\n{len(HONEST)} passed, {len(CHEATS)} failed\n")
    records = [json.loads(file.read_text()) for file in (home / "build/verified").rglob("*.json")]
    return {record["page"]: record for record in records}


def padded(code: str) -> str:
    return code.strip("\n").replace("# PADDING\n", PADDING)


@pytest.mark.parametrize("name", CHEATS)
def test_a_page_that_hides_a_failure_fails_at_its_line(found, name) -> None:
    line, message, code = CHEATS[name]
    error = found[name]["error"]
    assert found[name]["status"] == "FAIL"
    assert message in error["message"]
    assert error["line"] == FIRST - 1 + (line or len(padded(code).split("\n")) + 2)


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_page_that_looks_alike_passes(found, name) -> None:
    record = found[f"honest_{name}"]
    assert (record["status"], record["error"]) == ("PASS", None)


RANKS = """
import os, sys
# PADDING
def check(x):
    assert x == 1
if os.environ['RANK'] == '1':
    check(1)
{}
y = 2
"""


@pytest.mark.parametrize(
    ("last", "line", "message"),
    [
        ("", 0, ""),
        ("    sys.exit(0)", 40, "SystemExit: the page ends here, before its last statement"),
        ("    raise SystemExit; assert x == 1", 40, "SystemExit: the page ends here, before its last statement"),
        ("    assert x == 1 or (lambda: 1 / 0)()", 40, "this lambda never ran on any rank"),
    ],
)
def test_what_runs_on_any_rank_counts_and_every_rank_comes_to_the_end(docs, last, line, message) -> None:
    docs.add("lesson", padded(RANKS.format(last)), "torchrun --standalone --nproc_per_node=2 lesson.py", ("en",))
    docs.run("lesson", "--lang", "en")
    (record,) = docs.records.read()
    error = record["error"] or {"line": 0, "message": ""}
    assert (error["line"], message in error["message"]) == (line, True), error
