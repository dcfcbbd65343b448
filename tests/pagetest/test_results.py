"""The results file, and the device of a run."""

import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pagetest.results.results_file import ResultsFile, ResultsFileError
from pagetest.run.device import Device


def entry(page: str, lang: str = "en", device: str = "cpu", status: str = "PASS", **facts: object) -> dict[str, object]:
    return {"page": page, "lang": lang, "device": device, "status": status, **facts}


def entries(path: Path) -> list[dict]:
    return json.loads(path.read_text())["results"]


def test_a_run_replaces_only_what_it_ran(tmp_path) -> None:
    file = ResultsFile(tmp_path / "build" / "results.json")
    file.enter([entry("b"), entry("a", "zh-Hans"), entry("a", device="cuda", unknown=[1])])
    file.enter([entry("a", status="FAIL"), entry("b", seconds=2)])
    assert entries(file.path) == file.read()
    assert file.read() == [
        entry("a", status="FAIL"),
        entry("a", device="cuda", unknown=[1]),
        entry("a", "zh-Hans"),
        entry("b", seconds=2),
    ]
    assert [path.name for path in file.path.parent.iterdir()] == ["results.json"]


def test_a_page_that_is_not_run_any_more_has_no_results_of_devices(tmp_path) -> None:
    file = ResultsFile(tmp_path / "results.json")
    file.enter([entry("a"), entry("a", device="cuda"), entry("a", "zh-Hans")])
    file.enter([entry("a", device="", status="NONE")])
    assert file.read() == [entry("a", device="", status="NONE"), entry("a", "zh-Hans")]
    file.enter([entry("a")])
    assert file.read() == [entry("a"), entry("a", "zh-Hans")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no JSON"),
        ('{"results": [', "no JSON"),
        ('[{"page": "a"}]', "not of the form"),
        ('{"results": {}}', "not of the form"),
        ('{"results": [{"page": "a", "lang": "en", "status": "PASS"}]}', "not of the form"),
        ('{"name": "package"}', "not of the form"),
    ],
)
def test_a_file_of_something_else_is_left_as_it_is(docs, tmp_path, capsys, text, message) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ResultsFileError, match=message):
        ResultsFile(path).enter([entry("a")])
    docs.add("lesson", "x = 1")
    assert docs.main("lesson", "--json", str(path)) == 2
    assert "results.json should hold results, but it is no" in capsys.readouterr().err
    assert path.read_text() == text
    assert not docs.build.exists()


def test_a_folder_is_no_results_file(tmp_path) -> None:
    with pytest.raises(ResultsFileError, match="cannot be read"):
        ResultsFile(tmp_path).read()


def _enter(path: Path, name: str) -> None:
    ResultsFile(path).enter([entry(name)])


def test_runs_that_end_at_once_lose_nothing(tmp_path) -> None:
    names = [f"page_{number:02}" for number in range(40)]
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(_enter, [tmp_path / "results.json"] * 40, names))
    assert [found["page"] for found in ResultsFile(tmp_path / "results.json").read()] == names


def test_a_translation_carries_the_facts_of_the_run(docs, tmp_path) -> None:
    docs.add("lesson", "x = 1\ny = 2\nprint(x)")
    docs.write("prose", "# Title\n\n<!-- doc-test-command: none -->\n")
    done = docs.run("--all", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout
    assert "SAME  code identical to en\n" in done.stdout
    ran, same, *others = entries(tmp_path / "out.json")
    assert (ran["status"], same["status"], same["note"]) == ("PASS", "SAME", "code identical to en")
    for fact in ("device", "backend", "world", "seconds", "peak_bytes", "lines_run", "lines_total", "fingerprint"):
        assert ran[fact] == same[fact], fact
    assert (ran["device"], ran["world"]) == ("cpu", 1)
    assert len(ran["fingerprint"]) == 16
    assert abs((datetime.now(UTC).date() - datetime.fromisoformat(ran["date"]).date()).days) <= 1
    assert [(other["status"], other["device"], other["fingerprint"]) for other in others] == [("NONE", "", "")] * 2


def test_a_translation_of_a_failed_page_is_failed(docs, tmp_path) -> None:
    docs.add("lesson", "raise ValueError('boom')")
    docs.run("lesson", "--json", str(tmp_path / "out.json"))
    first, second = entries(tmp_path / "out.json")
    assert (first["status"], second["status"]) == ("FAIL", "FAIL")
    assert second["note"] == "code identical to en, which failed"
    assert second["device"] == "cpu"


def test_a_page_that_fails_before_it_runs_replaces_its_success(docs, tmp_path) -> None:
    docs.add("lesson", "x = 1", "echo lesson.py")
    file = ResultsFile(tmp_path / "out.json")
    file.enter([entry("lesson"), entry("lesson", device="cuda"), entry("other")])
    assert docs.main("lesson", "--lang", "en", "--json", str(file.path), "--device", "cpu") == 1
    assert [(old["page"], old["device"], old["status"]) for old in file.read()] == [
        ("lesson", "cpu", "FAIL"),
        ("lesson", "cuda", "PASS"),
        ("other", "cpu", "PASS"),
    ]


def test_results_so_far_outlive_an_interruption(docs, tmp_path) -> None:
    docs.add("a", "x = 1")
    docs.add("b", "import os, signal, time\nharness = os.getppid()\nos.kill(harness, signal.SIGINT)\ntime.sleep(60)")
    assert docs.run("a", "b", "--json", str(tmp_path / "out.json")).returncode == 130
    assert [(old["page"], old["lang"]) for old in entries(tmp_path / "out.json")] == [("a", "en"), ("a", "zh-Hans")]


def test_the_slowest_and_the_hungriest_pages_are_named_after_a_run_of_all(docs) -> None:
    docs.add("quick", "x = 1")
    docs.add("slow", "import time\ntime.sleep(4)")
    docs.add("hungry", "data = b'x' * 300_000_000\nimport time\ntime.sleep(0.3)")
    slowest, hungriest, _ = docs.run("--all").stdout.splitlines()[-3:]
    assert slowest.startswith("slowest: slow (en) ")
    assert hungriest.startswith("hungriest: hungry (en) 0.3 GB, ")
    assert slowest.count(" s") - slowest.count(" slow") == 3
    assert "slowest" not in docs.run("quick", "slow").stdout


def test_a_device_reaches_the_page(docs) -> None:
    docs.add("lesson", "import os\nassert os.environ['COLOSSAL_DEVICE'] == 'cpu'")
    done = docs.run("lesson", "--device", "cpu", env={**os.environ, "COLOSSAL_DEVICE": "cuda"})
    assert done.returncode == 0, done.stdout


@pytest.mark.gpu
def test_results_are_kept_per_device(docs, tmp_path) -> None:
    docs.add(
        "lesson",
        "from colossal.accelerator import get_current_device\nimport torch\ntorch.ones(1, device=get_current_device())",
    )
    for device in ("cpu", "cuda"):
        done = docs.run("lesson", "--device", device, "--json", str(tmp_path / "out.json"))
        assert f"PASS  {device} x1" in done.stdout
    assert [(old["lang"], old["device"]) for old in entries(tmp_path / "out.json")] == [
        ("en", "cpu"),
        ("en", "cuda"),
        ("zh-Hans", "cpu"),
        ("zh-Hans", "cuda"),
    ]


def test_without_cuda_no_page_is_run_on_it(docs) -> None:
    docs.add("lesson", "x = 1")
    done = docs.run("lesson", "--device", "cuda", env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert "--device cuda needs a GPU and a CUDA build of torch; found torch " in done.stderr
    assert done.stdout == ""
    assert not docs.build.exists()


def test_a_page_that_ran_on_another_device_fails(docs, tmp_path, monkeypatch, capsys) -> None:
    """The machine is said to have a GPU; the page computes on the CPU all the same."""
    monkeypatch.setattr(Device, "fault", "")
    docs.add("lesson", "x = 1")
    file = ResultsFile(tmp_path / "out.json")
    file.enter([entry("lesson")])
    assert docs.main("lesson", "--lang", "en", "--device", "cuda", "--json", str(file.path)) == 1
    out = capsys.readouterr().out
    assert "lesson.md:8: the page was asked to run on cuda and used cpu: take the device from colossal" in out
    assert [(old["device"], old["status"]) for old in file.read()] == [("cpu", "PASS"), ("cuda", "FAIL")]


def test_the_harness_itself_never_imports_torch(docs) -> None:
    docs.add("lesson", "x = 1")
    code = (
        "import sys; sys.modules['torch'] = None; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from pagetest import cli\n"
        "sys.exit(cli.main(sys.argv[3:], Path(sys.argv[2])))"
    )
    root = Path(__file__).resolve().parents[2]
    words = [str(root / "doctest"), str(root), *docs.arguments("lesson", "--device", "cpu", "--json", "out.json")]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, cwd=docs.source
    )
    assert done.returncode == 0, done.stderr
