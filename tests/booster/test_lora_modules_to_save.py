# pyright: reportArgumentType=false, reportCallIssue=false
"""Adapters with modules that are trained in full: equal to one process, saved, and loaded by peft and by a booster."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, inputs_of
from float64 import KeepFloat64
from peft import LoraConfig, PeftModel, get_peft_model
from plugins import plugins
from torch import nn

from colossal.booster import Booster
from colossal.testing import run_processes

PLUGINS = plugins("DDP", "FSDP", "ZeRO-2", "Gemini", "Gemini, tp2", "tp2", "pp2")
# modules of the plan of tensor parallelism, one that it replicates, and a layer that adapters are next to
SAVED = {"ends": ["embed_tokens", "lm_head"], "inner": ["norm", "up_proj", "lm_head"]}


def config(saved: str) -> LoraConfig:
    return LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], modules_to_save=SAVED[saved], init_lora_weights=False
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def one_process(saved: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Train; return where training started, and the logits where it ended."""
    torch.manual_seed(1)
    with KeepFloat64():
        model = get_peft_model(build("llama"), config(saved)).double()
        initial = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = sgd(model)
        for _ in range(2):
            model(**inputs_of("llama")).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return initial, logits_of(model)


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad(), KeepFloat64():
        return model(input_ids=inputs_of("llama")["input_ids"]).logits


def train_and_save(plugins: list[str], expected: dict[str, Any], root: str) -> None:
    for plugin in plugins:
        for saved, (initial, logits) in expected.items():
            folder = f"{root}/{plugin}-{saved}"
            booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
            model: Any = booster.enable_lora(build("llama"), lora_config=config(saved)).double()
            model.load_state_dict(initial)
            model, optimizer, *_ = booster.boost(model, sgd(model))
            rank, size = booster.plugin.data_parallel_rank_and_size()
            batch = {name: value.chunk(size)[rank] for name, value in inputs_of("llama").items()}
            with KeepFloat64():
                for _ in range(2):
                    booster.execute_pipeline(iter([batch]), model, lambda out, _: out.loss, optimizer)
                    optimizer.step()
                    optimizer.zero_grad()
            booster.save_lora_as_pretrained(model, f"{folder}/adapter", use_safetensors=True)
            booster.save(f"{folder}/run", model, optimizer, step=2)
            found = logits_of(PeftModel.from_pretrained(build("llama"), f"{folder}/adapter").double())
            torch.testing.assert_close(found, logits, msg=lambda text, at=f"{plugin}, {saved}: ": at + text)

            again: Any = booster.enable_lora(build("llama"), lora_config=config(saved)).double()
            again, optimizer, *_ = booster.boost(again, sgd(again))
            booster.load(f"{folder}/run", again, optimizer)
            booster.save_lora_as_pretrained(again, f"{folder}/again", use_safetensors=True)
            found = logits_of(PeftModel.from_pretrained(build("llama"), f"{folder}/again").double())
            torch.testing.assert_close(found, logits, msg=lambda text, at=f"{plugin}, {saved}, loaded: ": at + text)


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["inner", "ends"])
def test_modules_that_are_trained_in_full_are_saved(saved: str, tmp_path: Path) -> None:
    run_processes(train_and_save, 2, list(PLUGINS), {saved: one_process(saved)}, str(tmp_path))
