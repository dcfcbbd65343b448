"""What `colossal estimate` prints is what ranks hold: real tensors of a small Llama on two processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM

from colossal._src.cli.estimate.command import command
from colossal.booster import Booster
from colossal.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossal.comm import CommCounter
from colossal.testing import find_storages, run_processes

pytestmark = pytest.mark.slow

CONFIG = LlamaConfig(
    hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=1024, max_position_embeddings=64, use_cache=False, architectures=["LlamaForCausalLM"],
)  # fmt: skip
LENGTH = 32
CASES: dict[str, tuple[list[str], Any]] = {
    "ddp": ([], TorchDDPPlugin),
    "zero1": ([], lambda: LowLevelZeroPlugin(stage=1, precision="fp32")),
    "zero2": ([], lambda: LowLevelZeroPlugin(stage=2, precision="fp32")),
    "zero2-bf16": (["--precision", "bf16"], lambda: LowLevelZeroPlugin(stage=2, precision="bf16")),
    "fsdp": ([], TorchFSDPPlugin),
    "gemini": ([], lambda: GeminiPlugin(precision="fp32")),
    "gemini-bf16": (["--precision", "bf16"], lambda: GeminiPlugin(precision="bf16")),
    "hybrid": (["--tp", "2"], lambda: HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32")),
    "hybrid-pipeline": (
        ["--pp", "2"],
        lambda: HybridParallelPlugin(tp_size=1, pp_size=2, precision="fp32", num_microbatches=2),
    ),
}


def measure_all() -> dict[str, tuple[int, dict[str, int]]]:
    return {name: measure(make()) for name, (_, make) in CASES.items()}


def measure(plugin: Plugin) -> tuple[int, dict[str, int]]:
    """Train two steps; return what is held when gradients and states are there, and what the second step sent."""
    ids = torch.randint(0, 1024, (2, LENGTH))
    before = find_storages()
    booster = Booster(plugin=plugin)
    model: Any = LlamaForCausalLM(CONFIG)
    criterion: Any
    model, optimizer, criterion, *_ = booster.boost(
        model, torch.optim.AdamW(model.parameters()), lambda outputs, _: outputs.loss
    )
    held = 0
    for _ in range(2):
        with CommCounter() as counter:
            booster.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), model, criterion, optimizer)
            now = find_storages()
            held = sum(each.nbytes() for address, each in now.items() if address not in before)
            optimizer.step()
        optimizer.zero_grad()
    return held, {axis: sum(n for (_, each), n in counter.bytes.items() if each == axis) for axis in ("dp", "tp", "pp")}


@pytest.fixture(scope="module")
def measured() -> list[dict[str, tuple[int, dict[str, int]]]]:
    return run_processes(measure_all, 2)


@pytest.mark.parametrize("case", CASES)
def test_is_what_ranks_hold_and_send(case: str, measured: Any, tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path)
    words = ["--plugin", case.partition("-")[0], "--ranks", "2", "--batch-size", "4", "--length", str(LENGTH)]
    if "--tp" in CASES[case][0] or "--pp" in CASES[case][0]:
        words[words.index("--batch-size") + 1] = "2"  # which both ranks see
    done = CliRunner().invoke(command, [str(tmp_path), *words, *CASES[case][0], "--json"])
    assert done.exit_code == 0, done.output
    ranks = json.loads(done.stdout)["ranks"]
    assert [each["rank"] for each in ranks] == ([0, 1] if "--pp" in CASES[case][0] else [0])
    for each in ranks:
        held, sent = measured[each["rank"]][case]
        kept = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes")
        assert sum(each[name] for name in kept) == pytest.approx(held, rel=0.01)  # the bar is 0.1
        if case == "fsdp":  # whose collectives are torch's own: parameters in both passes, and gradients
            sent = {"dp": each["parameter_bytes"] * 2 + each["gradient_bytes"]}
        assert each["sent_bytes"] == pytest.approx({axis: sent[axis] for axis in each["sent_bytes"]}, rel=0.01)
        assert each["sent_bytes"]
