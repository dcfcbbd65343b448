"""The records of runs: what is kept of each page, language and device."""

import getpass
import json
import os
import platform
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pagetest.graph.fingerprint import common_inputs
from pagetest.limits import scaled
from pagetest.results.recorder import remove_private_names
from pagetest.results.records import BrokenRecordError, Records

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SHOWN = """# Lesson

```python
import os
from pathlib import Path
if os.environ.get("RANK", "0") != "0":
    os.chdir(__import__("tempfile").mkdtemp())
print("first", 1.5)
Path("b.svg").write_text("<svg>old</svg>")
Path("notes.txt").write_text("no figure")
```

```python
Path("a.png").write_bytes(b"\\x89PNG")
Path("b.svg").write_text("<svg>new</svg>")
```

```python
def late():
    Path("c.svg").write_text("<svg>late</svg>")
import atexit
_ = atexit.register(late)
print("in", os.getcwd())
```

<!-- doc-test-command: COMMAND lesson.py -->
"""
RANKS = "torchrun --standalone --nproc_per_node=2"


def record(
    page: str, lang: str = "en", device: str = "cpu", status: str = "PASS", **facts: object
) -> dict[str, object]:
    return {"page": page, "lang": lang, "device": device, "status": status, **facts}


def test_a_run_replaces_only_what_it_ran(tmp_path) -> None:
    records = Records(tmp_path / "verified")
    assert records.read() == []
    for found in (record("b"), record("a", "zh-Hans"), record("part/a", device="cuda", unknown=[1])):
        records.write(found)
    records.write(record("b", status="FAIL"))
    assert records.read() == [
        record("b", status="FAIL"),
        record("a", "zh-Hans"),
        record("part/a", device="cuda", unknown=[1]),
    ]
    assert records.find("cuda", "en", "part/a") == record("part/a", device="cuda", unknown=[1])
    assert records.find("cpu", "en", "part/a") is None
    assert (records.folder / "cuda/en/part/a.json").is_file()


def test_figures_of_an_older_run_go_with_its_record(tmp_path) -> None:
    records = Records(tmp_path)
    records.write(record("a"), {"x.svg": b"x", "y.png": b"y"})
    assert records.figure(record("a"), "y.png").read_bytes() == b"y"
    records.write(record("a"), {"x.svg": b"z"})
    assert [path.name for path in (tmp_path / "cpu/en/a").iterdir()] == ["x.svg"]
    records.remove("en", "a")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "text",
    ["", '{"page": ', "[]", json.dumps(record("lesson", device="cuda")), '{"page": "lesson", "lang": "en"}'],
)
def test_a_file_of_something_else_is_named(tmp_path, text) -> None:
    file = tmp_path / "cpu/en/lesson.json"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(BrokenRecordError, match=r"lesson\.json:1: this should hold the record of a run, but it"):
        Records(tmp_path).read()


def _enter(folder: Path, seconds: int) -> None:
    Records(folder).write(record("lesson", seconds=seconds))


def test_runs_that_end_at_once_leave_one_record(tmp_path) -> None:
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(_enter, [tmp_path] * 40, range(40)))
    assert [path.name for path in tmp_path.rglob("*.*")] == ["lesson.json"]
    assert Records(tmp_path).read()[0]["page"] == "lesson"


@pytest.mark.parametrize("command", ["python", RANKS])
def test_a_run_leaves_what_each_block_printed_and_drew(docs, command) -> None:
    docs.write("lesson", SHOWN.replace("COMMAND", command))
    assert docs.run("lesson").returncode == 0
    english, chinese = docs.records.read()
    assert english["blocks"] == [
        {"printed": "first 1.5\n", "figures": []},
        {"printed": "", "figures": ["a.png", "b.svg"]},
        {"printed": "in /home/user/tutorial\n", "figures": ["c.svg"]},
    ]
    contents = {name: docs.records.figure(english, name).read_text("latin-1") for name in ("a.png", "b.svg", "c.svg")}
    assert contents == {"a.png": "\x89PNG", "b.svg": "<svg>new</svg>", "c.svg": "<svg>late</svg>"}
    assert (chinese["status"], "blocks" in chinese) == ("SAME", False)
    assert not docs.records.figure(chinese, "a.png").exists()


def test_the_facts_of_a_run_are_those_of_its_translation_too(docs) -> None:
    docs.add("part/lesson", "x = 1\ny = 2\nprint(x)")
    done = docs.run("--all")
    assert done.returncode == 0, done.stdout
    assert "SAME  code identical to en\n" in done.stdout
    ran, same = docs.records.read()
    assert (ran["status"], same["status"], same["note"]) == ("PASS", "SAME", "code identical to en")
    for fact in ("device", "backend", "world", "seconds", "peak_bytes", "lines_run", "lines_total", "fingerprint"):
        assert ran[fact] == same[fact], fact
    assert (ran["device"], ran["world"], len(ran["fingerprint"]), len(ran["inputs"])) == ("cpu", 1, 16, 16)
    assert ran["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"python", "torch"} <= ran["versions"].keys()
    assert ran["processor"]
    assert abs((datetime.now(UTC).date() - datetime.fromisoformat(ran["date"]).date()).days) <= 1


def test_a_failure_is_recorded_without_outputs(docs) -> None:
    docs.add("lesson", "print('before')\nraise ValueError('boom')")
    docs.run("lesson")
    first, second = docs.records.read()
    assert (first["status"], second["status"]) == ("FAIL", "FAIL")
    assert second["note"] == "code identical to en, which failed"
    assert second["device"] == "cpu"
    assert "blocks" not in first
    assert {key: first["error"][key] for key in ("line", "rank", "message")} == {
        "line": 6, "rank": 0, "message": "ValueError: boom"
    }  # fmt: skip


def test_a_page_that_fails_before_it_runs_replaces_its_success(docs) -> None:
    docs.add("lesson", "x = 1", "echo lesson.py")
    for found in (record("lesson"), record("lesson", device="cuda"), record("other")):
        docs.records.write(found)
    assert docs.main("lesson", "--lang", "en", "--device", "cpu") == 1
    assert [(old["page"], old["device"], old["status"]) for old in docs.records.read()] == [
        ("lesson", "cpu", "FAIL"),
        ("other", "cpu", "PASS"),
        ("lesson", "cuda", "PASS"),
    ]


def test_a_page_without_code_has_no_record_on_any_device(docs) -> None:
    docs.write("prose", "# Title\n\n<!-- doc-test-command: none -->\n")
    docs.records.write(record("prose"))
    docs.records.write(record("prose", device="cuda"))
    (docs.records.folder / "README.md").touch()  # a file next to those of the devices
    assert docs.main("prose", "--device", "cpu") == 0
    assert docs.records.read() == []


def test_results_so_far_outlive_an_interruption(docs) -> None:
    docs.add("a", "x = 1")
    docs.add("b", "import os, time\nprint(os.getpid(), flush=True)\nopen('../../begun', 'w').close()\ntime.sleep(1000)")
    command = ["env", "--default-signal=INT", sys.executable, str(ROOT / "docs_test.py"), *docs.arguments("a", "b")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as harness:
        deadline = time.monotonic() + scaled(120)
        while not (docs.build / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        harness.send_signal(signal.SIGINT)
        assert harness.wait(scaled(120)) == 130
    assert [(old["page"], old["lang"]) for old in docs.records.read()] == [("a", "en"), ("a", "zh-Hans")]


def test_warnings_are_recorded_at_the_line_of_the_page(docs) -> None:
    docs.add("lesson", "import warnings\nwarnings.warn('old', stacklevel=1)\nprint('12:30: no warning')")
    assert docs.run("lesson", "--lang", "en").returncode == 0
    [found] = docs.records.read()
    assert found["warnings"] == [{"line": 6, "message": "UserWarning: old: correct what causes it"}]


def test_what_all_pages_depend_on_is_part_of_the_record(tmp_path) -> None:
    for name in ("constraints.txt", "docs_test.py", "doctest/pagetest/run/x.py", "csrc/a.cpp", "src/pack/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    before = common_inputs(tmp_path)
    (tmp_path / "src/pack/x.py").write_text("a page's own fingerprint holds this")
    assert common_inputs(tmp_path) == before
    for name in ("constraints.txt", "docs_test.py", "doctest/pagetest/run/x.py", "csrc/a.cpp"):
        (tmp_path / name).write_text("other")
        assert common_inputs(tmp_path) != before, name
        (tmp_path / name).write_text(name)
    assert common_inputs(tmp_path) == before


@pytest.mark.parametrize(
    ("printed", "kept"),
    [
        ("{root}/src/x.py", "/home/user/colossal/src/x.py"),
        ("{root}/build/en/lesson/out.txt", "/home/user/tutorial/out.txt"),
        (f"{Path.home()}/.cache", "/home/user/.cache"),
        (f"{sys.prefix}/bin/python", "/home/user/venv/bin/python"),
        ("node-17: ready, node-170 not, anode-17", "host: ready, node-170 not, anode-17"),
        ("written by mary, not by maryam", "written by user, not by maryam"),
        ("the root rank of a user", "the root rank of a user"),
    ],
)
def test_nothing_tells_on_which_machine_a_page_ran(tmp_path, monkeypatch, printed, kept) -> None:
    monkeypatch.setattr(platform, "node", lambda: "node-17")
    monkeypatch.setattr(getpass, "getuser", lambda: "mary")
    text = printed.replace("{root}", str(tmp_path))
    assert remove_private_names(text, tmp_path, tmp_path / "build/en/lesson", "A page.") == kept
    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    assert remove_private_names("the root rank", tmp_path, tmp_path / os.sep, "A page.") == "the root rank"


def test_a_word_of_the_page_names_no_machine(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "vm")
    assert remove_private_names("1/(vm+1) on vm", tmp_path, tmp_path / "x", "print('1/(vm+1)')") == "1/(vm+1) on vm"
    assert remove_private_names("1/(m+1) on vm", tmp_path, tmp_path / "x", "print('1/(m+1)')") == "1/(m+1) on host"
