"""The import graph and the fingerprint: which files a page's code reaches, without importing any."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from pagetest.graph.fingerprint import fingerprint
from pagetest.graph.imports import ImportGraph
from pagetest.graph.references import References
from pagetest.model.tree import Tree

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

LIBRARY = {
    "lib/__init__.py": (
        "import importlib\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lib.engine import Engine\n"
        "__version__ = '1'\n_HOMES = {'Engine': 'lib.engine', 'start': '.cluster', 'ops': 'lib.tools.ops:ops'}\n"
        "def __getattr__(name):\n    return getattr(importlib.import_module(_HOMES[name]), name)\n"
    ),
    "lib/base.py": "class Base:\n    def save(self): ...\n",
    "lib/engine.py": "from lib.base import Base\nclass Engine(Base):\n    def run(self): ...\n",
    "lib/cluster/__init__.py": "from .start import start\n__all__ = ['start']\n",
    "lib/cluster/start.py": "def start():\n    from ..tools import late\n",
    "lib/tools/__init__.py": "",
    "lib/tools/late.py": "import json\nx = 1\n",
    "lib/tools/ops.py": "import importlib\nTABLE = {'a': 'lib.tools.extra'}\nimportlib.import_module(TABLE['a'])\n",
    "lib/tools/extra.py": "",
    "lib/alone.py": "if not TYPE_CHECKING:\n    import lib.base\n",
    "lib/broken.py": "def (:\n",
}


@pytest.fixture
def graph(tmp_path) -> ImportGraph:
    for name, text in LIBRARY.items():
        path = tmp_path / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return ImportGraph(tmp_path / "src")


def reached(graph: ImportGraph, code: str) -> set[str]:
    files = {path.relative_to(graph.source / "lib").as_posix() for path in graph.reached(References(ast.parse(code)))}
    return files - {"__init__.py"}


START = {"cluster/__init__.py", "cluster/start.py", "tools/__init__.py", "tools/late.py"}
ENGINE = {"engine.py", "base.py"}
OPS = {"tools/__init__.py", "tools/ops.py", "tools/extra.py"}

REACHED = {
    "nothing of the project": ("import json, torch.nn", set()),
    "the package alone": ("import lib", set()),
    "a name that the package has": ("import lib\nlib.__version__", set()),
    "a lazy name": ("import lib\nlib.Engine()", ENGINE),
    "a lazy name, imported": ("from lib import Engine as Motor", ENGINE),
    "a lazy name with a relative home, and an import inside a function": ("from lib import start", START),
    "a lazy name under another name of the package": ("import lib as l\nl.Engine", ENGINE),
    "the package, handed on": ("import lib\nvars(lib)", ENGINE | START | OPS),
    "everything": ("from lib import *", ENGINE | START | OPS),
    "a lazy name that no table knows": ("import lib\nlib.other", ENGINE | START | OPS),
    "a name that a public module lacks": ("from lib.base import Older", {"base.py"} | ENGINE | START | OPS),
    "a module": ("import lib.tools.late", {"tools/__init__.py", "tools/late.py"}),
    "a module as an attribute": ("import lib.tools\nlib.tools.late", {"tools/__init__.py", "tools/late.py"}),
    "a module through a name": ("from lib import tools\ntools.late.x", {"tools/__init__.py", "tools/late.py"}),
    "an import in a function": ("def f():\n    import lib.base", {"base.py"}),
    "an import by name": ("import importlib\nimportlib.import_module('lib.base')", {"base.py"}),
    "an import by a computed name": ("import lib.tools.ops", OPS),
    "a program in a string": ("x = '''\nimport sys\nfrom lib.base import Base\n'''", {"base.py"}),
    "a module that is run": ("import subprocess\nsubprocess.run(['python', '-m', 'lib.base'])", {"base.py"}),
    "what is for type checkers only": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import lib.base",
        set(),
    ),
    "what is not for type checkers": ("import lib.alone", {"alone.py", "base.py"}),
    "a module with a syntax error": ("import lib.broken", {"broken.py"}),
}


@pytest.mark.parametrize(("code", "files"), REACHED.values(), ids=REACHED)
def test_what_code_reaches(graph, code, files) -> None:
    assert reached(graph, code) == files


def test_what_refers_to_a_deleted_file_still_leads_there(graph) -> None:
    gone = graph.source / "lib/tools/late.py"
    gone.unlink()
    everything = ENGINE | START | OPS  # the package may have it under an older name
    assert reached(graph, "from lib import start") == everything - {"tools/late.py"}
    assert reached(ImportGraph(graph.source, frozenset({gone})), "from lib import start") == START


def test_what_other_packages_are_imported_on_the_way(graph) -> None:
    code = References(ast.parse("import torch.nn\nfrom sklearn import datasets\nimport lib\nlib.start()"))
    assert graph.external_imports(code) == {"torch.nn", "sklearn.datasets", "importlib", "typing.TYPE_CHECKING", "json"}


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("lib.Engine", {"engine.py"}),
        ("lib.Engine.run", {"engine.py"}),
        ("lib.Engine.save", {"engine.py", "base.py"}),
        ("lib.cluster.start", {"cluster/start.py"}),
        ("lib.start", {"cluster/start.py"}),
        ("lib.tools", {"tools/__init__.py"}),
        ("other.Thing", set()),
    ],
)
def test_the_file_that_defines_a_name(graph, name, files) -> None:
    assert {path.relative_to(graph.source / "lib").as_posix() for path in graph.definition_files(name)} == files


def test_the_fingerprint_follows_code_command_and_library(graph, parse) -> None:
    def page(code: str, command: str = "python lesson.py", prose: str = "") -> str:
        text = f"{prose}\n```python\n{code}\n```\n\n<!-- doc-test-command: {command} -->\n"
        return fingerprint(parse(text), ImportGraph(graph.source))

    first = page("import lib\nlib.Engine()")
    assert first == page("import lib  # a comment\n\nlib.Engine()", prose="Other words.")
    assert first != page("import lib\nlib.Engine(1)")
    assert first != page("import lib\nlib.Engine()", "torchrun --standalone lesson.py")
    (graph.source / "lib/alone.py").write_text("x = 1\n")
    assert first == page("import lib\nlib.Engine()")
    (graph.source / "lib/base.py").write_text("class Base:\n    def save(self): return 1\n")
    assert first != page("import lib\nlib.Engine()")
    assert page("x = (") != page("x = [")
    assert fingerprint(parse("Words only.\n"), graph) == ""


def test_every_page_of_the_project_has_a_fingerprint() -> None:
    tree, graph = Tree(ROOT / "docs/source"), ImportGraph(ROOT / "src")
    pages = [tree.page(name, language) for name in tree.names for language in tree.languages(name)]
    found = {(page.name, page.language): fingerprint(page, graph) for page in pages}
    assert found["basics/booster_api", "en"]
    reached = graph.reached(References(ast.parse("import colossal\ncolossal.launch()")))
    assert ROOT / "src/colossal/_src/cluster/launch.py" in reached
    assert ROOT / "src/colossal/_src/booster/booster.py" not in reached
    assert "lib" not in sys.modules


@pytest.mark.parametrize(
    "code",
    [
        "import colossal\ncolossal.launch",
        "from colossal import Booster",
        "from colossal.booster.plugin import GeminiPlugin",
        "from colossal.nn import lr_scheduler",
    ],
)
def test_the_graph_has_the_files_that_python_loads(code: str) -> None:
    listing = "\nimport sys\nprint(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'colossal'))"
    done = subprocess.run([sys.executable, "-c", code + listing], capture_output=True, text=True, check=True)
    loaded = {Path(name).resolve() for name in done.stdout.split()}
    assert loaded <= ImportGraph(ROOT / "src").reached(References(ast.parse(code)))
