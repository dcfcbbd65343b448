"""A hook names an object of the library, which is found without importing it."""

from pathlib import Path

import pytest
from public_names import names_without_legacy

from pagetest.checks.hooks import HookChecker
from pagetest.graph.imports import ImportGraph

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

LIBRARY = {
    "lib/__init__.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lib.engine import Engine, Hidden\n"
        "else:\n    OTHERWISE = 1\n"
        "_HOMES = {'Engine': 'lib.engine', 'start': '.cluster', 'go': 'lib.cluster:start', 'Gone': 'lib.engine'}\n"
        "def __getattr__(name): ...\n"
    ),
    "lib/base.py": "import abc\nclass Base(abc.ABC):\n    size: int = 0\n    def save(self): ...\n",
    "lib/engine.py": (
        "import json as js\nimport lib.base\nfrom lib import base\nfrom lib.base import Base as B\n"
        "from typing import Generic\n"
        "class Engine(B, Generic[int]):\n"
        "    speed = 1\n    x: int\n    class Inner:\n        def deep(self): ...\n"
        "    @property\n    def state(self):\n        self.hidden = 1\n    async def run(self): ...\n"
        "    if True:\n        def maybe(self): ...\n"
        "class Turbo(base.Base): ...\nclass Jet(lib.base.Base): ...\nclass Loop(Loop): ...\n"
        "LIMIT, (FLOOR, _) = 1, (2, 3)\nMotor = Engine\nBasis = base.Base\n"
        "try:\n    import fast\nexcept ImportError:\n    fast = None\n"
        "def function(local):\n    inside = 1\n"
    ),
    "lib/cluster/__init__.py": "from .start import start\nfrom . import start as module\n",
    "lib/cluster/start.py": "def start(): ...\n",
    "lib/broken.py": "def (:\n",
}

FOUND = [
    "lib",
    "lib.engine",
    "lib.Engine",
    "lib.Engine.run",
    "lib.Engine.state",
    "lib.Engine.speed",
    "lib.Engine.x",
    "lib.Engine.Inner.deep",
    "lib.Engine.maybe",
    "lib.Engine.save",
    "lib.Engine.size",
    "lib.engine.Turbo.save",
    "lib.engine.Jet.size",
    "lib.engine.B.save",
    "lib.engine.Motor.run",
    "lib.engine.Basis.save",
    "lib.engine.base.Base",
    "lib.engine.lib.base",
    "lib.engine.LIMIT",
    "lib.engine.FLOOR",
    "lib.engine.fast",
    "lib.engine.function",
    "lib.start",
    "lib.go",
    "lib.cluster.start",
    "lib.cluster.module.start",
    "lib.OTHERWISE",
]

BROKEN = {
    "torch.nn.Linear": "torch is not defined in src/",
    "lib.Engin": "lib has no Engin, the nearest is Engine",
    "lib.engin.Engine": "lib has no engin, the nearest is engine",
    "lib.Engine.save_all": "lib.engine.Engine has no save_all",
    "lib.Engine.runs": "lib.engine.Engine has no runs, the nearest is run",
    "lib.Engine.register": "lib.engine.Engine has no register",
    "lib.Engine.hidden": "lib.engine.Engine has no hidden",
    "lib.Engine.run.now": "lib.engine.Engine.run has no members",
    "lib.engine.Motor.walk": "lib.engine.Engine has no walk",
    "lib.engine.LIMIT.real": "lib.engine.LIMIT has no members",
    "lib.Hidden": "lib has no Hidden",
    "lib.Gone": "lib.engine has no Gone",
    "lib.engine.js": "json is not defined in src/",
    "lib.engine.inside": "lib.engine has no inside",
    "lib.engine.local": "lib.engine has no local",
    "lib.engine.Loop.x": "lib.engine.Loop has no x",
    "lib.broken.f": "lib.broken has no f",
}


@pytest.fixture
def hooks(tmp_path) -> HookChecker:
    for name, text in LIBRARY.items():
        path = tmp_path / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return HookChecker(ImportGraph(tmp_path / "src"))


@pytest.mark.parametrize("name", FOUND)
def test_an_object_is_found(hooks, name) -> None:
    assert hooks.fault(name) == ""


@pytest.mark.parametrize(("name", "message"), BROKEN.items())
def test_what_is_not_there_is_explained(hooks, name, message) -> None:
    assert hooks.fault(name) == message


def test_every_public_name_of_the_library_is_found() -> None:
    """The names that the interpreter finds, and the members of the classes among them."""
    import importlib
    import inspect

    hooks, names = HookChecker(ImportGraph(ROOT / "src")), []
    public = names_without_legacy()
    for module, attribute in (line.split(": ") for line in public):
        names.append(f"{module}.{attribute}")
        found = getattr(importlib.import_module(module), attribute)
        members = vars(found) if inspect.isclass(found) else ()
        names += [f"{names[-1]}.{member}" for member in members if not member.startswith("_")]
    assert len(names) > len(public) > 0
    assert [name for name in names if hooks.fault(name)] == []


def test_check_finds_a_broken_hook_at_its_line(docs, capsys) -> None:
    text = "# T\n\n{{{{ autodoc:colossal.booster.{} }}}}\n\n<!-- doc-test-command: none -->\n"
    docs.write("a", text.format("Booster.boost"))
    assert docs.main("--check") == 0
    docs.write("a", text.format("Booster.bost"))
    assert docs.main("--check") == 1
    message = (
        "a.md:3: the hook shows `colossal.booster.Booster.bost`, but colossal._src.booster.booster.Booster has no bost"
    )
    assert capsys.readouterr().out.count(f"{message}, the nearest is boost: correct it") == 2
