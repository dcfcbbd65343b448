# pyright: reportArgumentType=false
"""Checkpoints of models with adapters, from any plugin: transformers, peft and any other world load them."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import build
from torch import nn

from colossal._src.testing.processes import PRELOADED
from colossal.booster import Booster
from colossal.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossal.checkpoint_io import CheckpointIO
from colossal.testing import run_processes

PRELOADED.append("peft")
pytestmark = [pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"), pytest.mark.slow]

PIPELINE: dict[str, Any] = {"precision": "fp32", "pp_size": 2, "num_microbatches": 2}
WORLDS: dict[str, tuple[int, Any]] = {
    "none": (1, lambda: None),
    "ddp": (2, TorchDDPPlugin),
    "fsdp": (2, TorchFSDPPlugin),
    "zero": (2, lambda: LowLevelZeroPlugin(stage=2, precision="fp32")),
    "gemini": (2, lambda: GeminiPlugin(precision="fp32")),
    "tp2": (2, lambda: HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32")),
    "pp2": (2, lambda: HybridParallelPlugin(tp_size=1, **PIPELINE)),
    "tp2-pp2": (4, lambda: HybridParallelPlugin(tp_size=2, **PIPELINE)),
}
DIRECTORIES = {"safe": {"use_safetensors": True}, "bin": {}, "async": {"use_safetensors": True, "use_async": True}}
FILES = ["model.safetensors", "model.bin"]
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "lm_head"]


def adapted(booster: Booster, seed: int) -> nn.Module:
    """Return a model whose base and adapters have values of the seed, the same on all ranks."""
    torch.manual_seed(seed)
    base = build("llama")
    model: nn.Module = booster.enable_lora(base, lora_config=peft.LoraConfig(r=2, target_modules=TARGETS))
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    return model


def save(world: str, root: Path) -> None:
    """Save under each format; then load what one process saved, and save that."""
    booster = Booster(device="cpu", plugin=WORLDS[world][1]())
    model = adapted(booster, 1)
    model, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    for name, options in DIRECTORIES.items():
        booster.save_model(model, root / name, shard=True, size_per_shard=1 / 64, **options)
    for name in FILES:
        booster.save_model(model, root / name)
    booster.save_lora_as_pretrained(model, root / "only adapters")
    for name in ("one process", "one process.safetensors"):
        booster.load_model(model, root / name)
        booster.save_model(model, root / f"{name} again", shard=True, use_safetensors=True)


def same(found: nn.Module, expected: nn.Module) -> bool:
    state = found.state_dict()
    return all(torch.equal(state.pop(name), value) for name, value in expected.state_dict().items()) and not state


@pytest.mark.parametrize("world", WORLDS)
def test_what_any_world_saves_transformers_peft_and_one_process_load(world: str, tmp_path: Path) -> None:
    alone, io = Booster(device="cpu"), CheckpointIO()
    first, second = adapted(alone, 1), adapted(alone, 2)
    io.save_model(second, tmp_path / "one process", shard=True)
    io.save_model(second, tmp_path / "one process.safetensors")
    run_processes(save, WORLDS[world][0], world, tmp_path)
    kind: Any = type(build("llama"))
    for name in DIRECTORIES:
        base, info = kind.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not info["missing_keys"], name
        assert not info["unexpected_keys"], name
        torch.manual_seed(1)
        assert same(base, build("llama")), name
        assert same(peft.PeftModel.from_pretrained(base, tmp_path / name / "adapter"), first), name
    for name in (*DIRECTORIES, *FILES):
        assert same(io.load_model(adapted(alone, 3), tmp_path / name), first), name
    for name in ("one process again", "one process.safetensors again"):
        assert same(io.load_model(adapted(alone, 3), tmp_path / name), second), name
