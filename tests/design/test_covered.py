"""Coverage is told by package."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / f"{name}.py")
    assert spec
    assert spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_lines_are_summed_up_by_package() -> None:
    numbers = {"amp/a.py": (1, 2), "amp/b/c.py": (3, 4), "errors.py": (5, 5)}
    files = {
        f"src/colossal/{name}" if name == "errors.py" else f"src/colossal/_src/{name}": {"summary": {"covered_lines": ran, "num_statements": lines}}
        for name, (ran, lines) in numbers.items()
    }
    assert module("covered").covered(files) == {"amp": (4, 6), "top level": (5, 5), "colossal": (9, 11)}
