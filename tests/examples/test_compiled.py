"""`--compile` of the program that fine-tunes: the losses of the model that is not compiled, under every plugin."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from colossal.testing import make_finetuning_inputs, run_processes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMMON = "--steps 3 --batch-size 8 --length 32 --lr 0.1 --warmup 0 --precision fp32"
PLUGINS = {
    "ddp": "--plugin ddp --accumulate 2",
    "fsdp": "--plugin fsdp",
    "zero1": "--plugin zero1",
    "zero2": "--plugin zero2",
    "gemini": "--plugin gemini",
    "tp": "--plugin hybrid --tp 2",
    "pp": "--plugin hybrid --pp 2",
}


def finetune(runs: list[list[str]]) -> None:
    """Run the program, with SGD: Adam makes of any difference one of the size of its step."""
    sys.path.insert(0, str(ROOT))
    options, train = (importlib.import_module(f"examples.finetune.{name}") for name in ("options", "train"))
    compile_module = nn.Module.compile
    # graphs as with the default backend, whose code takes minutes to build
    nn.Module.compile = lambda self: compile_module(self, backend="aot_eager")
    torch.optim.AdamW = torch.optim.SGD
    for words in runs:
        torch._dynamo.reset()
        counters.clear()
        train.run(options.parse(words))
        assert (counters["stats"]["unique_graphs"] > 0) is ("--compile" in words), words


def losses_of(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line[name] for line in lines for name in ("loss", "eval_loss") if name in line]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    model, data = make_finetuning_inputs(folder)
    lines = data.read_text(encoding="utf-8").splitlines(keepends=True)
    data.write_text("".join(lines[:60]), encoding="utf-8")
    return ["--model", str(model), "--data", str(data), *COMMON.split()]


@pytest.fixture(scope="module")
def expected(inputs: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What windows of one length are learned with, not compiled."""
    output = tmp_path_factory.mktemp("expected")
    run_processes(finetune, 2, [[*inputs, "--pack", "--output", str(output)]])
    return losses_of(output)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_losses_of_the_compiled_model(plugin: str, inputs: list[str], expected: list[float], tmp_path: Path) -> None:
    words = [*inputs, "--pack", *PLUGINS[plugin].split(), "--compile", "--output", str(tmp_path)]
    run_processes(finetune, 2, [words])
    assert expected[-1] < expected[0]
    torch.testing.assert_close(losses_of(tmp_path), expected, rtol=1e-5, atol=0)
