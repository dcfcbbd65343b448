"""Which tests `nox -s quick` runs for a change."""

from collections.abc import Callable

import pytest
from nearest import NearestTests

FILES = {
    "src/colossal/__init__.py": "",
    "src/colossal/errors.py": "",
    "src/colossal/_src/amp/__init__.py": "from colossal._src.amp.dynamic_scaler import Scaler\n",
    "src/colossal/_src/amp/dynamic_scaler.py": "from colossal.errors import E\nclass Scaler: ...\n",
    "src/colossal/_src/booster/__init__.py": "from colossal._src.booster.run import run\n",
    "src/colossal/_src/booster/run.py": "from colossal._src.amp import Scaler\ndef run(): ...\n",
    "src/colossal/_src/nn.py": "",
    "doctest/tool/__init__.py": "from tool.page import Page\n",
    "doctest/tool/page.py": "class Page: ...\n",
    "tests/helpers/models.py": "from colossal._src import nn\n",
    "tests/amp/conftest.py": "",
    "tests/amp/test_scaler.py": "from colossal._src.amp import Scaler\n",
    "tests/amp/test_other.py": "import colossal._src.nn\n",
    "tests/booster/test_run.py": "from colossal._src.booster import run\n",
    "tests/booster/test_direct.py": "from colossal._src.amp import Scaler\n",
    "tests/nn/test_nn.py": "from models import net\n",
    "tests/tool/test_page.py": "from tool import Page\n",
}
SECONDS = {"tests/amp/test_scaler.py": 4.0, "tests/booster/test_run.py": 20.0, "tests/booster/test_direct.py": 8.0}
AMP = ["tests/amp/test_scaler.py", "tests/amp/test_other.py"]


@pytest.fixture
def nearest(tmp_path) -> Callable[..., NearestTests]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return lambda *changed: NearestTests(tmp_path, frozenset(tmp_path / name for name in changed), SECONDS)


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        (
            "src/colossal/_src/amp/dynamic_scaler.py",
            [*AMP, "tests/booster/test_direct.py", "tests/booster/test_run.py"],
        ),
        ("src/colossal/_src/booster/run.py", ["tests/booster/test_direct.py", "tests/booster/test_run.py"]),
        ("src/colossal/_src/nn.py", ["tests/nn/test_nn.py", "tests/amp/test_other.py"]),
        ("doctest/tool/page.py", ["tests/tool/test_page.py"]),
        ("tests/helpers/models.py", ["tests/nn/test_nn.py"]),
        ("tests/booster/test_run.py", ["tests/booster/test_run.py"]),
        ("tests/amp/conftest.py", AMP),
        ("README.md", []),
    ],
)
def test_tests_of_the_package_come_first_then_those_nearest_by_imports(nearest, changed, tests) -> None:
    assert nearest(changed).within(1000) == (tests, [])


def test_what_does_not_fit_is_left_out(nearest) -> None:
    assert nearest("src/colossal/_src/amp/dynamic_scaler.py").within(25) == (
        [*AMP, "tests/booster/test_direct.py"],
        ["tests/booster/test_run.py"],
    )
    assert nearest("src/colossal/_src/amp/dynamic_scaler.py").within(12) == (
        AMP,
        [f"tests/booster/test_{name}.py" for name in ("direct", "run")],
    )


def test_a_changed_test_runs_however_long_it_takes(nearest) -> None:
    assert nearest("tests/booster/test_run.py").within(1) == (["tests/booster/test_run.py"], [])


def test_a_deleted_file_is_a_change(nearest) -> None:
    tests = nearest("src/colossal/_src/amp/dynamic_scaler.py")
    (tests.root / "src/colossal/_src/amp/dynamic_scaler.py").unlink()
    assert tests.within(1000)[0][:2] == AMP
