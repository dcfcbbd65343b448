"""Pages that hide what fails, or run less than they show, and honest ones that look alike. All are run at once."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIRST = 4  # the line of the Markdown on which the code begins
HIDDEN = "a check that fails must end the page"

SWALLOWS = """
class Swallow:
    def __enter__(self):
        return self
    def __exit__(self, *_):
        return True
"""

# What the page runs, the line of it that is named, and what is said.
CAUGHT = {
    "an_alias": ("import builtins\nE = getattr(builtins, 'Assertion' + 'Error')\ntry:\n    assert 1 == 2 * len('')\nexcept E:\n    x = 1", 4, HIDDEN),
    "a_base_of_it": ("E = ValueError.__mro__[1]\ntry:\n    assert not len('a')\nexcept (OSError, E):\n    x = 1", 3, HIDDEN),
    "a_group": ("E = ValueError.__mro__[1]\ntry:\n    assert not len('a')\nexcept* E:\n    x = 1", 3, HIDDEN),
    "a_manager": (SWALLOWS + "with Swallow():\n    assert not len('a')", 8, HIDDEN),
    "a_check_of_numpy": (SWALLOWS + "import numpy as np\nwith Swallow():\n    np.testing.assert_array_equal([1], [2])", 9, HIDDEN),
    "a_check_in_a_call": (SWALLOWS + "import numpy as np\ndef check():\n    return np.testing.assert_equal(1, 2)\nwith Swallow():\n    x = check()", 9, HIDDEN),
    "a_pool": ("from concurrent.futures import ThreadPoolExecutor\ndef check():\n    assert not len('a')\nwith ThreadPoolExecutor() as pool:\n    pool.submit(check)", 3, HIDDEN),
    "a_test_case": ("import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(1, 2)\nunittest.main(exit=False)", 4, HIDDEN),
    "an_exit_stack": (SWALLOWS + "from contextlib import ExitStack\nwith ExitStack() as stack:\n    stack.enter_context(Swallow())\n    assert not len('a')", 10, HIDDEN),
    "a_child": ("import multiprocessing as mp\ndef check():\n    assert not len('a')\nchild = mp.get_context('fork').Process(target=check)\nchild.start()\nchild.join()", 3, HIDDEN),
    "a_forked_child": ("import os\nif os.fork() == 0:\n    try:\n        assert not len('a')\n    finally:\n        os._exit(0)\nos.wait()", 4, HIDDEN),
}  # fmt: skip
EXITS = {
    "exit_beside_an_assert": ("import sys\nx = 1\nsys.exit(0); assert x == 2", 3, "before its last statement"),
    "hard_exit_beside_an_assert": ("import os\nx = 1\nos._exit(0); assert x == 2", 3, "os._exit(0): the page ends here"),
    "hard_exit_at_the_end": ("import os\nx = 1\nos._exit(0)", 3, "os._exit(0)"),
    "exit_in_a_function": ("def f():\n    raise SystemExit\nfor _ in range(9):\n    f()\nx = 1\nassert x == 2", 2, "before its last"),
    "another_program": ("import os, sys\nx = 1\nos.execv(sys.executable, [sys.executable, '-c', ''])", 5, "was gone before the page came to its end"),
    "libc_exit": ("import ctypes\nx = 1\nctypes.CDLL(None)._exit(0)", 5, "was gone before the page came to its end"),
    "a_return_before_an_assert": ("def f(x):\n    return x; assert x == 2\n" + "y = f(1)\n" * 30, 2, "this assert never ran"),
    "a_branch_not_taken": ("x = 1\n" * 30 + "if x == 2:\n    assert x == 1", 32, "this assert never ran"),
    "a_check_not_reached": ("import numpy as np\n" + "x = 1\n" * 30 + "if x == 2:\n    np.testing.assert_equal(x, 1)", 33, "this assert never ran"),
}  # fmt: skip
PADDING = "x = 1\n" * 30
IDLE = {
    "a_lambda": (PADDING + "f = lambda: 1 / 0", 31, "this lambda never ran"),
    "a_lambda_as_default": (PADDING + "def f(g=lambda: 1 / 0):\n    return 1\nf()", 31, "this lambda never ran"),
    "a_generator_expression": (PADDING + "y = (1 / 0 for _ in range(3))", 31, "this generator expression never ran"),
    "a_generator": (PADDING + "def f():\n    assert x == 2\n    yield\ny = f()", 32, "function `f` never ran"),
    "a_nested_function": (PADDING + "def f():\n    def g():\n        return 1 / 0\n    return g\nf()", 33, "function `g` never ran"),
    "a_coroutine": (PADDING + "async def f():\n    return 1 / 0\ny = f()\ny.close()", 32, "function `f` never ran"),
    "a_method_in_one_line": (PADDING + "class C:\n    def f(self): return 1 / 0\nC()", 32, "function `f` never ran"),
    "all_of_nothing": (PADDING + "assert all(y == 2 for y in [])", 31, "this generator expression never ran"),
    "a_list_of_nothing": (PADDING + "assert not [1 / 0 for y in ()]", 31, "this comprehension never ran"),
    "a_generator_asserted": ("x = 1\ndef f():\n    yield x\nassert f()\nlist(f())", 4, "this asserts a generator, which is always true"),
    "a_function_asserted": ("def f():\n    return 0\nf()\nassert f", 4, "this asserts a function, which is always true"),
    "a_map_asserted": ("y = map(str, [1])\nassert y\nlist(y)", 2, "this asserts a map"),
}  # fmt: skip
ASIDE = {
    "a_thread": ("import threading\ndef f():\n    raise ValueError('boom')\nt = threading.Thread(target=f)\nt.start()\nt.join()", 3, "ValueError: boom (in a thread)"),
    "a_thread_of_a_class": ("import threading\nclass T(threading.Thread):\n    def run(self):\n        [][0]\nT().start()", 4, "IndexError: list index out of range (in a thread)"),
    "a_timer": ("import threading\nthreading.Timer(0.01, lambda: 1 / 0).start()", 2, "ZeroDivisionError: division by zero (in a thread)"),
    "atexit": ("import atexit\n@atexit.register\ndef f():\n    raise ValueError('boom')", 4, "ValueError: boom"),
    "atexit_assert": ("import atexit\nx = 1\n@atexit.register\ndef f():\n    assert x == 2", 5, "AssertionError"),
    "a_finalizer": ("class C:\n    def __del__(self):\n        raise ValueError('boom')\nC()", 3, "ValueError: boom"),
    "a_finalizer_at_the_end": ("class C:\n    def __del__(self):\n        raise ValueError('boom')\nc = C()", 3, "ValueError: boom"),
    "a_weak_callback": ("import weakref\nclass C:\n    pass\nc = C()\nr = weakref.ref(c, lambda _: 1 / 0)\ndel c", 5, "ZeroDivisionError"),
    "a_task": ("import asyncio\nasync def f():\n    raise ValueError('boom')\nasync def main():\n    t = asyncio.create_task(f())\n    await asyncio.sleep(0.01)\nasyncio.run(main())", 3, "ValueError: boom (in asyncio"),
    "a_callback_of_a_loop": ("import asyncio\nasync def main():\n    asyncio.get_running_loop().call_soon(lambda: 1 / 0)\n    await asyncio.sleep(0.01)\nasyncio.run(main())", 3, "ZeroDivisionError: division by zero (in asyncio"),
}  # fmt: skip
FAKE = "lambda *_, **__: None"
REPLACED = {
    "a_check_of_numpy": (f"import numpy as np\nnp.testing.assert_equal = {FAKE}\nnp.testing.assert_equal(1, 2)", 3, "`numpy.testing.assert_equal` was replaced"),
    "a_check_and_back": (f"import numpy as np\nold = np.testing.assert_equal\nnp.testing.assert_equal = {FAKE}\nnp.testing.assert_equal(1, 2)\nnp.testing.assert_equal = old", 4, "`numpy.testing.assert_equal` was replaced"),
    "a_code": ("import numpy as np\ndef fake(*_, **__):\n    return None\nnp.testing.assert_allclose.__code__ = fake.__code__\nnp.allclose([1], [2])\nfake()", 5, "`numpy.testing.assert_allclose` was replaced"),
    "a_mock": ("from unittest import mock\nimport numpy as np\nwith mock.patch('numpy.testing.assert_equal'):\n    np.testing.assert_equal(1, 2)", 4, "was replaced"),
    "a_builtin": ("import builtins\nbuiltins.all = bool\nassert all([0])", 3, "`builtins.all` was replaced"),
    "a_test_case": (f"import unittest\nunittest.TestCase.assertEqual = {FAKE}\nunittest.TestCase().assertEqual(1, 2)", 3, "`TestCase.assertEqual` was replaced"),
    "a_hook": ("import threading\nthreading.excepthook = print\nthreading.Thread(target=lambda: 1 / 0).start()", 5, "`threading.excepthook` was replaced"),
    "another_hook": ("import sys\nsys.unraisablehook = print\nx = 1", 5, "`sys.unraisablehook` was replaced"),
    "an_exit": ("import os\nos._exit = print\nx = 1", 5, "`os._exit` was replaced"),
    "a_comparison_of_torch": ("import torch\ntorch.equal = torch.is_tensor\nassert torch.equal(torch.ones(1))", 3, "`torch.equal` was replaced"),
    "a_tensor": (f"import torch\ntorch.Tensor.__eq__ = lambda a, b: torch.tensor(True)\nassert torch.ones(1) == 2", 3, "`Tensor.__eq__` was replaced"),
    "inside_torch": (f"import torch\ntorch.testing._comparison.not_close_error_metas = lambda *_, **__: []\ntorch.testing.assert_close(1, 2)", 3, "not_close_error_metas` was replaced"),
}  # fmt: skip
CHEATS = {
    f"{prefix}_{name}": cheat
    for prefix, table in {"caught": CAUGHT, "exits": EXITS, "idle": IDLE, "aside": ASIDE, "replaced": REPLACED}.items()
    for name, cheat in table.items()
}

HONEST = {
    "refusals": "try:\n    int('x')\nexcept ValueError as error:\n    print(error)\nelse:\n    raise AssertionError('it was accepted')",
    "suppressed": "from contextlib import suppress\nwith suppress(FileNotFoundError):\n    open('none')\nx = 1\nassert x",
    "a_helper": "def refused(action):\n    try:\n        action()\n    except (ValueError, TypeError) as error:\n        return error\n    raise AssertionError('it was accepted')\nassert refused(lambda: int('x'))",
    "an_error_of_a_library": "import numpy as np\nfrom numpy.linalg import LinAlgError\ntry:\n    np.linalg.inv(np.zeros((2, 2)))\nexcept LinAlgError:\n    x = 1",
    "generators": "def f():\n    yield 1\nassert list(f()) == [1]\nassert sum(x for x in range(3)) == 3\nassert next(x for x in [5]) == 5\nassert all(x > y for x in [2] for y in [1])\nassert {k: v for k, v in [(1, 2)] if k} == {1: 2}\nassert not [x for x in [1] if x > 1]",
    "lambdas": "f = lambda x: x + 1\nnothing = lambda: None\nassert f(1) == 2\nassert sorted([2, 1], key=lambda x: (x, 1)) == [1, 2]",
    "an_empty_list_aside": "missing = [x / 0 for x in ()]\nassert not missing",
    "threads": "import threading\ndef f(found):\n    found.append(1)\n    assert found\nfound = []\nthread = threading.Thread(target=f, args=(found,), daemon=True)\nthread.start()\nthread.join()\nassert found == [1]",
    "a_pool": "from concurrent.futures import ThreadPoolExecutor\ndef fail():\n    raise ValueError('boom')\nwith ThreadPoolExecutor() as pool:\n    future = pool.submit(fail)\nassert str(future.exception()) == 'boom'",
    "tasks": "import asyncio\nasync def f(x):\n    return x\nasync def main():\n    return await asyncio.gather(f(1), f(2))\nassert asyncio.run(main()) == [1, 2]",
    "an_end": "import sys\ndef main():\n    return 0\nif __name__ == '__main__':\n    sys.exit(main())",
    "a_forked_child": "import os\nif os.fork() == 0:\n    os._exit(0)\nassert os.wait()[1] == 0",
    "a_branch_for_a_device": "import torch\n" + PADDING + "if torch.cuda.is_available() and torch.version.cuda == 'none':\n    assert x == 2",
    "replaces_what_proves_nothing": "import os, time\nbefore, os.fsync = os.fsync, print\nos.fsync('x')\ntime.sleep = print\ntime.sleep(1)",
    "finalizers": "import atexit, gc\nclass C:\n    def __del__(self):\n        print('gone')\nc = C()\natexit.register(print, 'end')\ndel c",
    "checks": "import unittest\nimport numpy as np\nimport torch\nnp.testing.assert_allclose([1.0], [1.0])\ntorch.testing.assert_close(torch.ones(2), torch.ones(2))\nunittest.TestCase().assertEqual(1, 1)\nassert torch.ones(2).equal(torch.ones(2))",
    "managers": "from contextlib import ExitStack, contextmanager\n@contextmanager\ndef held():\n    try:\n        yield 1\n    finally:\n        print('free')\nwith ExitStack() as stack:\n    assert stack.enter_context(held()) == 1",
    "signals_of_its_own": "import os, signal\nfound = []\nsignal.signal(signal.SIGTERM, lambda *_: found.append(1))\nos.kill(os.getpid(), signal.SIGTERM)\nassert found",
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """The record of every page, run by one call of the front door."""
    home = tmp_path_factory.mktemp("hidden")
    codes = {name: cheat[0] for name, cheat in CHEATS.items()} | {
        f"honest_{name}": code for name, code in HONEST.items()
    }
    (home / "source/en").mkdir(parents=True)
    for name, code in codes.items():
        text = f"# Title\n\n```python\n{code.strip()}\n```\n<!-- doc-test-command: python {name}.py -->\n"
        (home / f"source/en/{name}.md").write_text(text, encoding="utf-8")
    command = [sys.executable, str(ROOT / "docs_test.py"), "--all", "--lang", "en", "--source", str(home / "source")]
    done = subprocess.run(
        [*command, "--build", str(home / "build/pages")], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 1, done.stdout + done.stderr
    records = [json.loads(file.read_text()) for file in (home / "build/verified").rglob("*.json")]
    return {record["page"]: record for record in records}


@pytest.mark.parametrize("name", CHEATS)
def test_a_page_that_hides_a_failure_fails_at_its_line(found, name) -> None:
    code, line, message = CHEATS[name]
    error = found[name]["error"]
    assert found[name]["status"] == "FAIL"
    assert message in error["message"]
    line -= len(code) - len(code.lstrip("\n"))
    ends = len(code.strip().split("\n")) + FIRST + 1  # the line of the command, where nothing more is known
    assert error["line"] == (
        ends if "was gone" in message or "hook` was" in message or "_exit` was" in message else line + FIRST - 1
    )


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_page_that_looks_alike_passes(found, name) -> None:
    record = found[f"honest_{name}"]
    assert (record["status"], record["error"]) == ("PASS", None)
