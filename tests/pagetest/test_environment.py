"""What a page sees of the harness: nothing."""

import os
import sys
from pathlib import Path

import pytest

from pagetest.run.environment import PROBE, page_environment

pytestmark = pytest.mark.slow

ROOT = Path("/project")


def environment(**outer: str) -> dict[str, str]:
    return page_environment(outer, ROOT, Path("/b/page.py"), Path("/r"))


def test_launcher_variables_are_scrubbed() -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"]
    names += ["TORCHELASTIC_RUN_ID", "ROLE_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK"]
    names += ["PYTHONINSPECT", "PYTHONOPTIMIZE", "PYTHONSTARTUP", "PYTHONHOME", "PYTHONSAFEPATH"]
    assert not set(environment(**dict.fromkeys(names, "1"))) & set(names)


def test_the_rest_is_kept_and_the_fixed_variables_are_set() -> None:
    made = environment(HOME="/home/me", PATH="/bin", OMP_NUM_THREADS="8", PYTHONHASHSEED="0")
    assert made["HOME"] == "/home/me"
    assert made["PYTHONHASHSEED"] == "0"
    assert made["OMP_NUM_THREADS"] == made["MKL_NUM_THREADS"] == made["PYTHONUTF8"] == made["HF_HUB_OFFLINE"] == "1"
    assert made["MPLBACKEND"] == "Agg"
    assert made["PATH"] == f"{Path(sys.executable).parent}:/bin"


def test_the_root_and_the_harness_are_not_on_the_path_of_a_page() -> None:
    made = environment(PYTHONPATH=os.pathsep.join(["/project", "", "/project/doctest", "/project/src"]))
    assert made["PYTHONPATH"] == os.pathsep.join([str(PROBE), "/project/src"])
    assert environment()["PYTHONPATH"] == str(PROBE)


def test_a_page_cannot_tell_that_it_is_tested(docs) -> None:
    """Main module, path, standard library, tracebacks: as `python lesson.py` in a folder of its own."""
    code = """
import doctest, inspect, os, pickle, sys
from pathlib import Path
assert not os.environ.keys() & {"RANK", "MASTER_PORT"}
assert Path.cwd() == Path(__file__).parent
assert sys.path[0] == str(Path.cwd())
assert not any(entry.endswith(("doctest", "probe")) for entry in sys.path), sys.path
assert __name__ == "__main__" and __spec__ is None and __package__ is None
assert sys.modules["__main__"].__dict__ is globals()
assert sys.argv == ["lesson.py", "--flag"]
assert callable(doctest.testmod)
assert "pagetest" not in sys.modules
assert set(os.listdir()) == {"lesson.py", "log.txt"}
class Thing:
    pass
assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
assert "class Thing" in inspect.getsource(Thing)
assert sys.gettrace() is None
"""
    docs.add("lesson", code, "python lesson.py --flag", languages=("en",))
    stale = docs.build / "en" / "lesson" / "stale.txt"
    stale.parent.mkdir(parents=True)
    stale.touch()
    outer = {**os.environ, "RANK": "3", "MASTER_PORT": "29500", "PYTHONOPTIMIZE": "1"}
    done = docs.run("lesson", "--lang", "en", env=outer)
    assert done.returncode == 0, done.stdout


def test_a_traceback_starts_at_the_page_and_names_the_markdown_line(docs) -> None:
    docs.add("lesson", "x = 1\nraise ValueError('boom')", languages=("en",))
    docs.run("lesson", "--lang", "en")
    folder = docs.build / "en" / "lesson"
    log = (folder / "log.txt").read_text()
    assert log.split("\n")[1:3] == [
        f'  File "{folder}/lesson.py", line 6, in <module>',
        "    raise ValueError('boom')",
    ]


def test_an_existing_sitecustomize_still_runs(docs, tmp_path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins\nbuiltins.was_here = True\n")
    docs.add("lesson", "x = 1\nassert was_here", languages=("en",))
    done = docs.run("lesson", "--lang", "en", env={**os.environ, "PYTHONPATH": str(tmp_path / "site")})
    assert done.returncode == 0, done.stdout
