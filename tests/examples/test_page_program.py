"""The program of the page on fine-tuning refuses what it would otherwise leave out."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from colossal.testing import make_finetuning_inputs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/source/en/tutorials/finetune.md"


def run_page_program(folder: Path, *words: str) -> tuple[int, str]:
    found = re.search(r"```python file=train\.py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    (folder / "train.py").write_text(found[1], encoding="utf-8")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLOSSAL_DEVICE": "cpu", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "train.py", "--batch-size", "4", "--length", "64", "--save-every", "1", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stderr


def test_other_settings_and_other_lines_are_refused_by_the_program_of_the_page(tmp_path: Path) -> None:
    make_finetuning_inputs(tmp_path / "inputs")
    assert run_page_program(tmp_path, "--steps", "1")[0] == 0
    assert run_page_program(tmp_path, "--steps", "1", "--precision", "fp32")[0] == 0  # the run goes on as it likes
    code, error = run_page_program(tmp_path, "--steps", "1", "--lr", "1")
    assert code == 1
    assert re.search(r'finetuned has a run with other settings: .*"lr": "2e-05".* Pass another --output\.', error)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "a"}), encoding="utf-8")
    code, error = run_page_program(tmp_path, "--data", "text.jsonl", "--output", "other")
    assert code == 1
    assert "ValueError: A line has messages. Found ['text'] in text.jsonl." in error
