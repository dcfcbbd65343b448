"""The tables of mutants fit the code and the pages, and what runs them tells a mistake that is found from others."""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def _load(name: str) -> Any:
    """Load a program beside this file, under a name that no other program has."""
    spec = importlib.util.spec_from_file_location(f"mutants_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = _load("run")
with pytest.MonkeyPatch.context() as _patch:
    _patch.setitem(sys.modules, "run", run)
    pages = _load("pages")

MUTANTS = run.read_mutants()
FEWEST = 60
ROWS = pages.read_rows()
NUM_PLANTED_UNDER_PAGES = 10


# ------------------------------------------------------------------------------------------ the tables


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_has_one_place_and_tests(mutant) -> None:
    text = (run.ROOT / mutant.file).read_text(encoding="utf-8")
    compile(mutant.plant(text), mutant.file, "exec")
    assert mutant.old != mutant.new
    assert mutant.means
    assert mutant.test_files
    for word in mutant.tests:
        file, _, test = word.partition("::")
        if word.startswith("tests/"):
            assert (run.ROOT / file).is_file(), file
            assert f"def {test.partition('[')[0]}(" in (run.ROOT / file).read_text() or not test
    names = re.findall(r"def (test_\w+)|^def (check_\w+)", _text_of_tests(mutant), re.MULTILINE)
    for expression in mutant.tests[1 + mutant.tests.index("-k") :] if "-k" in mutant.tests else ():
        known = " ".join(part for pair in names for part in pair)
        assert any(part in known for part in expression.split()), f"-k {expression} chooses nothing"


def _text_of_tests(mutant: Any) -> str:
    return "\n".join((run.ROOT / file).read_text() for file in mutant.test_files)


def test_there_are_many_and_each_has_a_name_of_its_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= FEWEST
    assert all(re.fullmatch(r"[a-z]+\.[a-z0-9-]+", name) for name in names)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(names)


def test_ten_mutants_are_planted_under_pages() -> None:
    planted = {mutant.name: mutant.file for mutant in MUTANTS if mutant.name in {row.mutant for row in ROWS}}
    assert {row.mutant for row in ROWS} == planted.keys()
    assert len(planted) == NUM_PLANTED_UNDER_PAGES
    assert all(file.startswith("src/colossal/_src/") for file in planted.values())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.mutant}-{row.page}")
def test_the_pages_of_a_row_exist(row) -> None:
    missing = [name for name in row.pages if not (pages.ROOT / "docs" / "source" / "en" / f"{name}.md").is_file()]
    assert not missing, f"add `now = [...]` to the row of {row.page} in pages.toml: the pages that it has become"
    assert row.check.strip()


# ------------------------------------------------------------------------------------------ what runs them

FILES = {
    "src/thing.py": "import time\n\nDELAY = 0\n\n\ndef double(x):\n    time.sleep(DELAY)\n    return 2 * x\n",
    "tests/test_double.py": "import thing\n\n\ndef test_double():\n    assert thing.double(2) == 4\n",
    "tests/test_wrong.py": "def test_wrong():\n    assert False, 'as ever'\n",
}
PLACES = {
    "killed": ("2 * x", "3 * x"),
    "survived": ("2 * x", "x + x"),
    "endless": ("DELAY = 0", "DELAY = 600"),
    "dies": ("return 2 * x", "__import__('os').abort()"),
    "absent": ("4 * x", "5 * x"),
    "twice": ("time", "thyme"),
    "unreadable": ("import time", "import no_such_module as time"),
    "wrong": ("2 * x", "3 * x"),
}


def mutant_of(name: str) -> Any:
    old, new = PLACES[name]
    test = "tests/test_wrong.py" if name == "wrong" else "tests/test_double.py"
    return run.Mutant(name, "something is wrong", "src/thing.py", old, new, (test,))


class World:
    """A small project with a session that keeps its results."""

    def __init__(self, folder: Path) -> None:
        self.root, self.results, self.folder = folder / "project", folder / "results.json", folder
        for name, text in FILES.items():
            self.write(name, text)
        subprocess.run(["git", "init", "-q", self.root], check=True)
        self.first = self.run(*PLACES)
        self.after = {name: (self.root / name).read_text() for name in FILES}

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, *names: str, jobs: int = 1) -> dict[str, Any]:
        (work := self.folder / "work").mkdir(exist_ok=True)
        session = run.Session(run.Project(self.root), self.results, work, jobs)
        return {mutant.name: result for mutant, result in session.run(map(mutant_of, names))}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "FLOOR_SECONDS", 1.0)
        patch.setattr(run, "IMPORTED", ())
        patch.setattr(run, "_PYTEST", (*run._PYTEST[:-1], "-p", "no:hypothesispytest"))
        yield World(tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize(
    ("name", "status", "remark"),
    [
        ("killed", "killed", r"FAILED tests/test_double.py::test_double"),
        ("survived", "survived", "1 passed"),
        ("endless", "killed", r"not done after \d+ s; without it, then, after \d+ s"),
        ("dies", "killed", "ended by signal 6"),
        ("absent", "error", r"Found the one of absent 0 times in src/thing.py"),
        ("twice", "error", r"Found the one of twice 2 times"),
        ("unreadable", "error", r"cannot run with it: pytest ends with 2, ERROR tests/test_double.py"),
        ("wrong", "error", r"must pass without it. Found FAILED tests/test_wrong.py::test_wrong"),
    ],
)
def test_what_becomes_of_a_mutant(world, name, status, remark) -> None:
    found = world.first[name]
    assert found.status == status
    assert re.search(remark, found.remark), found.remark


def test_the_project_itself_stays_as_it_is(world) -> None:
    assert world.after == FILES


def test_results_are_kept_until_the_code_or_their_tests_change(world, monkeypatch) -> None:
    ran = []
    one = run.Copy.run
    monkeypatch.setattr(run.Copy, "run", lambda copy, *args: ran.append(args) or one(copy, *args))
    assert world.run("killed", "survived", jobs=2) == {name: world.first[name] for name in ("killed", "survived")}
    assert ran == []
    world.write("tests/test_other.py", "")
    world.run("killed")
    assert ran == []
    world.write("tests/test_double.py", FILES["tests/test_double.py"] + "    assert thing.double(0.5) == 1\n")
    assert world.run("killed")["killed"].status == "killed"
    assert len(ran) == 2  # without it, and with it
    world.write("src/other.py", "")
    world.run("killed")
    assert len(ran) == 4


@pytest.mark.parametrize(
    ("statuses", "explained", "status", "said"),
    [
        (["killed"] * 3, "", 0, "3 of 3 mutants killed, 100.0%; 0 errors"),
        (["killed"] * 99 + ["survived"], "", 1, "survived: m99: not explained"),
        (["killed"] * 99 + ["survived"], "equal to the code", 0, "99 of 100 mutants killed, 99.0%"),
        (["killed"] * 9 + ["survived"], "equal to the code", 1, "survived: m9: equal to the code"),
        (["killed"] * 99 + ["error"], "", 1, "99.0%; 1 errors"),
        (["killed"], "equal to the code", 1, "killed, and explained as a survivor: m0"),
    ],
)
def test_the_report(statuses, explained, status, said) -> None:
    last = len(statuses) - 1
    mutants = [run.Mutant(f"m{i}", "", "f", "a", "b", ("t",), explained if i == last else "") for i in range(last + 1)]
    text, found = run.report([(m, run.Result("", s, 0.0, "")) for m, s in zip(mutants, statuses, strict=True)])
    assert found == status
    assert said in text


def test_mutants_are_listed_and_chosen_by_the_beginning_of_their_name(capsys) -> None:
    assert run.main(["--list", "amp."]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == sum(mutant.name.startswith("amp.") for mutant in MUTANTS)
    assert out[0].split()[0] == next(mutant.name for mutant in MUTANTS if mutant.name.startswith("amp."))
    with pytest.raises(SystemExit):
        run.main(["nothing"])
    assert "no mutant begins with nothing" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ pages


@pytest.mark.parametrize(
    ("now", "failing", "broken", "status", "said"),
    [
        ((), ["a"], [], 0, "fails   m1                                      a: assert x"),
        (("b", "c"), ["c"], [], 0, "fails   m1                                      c: assert x"),
        (
            ("b", "c"),
            [],
            [],
            1,
            "PASSES  m1                                      b, c: passes, and a failed at: assert y",
        ),
        (("b",), ["a"], [], 1, "b: passes, and a failed at: assert y"),
        ((), ["a"], ["a"], 1, "must pass without a mistake: a: assert z"),
        (("b", "c"), ["b", "c"], ["b"], 1, "fails   m1                                      c: assert x"),
    ],
    ids=["fails", "split", "passes", "another", "broken", "broken-and-split"],
)
def test_a_row_needs_a_page_that_fails_with_the_mutant_alone(now, failing, broken, status, said, capsys) -> None:
    ran = []

    def run_mutant(mutant: str, names: Sequence[str]) -> dict[str, str]:
        ran.append((mutant, names))
        return {name: "assert x" for name in failing if name in names}

    row = pages.Row("m1", "a", "assert y", now)
    assert pages.check_rows([row], lambda _: dict.fromkeys(broken, "assert z"), run_mutant) == status
    out = capsys.readouterr().out
    assert said in out
    assert ran in ([], [("m1", [name for name in row.pages if name not in broken])])
    num_found = len(set(failing) & set(row.pages) - set(broken))
    assert out.splitlines()[-1] == f"1 mutations: {num_found} of 1 recorded page failures still fail"


def test_rows_are_written_as_they_are_read(tmp_path) -> None:
    failed = {"features/a": "assert x == 'it\\'s'", "b": 'print("\\n")'}
    (table := tmp_path / "pages.toml").write_text("\n".join(pages.rows_of("amp.one", failed)), encoding="utf-8")
    assert pages.read_rows(table) == [pages.Row("amp.one", name, line) for name, line in failed.items()]


DOCS_TEST = """
import json, os, sys
from pathlib import Path
names = sys.argv[sys.argv.index("--build") + 2 :]
folder = Path(sys.argv[sys.argv.index("--build") + 1]).with_name("verified")
folder.mkdir(parents=True)
assert os.environ["PYTHONPATH"] == str(Path("src").absolute())
for name in set(names) - {"gone"}:
    error = json.loads(Path("errors.json").read_text()).get(name)
    record = {"page": name, "status": "FAIL" if error else "PASS", "error": error and {"file": "a.md"} | error}
    (folder / f"{name}.json").write_text(json.dumps(record))
"""


def test_pages_run_on_the_sources_beside_them(tmp_path) -> None:
    errors = {"a": {"line": 2, "message": "AssertionError"}, "c": {"line": 1, "message": "no end after 200 s, killed"}}
    files = {
        "docs_test.py": DOCS_TEST,
        "errors.json": json.dumps(errors),
        "a.md": "x\n    assert all(\n        x\n    )\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert pages.run_pages(tmp_path, ["a", "b", "c"]) == {"a": "assert all( x )", "c": "x (no end after 200 s)"}
    with pytest.raises(SystemExit, match="no record of gone"):
        pages.run_pages(tmp_path, ["gone"])
