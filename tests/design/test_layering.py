"""Who may import whom: a module imports its own package and lower floors, never upward, and nothing in a circle.

The implementation is in ``colossal/_src``. The modules beside it are what users see: they take names from the packages
of ``_src`` and define nothing, three modules excepted that have no other place. One package uses of another what that
one has in its ``__all__``.

Every import counts, the ones inside functions and under ``TYPE_CHECKING`` included, and so does every
``importlib.import_module`` with a literal. Where such a call takes its name from a variable, every string of the file
that reads like ``colossal.x`` counts as an import, because it may be an entry of a lazy table.
"""

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

FLOORS = (
    ("errors", "logging", "_cached", "_closest", "_dtypes", "_lost_peer", "_error_file"),
    ("cluster", "accelerator", "_native"),
    ("comm", "_registration", "_older_names"),
    ("kernel",),
    ("tensor", "lazy", "offload"),
    ("nn", "amp", "interface"),
    ("shardformer", "pipeline", "zero", "checkpoint_io"),
    ("booster",),
    ("legacy", "auto_parallel", "inference"),
    ("cli",),
)
FLOOR_OF = {unit: floor for floor, units in enumerate(FLOORS) for unit in units}
STRICT_FLOORS = range(5)  # of pyright; CONTRIBUTING.md says so
BLIND_FLOORS = {6, 8}  # siblings on these floors do not know each other
IN_PLACE = {"errors", "logging", "accelerator"}  # public modules that are their own implementation
SOURCE = "_src"
TESTING = "testing"  # may import anything; nothing in the library imports it
FRONT_DOOR_OUTSIDE = ("torch", "numpy")  # importing these costs what `import colossal` must not cost
FRONT_DOOR_AT_ONCE = {  # import nothing of the kind: test_import_cost.py
    "colossal._src._registration.register",
    "colossal._src._older_names.find_older_names",
    "colossal._src._older_names.get_older_name",
}


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


def module_tree(path: Path) -> ast.Module:
    return parse(path.read_text(encoding="utf-8"))


@cache
def parse(text: str) -> ast.Module:
    return ast.parse(text)


def module_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(("colossal", *(part for part in parts if part != "__init__")))


def package_of(path: Path, root: Path) -> str:
    return ".".join(("colossal", *path.relative_to(root).parts[:-1]))


def unit_of(name: str) -> str:
    """The package, or the single module, that a dotted name of the library belongs to; empty for a public one."""
    parts = [*name.split("."), "", ""]
    unit = parts[2] if parts[1] == SOURCE else parts[1]
    return unit if parts[1] == SOURCE or unit in IN_PLACE else ""


def units_of(root: Path) -> dict[str, list[Path]]:
    """The files of each package and single module of the implementation."""
    units: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        if unit := unit_of(module_of(path, root)):
            units.setdefault(unit, []).append(path)
    return units


def may_import(unit: str, target: str) -> bool:
    if unit in {target, TESTING}:
        return True
    if target == TESTING or target not in FLOOR_OF or unit not in FLOOR_OF:
        return False
    mine, other = FLOOR_OF[unit], FLOOR_OF[target]
    return other < mine or (other == mine and mine not in BLIND_FLOORS)


def unit_violations(root: Path) -> Iterator[str]:
    for unit, paths in units_of(root).items():
        if unit not in FLOOR_OF and unit != TESTING:
            yield f"colossal.{unit} has no floor: give it one in the design and in FLOORS"
        for path in paths:
            tree = module_tree(path)
            for line, name in imports_of(tree, package_of(path, root)):
                if name.split(".")[0] != "colossal":
                    continue
                where = f"{path.relative_to(root)}:{line}"
                target = unit_of(name)
                if not target and unit != TESTING:
                    yield f"{where}: {name} comes through the front door: import it from its home"
                elif target and not may_import(unit, target):
                    yield f"{where}: colossal.{unit} must not import colossal.{target}"


def export_violations(root: Path) -> Iterator[str]:
    """A package, or the public module of one, takes from another package what that one exports."""
    exported = exports_of(root)
    for path in sorted(root.rglob("*.py")):
        module = module_of(path, root)
        tree = module_tree(path)
        for line, source, name in names_taken(tree, package_of(path, root)):
            other = unit_of(source)
            taken = f"{source}.{name}" in exported or name in exported.get(source, ())
            if other and other != unit_of(module) and not taken:
                yield f"{path.relative_to(root)}:{line}: {name} of {source} is not in the `__all__` of its package"


def definition_violations(root: Path) -> Iterator[str]:
    """A public module defines nothing, and a package loads nothing lazily that is called like a module of it."""
    for path in sorted(root.rglob("*.py")):
        module, tree = module_of(path, root), module_tree(path)
        if module != "colossal" and SOURCE not in module and module.rpartition(".")[2] not in IN_PLACE:
            yield from (f"{path.relative_to(root)} defines {name}: move it to _src" for name in defined(tree))
        if "__getattr__" in map(function_name, tree.body):
            taken = {name for _, _, name in names_taken(ast.Module([*filter(is_type_checking, tree.body)], []), "")}
            both = taken & {each.stem for each in path.parent.glob("*.py")}
            yield from (f"{path.relative_to(root)}: after the import of {name}.py the module hides it" for name in both)


def function_name(node: ast.AST) -> str:
    return node.name if isinstance(node, ast.FunctionDef) else ""


def exports_of(root: Path) -> dict[str, set[str]]:
    """What each package of the implementation exports, and each module that is a package of its own."""
    exports: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        tree, module = module_tree(path), module_of(path, root)
        if path.name == "__init__.py" or module.count(".") == (2 if SOURCE in module else 1):
            exports[module] = set(declared(tree) or defined(tree))
    return exports


def declared(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets):
            return list(ast.literal_eval(node.value))
    return []


def defined(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            yield node.name


def names_taken(tree: ast.AST, package: str) -> Iterator[tuple[int, str, str]]:
    """Line, module and name of everything of the implementation that a file imports from a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = absolute(node.module or "", node.level, package)
            yield from ((node.lineno, source, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            for parent, _, name in (alias.name.rpartition(".") for alias in node.names):
                yield node.lineno, parent, name


# ------------------------------------------------------------------------------------------ cycles


def file_graph(root: Path) -> dict[str, set[str]]:
    """Which modules each module imports. A name that a package passes on counts for the module that defines it."""
    trees = {module_of(path, root): (path, module_tree(path)) for path in root.rglob("*.py")}
    homes = {
        module: {name: source for _, source, name in names_taken(tree, package_of(path, root))}
        for module, (path, tree) in trees.items()
        if path.name == "__init__.py" or SOURCE not in module
    }

    def home(source: str, name: str) -> str:
        if f"{source}.{name}" in trees and name not in homes.get(source, ()):
            return f"{source}.{name}"
        further = homes.get(source, {}).get(name)
        if further == source:  # `from package import module as module`
            return f"{source}.{name}"
        return source if further is None else home(further, name)

    return {
        module: {
            target
            for _, source, name in names_taken(tree, package_of(path, root))
            if (target := home(source, name)) in trees and target != module
        }
        for module, (path, tree) in trees.items()
        if module not in homes
    }


def folder_graph(files: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The same for folders; a module that is no package's is a folder of its own."""

    def folder(module: str) -> str:
        parent = module.rpartition(".")[0]
        return module if parent in {"colossal", f"colossal.{SOURCE}"} else parent

    graph: dict[str, set[str]] = {}
    for module, targets in files.items():
        graph.setdefault(folder(module), set()).update(set(map(folder, targets)) - {folder(module)})
    return graph


def cycle_in(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def front_door_violations(root: Path) -> Iterator[str]:
    """The front door imports nothing of colossal or torch when it is imported, except for type checkers."""
    tree = module_tree(root / "__init__.py")
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


def test_packages_use_of_each_other_what_they_export(library: Path) -> None:
    violations = list(export_violations(library))
    assert not violations, "\n".join(violations)


def test_public_modules_define_nothing_and_hide_nothing(library: Path) -> None:
    violations = list(definition_violations(library))
    assert not violations, "\n".join(violations)


def test_no_modules_and_no_folders_import_each_other_in_a_circle(library: Path) -> None:
    files = file_graph(library)
    assert len(files) > 250
    assert not cycle_in(files)
    assert not cycle_in(folder_graph(files))


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
    strict = {unit_of(module_of(Path(name), Path("src/colossal"))) for name in settings["strict"]}
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
    "absolute": ("errors.py", "import colossal._src.booster.plugin\n"),
    "from": ("_src/comm/ops.py", "from colossal._src.zero import thing\n"),
    "from the top": ("_src/comm/ops.py", "from colossal._src import zero\n"),
    "relative": ("_src/comm/ops.py", "from ..zero import thing\n"),
    "relative, two deep": ("_src/nn/layer/linear.py", "from ...booster import thing\n"),
    "relative package": ("_src/comm/ops.py", "from .. import zero\n"),
    "in a package's door": ("_src/comm/__init__.py", "from ..zero import thing\n"),
    "inside a function": ("_src/comm/ops.py", "def f():\n    from colossal._src.zero import thing\n"),
    "for type checkers": ("_src/comm/ops.py", "if TYPE_CHECKING:\n    from colossal._src.zero import thing\n"),
    "importlib": ("_src/comm/ops.py", "import importlib\nimportlib.import_module('colossal._src.zero')\n"),
    "import_module": (
        "_src/comm/ops.py",
        "from importlib import *\nimport_module('colossal._src.zero.x')\n",
    ),
    "relative import_module": ("_src/comm/ops.py", "import_module('..zero', 'colossal._src.comm')\n"),
    "relative import_module, own package": ("_src/comm/ops.py", "import_module('..zero', __package__)\n"),
    "dunder import": ("_src/comm/ops.py", "__import__('colossal._src.zero')\n"),
    "lazy table": ("_src/comm/__init__.py", "HOMES = {'x': 'colossal._src.zero'}\nimport_module(HOMES['x'])\n"),
    "sibling on floor 6": ("_src/zero/low_level.py", "from colossal._src.pipeline import thing\n"),
    "sibling on floor 8": ("_src/inference/engine.py", "from colossal._src.legacy import thing\n"),
    "testing": ("_src/booster/booster.py", "from colossal._src.testing import worlds\n"),
    "front door": ("_src/booster/booster.py", "from colossal import launch\n"),
    "bare package": ("_src/booster/booster.py", "import colossal\n"),
}


@pytest.mark.parametrize("case", UPWARD)
def test_finds_an_import_that_does_not_go_down(case: str, tmp_path: Path) -> None:
    name, source = UPWARD[case]
    [violation] = unit_violations(tree_of(tmp_path, {name: source}))
    assert violation.startswith(f"{name}:")


DOWNWARD = {
    "lower floor": ("_src/zero/low_level.py", "from colossal._src.comm import ops\nfrom ..tensor import layout\n"),
    "own package": (
        "_src/zero/low_level.py",
        "from .gemini import x\nfrom . import y\nimport colossal._src.zero\n",
    ),
    "sibling on another floor": (
        "_src/amp/dynamic_scaler.py",
        "from colossal._src.nn import x\nfrom colossal._src.interface import y\n",
    ),
    "other libraries": ("errors.py", "import os.path\nimport torch\nimport colossalai.zero\n"),
    "testing imports anything": ("_src/testing/worlds.py", "from colossal.booster import x\nimport colossal\n"),
    "words that look like imports": ("errors.py", '"""See colossal.booster."""\nname = "colossal.booster"\n'),
}


@pytest.mark.parametrize("case", DOWNWARD)
def test_lets_an_import_go_down(case: str, tmp_path: Path) -> None:
    name, source = DOWNWARD[case]
    assert not list(unit_violations(tree_of(tmp_path, {name: source})))


@pytest.mark.parametrize("name", ["_src/utils.py", "_src/helpers/__init__.py", "_src/__main__.py"])
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


PACKAGE = '__all__ = ["given"]\nfrom colossal._src.comm.ops import given, kept\n'
TAKEN = {
    "a name that is not exported": ("_src/zero/low_level.py", "from colossal._src.comm import kept\n"),
    "a module's name": ("_src/zero/low_level.py", "from colossal._src.comm.ops import given\n"),
    "a module": ("_src/zero/low_level.py", "import colossal._src.comm.ops\n"),
    "a module, by its package": ("_src/zero/low_level.py", "from colossal._src.comm import ops\n"),
    "in a public module": ("zero.py", "from colossal._src.comm import kept\n"),
}


@pytest.mark.parametrize("case", TAKEN)
def test_finds_a_name_that_is_not_exported(case: str, tmp_path: Path) -> None:
    name, source = TAKEN[case]
    files = {"_src/comm/__init__.py": PACKAGE, "_src/comm/ops.py": "", "_src/zero/__init__.py": "", name: source}
    [violation] = export_violations(tree_of(tmp_path, files))
    assert violation.startswith(f"{name}:1: ")


def test_lets_packages_take_what_is_exported(tmp_path: Path) -> None:
    source = "from colossal._src.comm import given\nfrom colossal._src import comm\nfrom colossal.errors import E\n"
    files = {
        "_src/comm/__init__.py": PACKAGE,
        "_src/comm/ops.py": "",
        "errors.py": "class E: ...",
        "_src/zero.py": source,
    }
    assert not list(export_violations(tree_of(tmp_path, files)))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("zero.py", "def helper(): ...\n"),
        ("_src/zero/__init__.py", "if TYPE_CHECKING:\n    from .wrap import wrap\ndef __getattr__(name): ...\n"),
    ],
)
def test_finds_what_a_public_module_defines_and_a_module_hides(name: str, source: str, tmp_path: Path) -> None:
    [violation] = definition_violations(tree_of(tmp_path, {"_src/zero/wrap.py": "", name: source}))
    assert violation.startswith(name)


@pytest.mark.parametrize(
    "imports",
    [
        {"a/one": "a.two", "a/two": "a.one"},
        {"a/one": "a.two", "a/two": "a.three", "a/three": "a.one"},
        {"a/one": "b", "b/two": "a.one"},  # b passes on what b.two defines
    ],
)
def test_finds_modules_in_a_circle(imports: dict[str, str], tmp_path: Path) -> None:
    files = {"_src/b/__init__.py": "from colossal._src.b.two import x\n"}
    for name, source in imports.items():
        files[f"_src/{name}.py"] = f"def f():\n    from colossal._src.{source} import x\n"
    graph = file_graph(tree_of(tmp_path, files))
    assert len(cycle_in(graph)) > 2


def test_finds_folders_in_a_circle_of_modules_that_are_none(tmp_path: Path) -> None:
    files = {
        "_src/a/one.py": "from colossal._src.b.two import x\n",
        "_src/a/other.py": "",
        "_src/b/two.py": "",
        "_src/b/three.py": "from colossal._src.a.other import x\n",
    }
    graph = file_graph(tree_of(tmp_path, files))
    assert not cycle_in(graph)
    assert set(cycle_in(folder_graph(graph))) == {"colossal._src.a", "colossal._src.b"}
