"""The report of a run of all pages, and the device of a run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagetest.run.device import Device

pytestmark = pytest.mark.slow


def test_the_slowest_and_the_hungriest_pages_are_named_after_a_run_of_all(docs) -> None:
    docs.add("quick", "x = 1")
    docs.add("hungry", "data = b'x' * 300_000_000\nimport time\ntime.sleep(3)")
    slowest, hungriest, _ = docs.run("--all").stdout.splitlines()[-3:]
    assert re.fullmatch(r"slowest: (\w+ \(en\) \d+\.\d s(, |$)){2}", slowest)
    assert re.fullmatch(r"hungriest: hungry \(en\) 0\.3 GB, quick \(en\) 0\.0 GB", hungriest)
    assert "slowest" not in docs.run("quick").stdout


def test_a_device_reaches_the_page(docs) -> None:
    docs.add("lesson", "import os\nassert os.environ['COLOSSAL_DEVICE'] == 'cpu'")
    done = docs.run("lesson", "--device", "cpu", env={**os.environ, "COLOSSAL_DEVICE": "cuda"})
    assert done.returncode == 0, done.stdout


@pytest.mark.gpu
def test_results_are_kept_per_device(docs) -> None:
    docs.add(
        "lesson",
        "from colossal.accelerator import get_current_device\nimport torch\ntorch.ones(1, device=get_current_device())",
    )
    for device in ("cpu", "cuda"):
        done = docs.run("lesson", "--device", device)
        assert f"PASS  {device} x1" in done.stdout
    assert [(old["device"], old["lang"]) for old in docs.records.read()] == [
        ("cpu", "en"),
        ("cpu", "zh-Hans"),
        ("cuda", "en"),
        ("cuda", "zh-Hans"),
    ]


def test_without_cuda_no_page_is_run_on_it(docs) -> None:
    docs.add("lesson", "x = 1")
    done = docs.run("lesson", "--device", "cuda", env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert "--device cuda needs a GPU and a CUDA build of torch; found torch " in done.stderr
    assert done.stdout == ""
    assert not docs.build.exists()


def test_a_page_that_ran_on_another_device_fails(docs, monkeypatch, capsys) -> None:
    """The machine is said to have a GPU; the page computes on the CPU all the same."""
    monkeypatch.setattr(Device, "fault", "")
    docs.add("lesson", "x = 1")
    docs.records.write({"page": "lesson", "lang": "en", "device": "cpu", "status": "PASS"})
    assert docs.main("lesson", "--lang", "en", "--device", "cuda") == 1
    out = capsys.readouterr().out
    assert "lesson.md:8: the page was asked to run on cuda and used cpu: take the device from colossal" in out
    assert [(old["device"], old["status"]) for old in docs.records.read()] == [("cpu", "PASS"), ("cuda", "FAIL")]


def test_the_harness_itself_never_imports_torch(docs) -> None:
    docs.add("lesson", "x = 1")
    code = (
        "import sys; sys.modules['torch'] = None; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from pagetest import cli\n"
        "sys.exit(cli.main(sys.argv[3:], Path(sys.argv[2])))"
    )
    root = Path(__file__).resolve().parents[2]
    words = [str(root / "doctest"), str(root), *docs.arguments("lesson", "--device", "cpu")]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, cwd=docs.source
    )
    assert done.returncode == 0, done.stderr
