"""Programs by the commands that READMEs show: their loss falls."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def run_python(words: list[str], folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_pretraining_by_torchrun(tmp_path: Path) -> None:
    words = ["--smoke", "--plugin", "hybrid", "--tp", "2", "--output", str(tmp_path)]
    run_python([*LAUNCHER, str(ROOT / "examples/pretrain/train.py"), *words], tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [line["loss"] for line in lines]
    assert len(losses) == 24
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3]), losses
    assert lines[-1]["eval_loss"] < losses[0]
    assert all(line["tokens_per_second"] > 0 for line in lines)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000012", "step-00000024"]


@pytest.mark.parametrize("size", [1, 2])
def test_quickstart_trains_alone_and_on_two_ranks(size: int, tmp_path: Path) -> None:
    launcher = LAUNCHER if size > 1 else []
    printed = run_python([*launcher, str(ROOT / "examples/quickstart.py")], tmp_path)
    pattern = r"step +(\d+)  loss ([\d.]+)  accuracy ([\d.]+)  ([\d,]+) samples/s"
    rows = re.findall(pattern, printed)
    assert [int(step) for step, *_ in rows] == [number * (45 if size == 1 else 23) for number in range(1, 9)]
    assert float(rows[-1][1]) < 0.5 * float(rows[0][1])
    assert float(rows[-1][2]) > 0.88
    assert (tmp_path / "digits.pt").is_file()


def test_every_program_is_run_here() -> None:
    programs = {path.parent.name for path in (ROOT / "examples").glob("*/train.py")}
    assert programs == {"pretrain", "finetune"}  # which test_pretrain.py and test_finetune.py run
