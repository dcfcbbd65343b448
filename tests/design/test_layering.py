"""Who may import whom: a module imports its own package and lower floors, never upward.

Every import counts, the ones inside functions and under ``TYPE_CHECKING`` included, and so does every
``importlib.import_module`` with a literal. Where such a call takes its name from a variable, every string of the file
that reads like ``colossal.x`` counts as an import, because it may be an entry of a lazy table.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

FLOORS = (
    ("errors", "logging", "typing", "_typing"),
    ("cluster", "accelerator", "_native"),
    ("comm", "_registration"),
    ("kernel",),
    ("tensor", "lazy", "offload"),
    ("nn", "amp", "interface"),
    ("shardformer", "pipeline", "zero", "checkpoint_io"),
    ("booster",),
    ("legacy", "auto_parallel", "inference", "cli"),
)
FLOOR_OF = {unit: floor for floor, units in enumerate(FLOORS) for unit in units}
STRICT_FLOORS = range(5)  # of pyright; CONTRIBUTING.md says so
BLIND_FLOORS = {6, 8}  # siblings on these floors do not know each other
TESTING = "testing"  # may import anything; nothing in the library imports it
FRONT_DOOR_OUTSIDE = ("torch", "numpy")  # importing these costs what `import colossal` must not cost
FRONT_DOOR_AT_ONCE = {"colossal._src._registration.register"}  # imports nothing of the kind itself: test_import_cost.py


# ------------------------------------------------------------------------------------------ the imports of a module


def imports_of(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that a module of ``package`` may import."""
    yield from written_imports(tree, package)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and is_import_call(node.func)]
    if any(literal_of(call) is None for call in calls):
        yield from named_in_strings(tree)


def written_imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of every import that stands there with its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node.module or "", node.level, package)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and is_import_call(node.func):
            literal = literal_of(node) or ""
            name = literal.lstrip(".")
            yield node.lineno, absolute(name, len(literal) - len(name), anchor_of(node, package))


def absolute(name: str, level: int, package: str) -> str:
    parts = package.split(".")
    base = ".".join(parts[: len(parts) - level + 1]) if level else ""
    return ".".join(part for part in (base, name) if part)


def is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in {"import_module", "__import__"}


def literal_of(call: ast.Call) -> str | None:
    """The module that an import call names, None if the name is computed."""
    first = call.args[0] if call.args else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def anchor_of(call: ast.Call, package: str) -> str:
    """The package that a relative ``import_module`` names, the module's own one if it is no literal."""
    given = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "package")]
    literal = given[0] if given else None
    return literal.value if isinstance(literal, ast.Constant) and isinstance(literal.value, str) else package


def named_in_strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and re.fullmatch(r"colossal(\.\w+)+", str(node.value)):
            yield node.lineno, str(node.value)


# ------------------------------------------------------------------------------------------ the rules


def units_of(root: Path) -> dict[str, list[Path]]:
    """The files of each top-level module or package of the library, the front door left out."""
    units: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        if path != root / "__init__.py":
            units.setdefault(path.relative_to(root).parts[0].removesuffix(".py"), []).append(path)
    return units


def package_of(path: Path, root: Path) -> str:
    return ".".join(("colossal", *path.relative_to(root).parts[:-1]))


def may_import(unit: str, target: str) -> bool:
    if unit in {target, TESTING}:
        return True
    if target == TESTING or target not in FLOOR_OF or unit not in FLOOR_OF:
        return False
    mine, other = FLOOR_OF[unit], FLOOR_OF[target]
    return other < mine or (other == mine and mine not in BLIND_FLOORS)


def unit_violations(root: Path) -> Iterator[str]:
    units = units_of(root)
    for unit, paths in units.items():
        if unit not in FLOOR_OF and unit != TESTING:
            yield f"colossal.{unit} has no floor: give it one in the design and in FLOORS"
        for path in paths:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for line, name in imports_of(tree, package_of(path, root)):
                parts = name.split(".")
                if parts[0] != "colossal":
                    continue
                where = f"{path.relative_to(root)}:{line}"
                target = parts[1] if len(parts) > 1 else ""
                if target not in units and target not in FLOOR_OF and unit != TESTING:
                    yield f"{where}: {name} comes through the front door: import it from its home"
                elif not may_import(unit, target):
                    yield f"{where}: colossal.{unit} must not import colossal.{target}"


def front_door_violations(root: Path) -> Iterator[str]:
    """The front door imports nothing of colossal or torch when it is imported, except for type checkers."""
    tree = ast.parse((root / "__init__.py").read_text(encoding="utf-8"))
    body = [node for node in tree.body if not is_type_checking(node)]
    at_import = [node for node in body if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for line, name in written_imports(ast.Module(at_import, []), "colossal"):
        if name.split(".")[0] in {"colossal", *FRONT_DOOR_OUTSIDE} and name not in FRONT_DOOR_AT_ONCE:
            yield f"__init__.py:{line}: the front door must not import {name} at once: put it into the lazy table"


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


# ------------------------------------------------------------------------------------------ the library


def test_every_import_goes_down(library: Path) -> None:
    violations = list(unit_violations(library))
    assert not violations, "\n".join(violations)


def test_the_front_door_is_lazy(library: Path) -> None:
    violations = list(front_door_violations(library))
    assert not violations, "\n".join(violations)


def test_contributing_has_the_layers_that_there_are(library: Path, repository: Path) -> None:
    text = (repository / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| (.*?) \|", text, re.MULTILINE)
    written = [(int(layer), set(re.findall(r"`(\w+)`", packages))) for layer, packages in rows]
    public = {unit for unit in units_of(library) if not unit.startswith("_")}
    real = [(floor, public.intersection(units)) for floor, units in enumerate(FLOORS)]
    assert written == [row for row in reversed(real) if row[1]]


def test_types_are_strict_on_the_lower_layers(library: Path, repository: Path) -> None:
    settings = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pyright"]
    strict = {Path(name).relative_to("src/colossal").parts[0].removesuffix(".py") for name in settings["strict"]}
    assert strict == {unit for unit in units_of(library) if FLOOR_OF.get(unit, len(FLOORS)) in STRICT_FLOORS}
    of_torch = ("PrivateImportUsage", *(f"Unknown{what}Type" for what in ("Member", "Variable", "Argument", "Lambda")))
    allowed = {f"report{rule}=false" for rule in of_torch}
    for path in [file for unit in strict for file in units_of(library)[unit]]:
        for line in re.findall(r"^# pyright: (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert set(line.split(", ")) <= allowed, path


# ------------------------------------------------------------------------------------------ the guard itself


def tree_of(root: Path, files: dict[str, str]) -> Path:
    for name, source in {"__init__.py": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return root


UPWARD = {
    "absolute": ("errors.py", "import colossal.booster.plugin\n"),
    "from": ("comm/ops.py", "from colossal.zero import thing\n"),
    "from the top": ("comm/ops.py", "from colossal import zero\n"),
    "relative": ("comm/ops.py", "from ..zero import thing\n"),
    "relative, two deep": ("nn/layer/linear.py", "from ...booster import thing\n"),
    "relative package": ("comm/ops.py", "from .. import zero\n"),
    "in a package's door": ("comm/__init__.py", "from ..zero import thing\n"),
    "inside a function": ("comm/ops.py", "def f():\n    from colossal.zero import thing\n"),
    "for type checkers": ("comm/ops.py", "if TYPE_CHECKING:\n    from colossal.zero import thing\n"),
    "importlib": ("comm/ops.py", "import importlib\nimportlib.import_module('colossal.zero')\n"),
    "import_module": ("comm/ops.py", "from importlib import import_module\nimport_module('colossal._src.zero.x')\n"),
    "relative import_module": ("comm/ops.py", "import_module('..zero', 'colossal.comm')\n"),
    "relative import_module, own package": ("comm/ops.py", "import_module('..zero', __package__)\n"),
    "dunder import": ("comm/ops.py", "__import__('colossal.zero')\n"),
    "lazy table": ("comm/__init__.py", "HOMES = {'x': 'colossal.zero'}\nimport_module(HOMES['x'])\n"),
    "sibling on floor 6": ("zero/low_level.py", "from colossal.pipeline import thing\n"),
    "sibling on floor 8": ("cli/main.py", "from colossal.legacy import thing\n"),
    "testing": ("booster/booster.py", "from colossal.testing import worlds\n"),
    "front door": ("booster/booster.py", "from colossal import launch\n"),
    "bare package": ("booster/booster.py", "import colossal\n"),
}


@pytest.mark.parametrize("case", UPWARD)
def test_finds_an_import_that_does_not_go_down(case: str, tmp_path: Path) -> None:
    name, source = UPWARD[case]
    [violation] = unit_violations(tree_of(tmp_path, {name: source}))
    assert violation.startswith(f"{name}:")


DOWNWARD = {
    "lower floor": ("zero/low_level.py", "from colossal.comm import ops\nfrom ..tensor import layout\n"),
    "own package": ("zero/low_level.py", "from .gemini import x\nfrom . import nvme\nfrom colossal.zero import y\n"),
    "sibling on another floor": (
        "amp/dynamic_scaler.py",
        "from colossal.nn import x\nfrom colossal.interface import y\n",
    ),
    "other libraries": ("errors.py", "import os.path\nimport torch\nimport colossalai.zero\n"),
    "testing imports anything": ("testing/worlds.py", "from colossal.booster import x\nimport colossal\n"),
    "words that look like imports": ("errors.py", '"""See colossal.booster."""\nname = "colossal.booster"\n'),
}


@pytest.mark.parametrize("case", DOWNWARD)
def test_lets_an_import_go_down(case: str, tmp_path: Path) -> None:
    name, source = DOWNWARD[case]
    assert not list(unit_violations(tree_of(tmp_path, {name: source})))


@pytest.mark.parametrize("name", ["utils.py", "helpers/__init__.py", "__main__.py"])
def test_finds_a_module_without_a_floor(name: str, tmp_path: Path) -> None:
    [violation] = unit_violations(tree_of(tmp_path, {name: ""}))
    assert "has no floor" in violation


@pytest.mark.parametrize(
    "source",
    [
        "from colossal.booster import Booster\n",
        "from .booster import Booster\n",
        "import torch\n",
        "from torch import nn\n",
        "try:\n    import numpy\nexcept ImportError:\n    pass\n",
        "if TYPE_CHECKING:\n    import torch\nelse:\n    pass\nimport torch.nn\n",
        "import importlib\nimportlib.import_module('torch')\n",
    ],
)
def test_finds_an_eager_front_door(source: str, tmp_path: Path) -> None:
    assert list(front_door_violations(tree_of(tmp_path, {"__init__.py": source})))


def test_lets_the_front_door_be_lazy(tmp_path: Path) -> None:
    source = (
        "import importlib\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from colossal.booster import Booster\n"
        "HOMES = {'Booster': 'colossal.booster'}\n"
        "def __getattr__(name):\n    return getattr(importlib.import_module(HOMES[name]), name)\n"
    )
    assert not list(front_door_violations(tree_of(tmp_path, {"__init__.py": source})))
