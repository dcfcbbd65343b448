# pyright: reportArgumentType=false
"""Models of peft beyond adapters of all layers: of parameters, of some layers, and what adds to the forward pass."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import build, inputs_of
from float64 import KeepFloat64
from plugins import HYBRID, plugins
from safetensors.torch import load_file
from torch import nn

from colossal._src.testing.processes import PRELOADED
from colossal.booster import Booster
from colossal.errors import PlanError, UnsupportedError
from colossal.testing import fake_world, run_processes

PRELOADED.append("peft")

LORA = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "init_lora_weights": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # of colwise and rowwise layers, and of keys
    "parameters": (
        "tp2",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["self_attn.k_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"],
        },
    ),
    # the stage without adapters takes part when the others save theirs
    "first layer": ("pp2", {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"}),
    "last layer": ("pp2", {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}),
}


def adapted(options: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    return peft.get_peft_model(build("llama"), peft.LoraConfig(**LORA, **options)).double()


def train(case: str, plugin: str, folder: str) -> None:
    model = adapted(CASES[case][1])
    booster = Booster(device="cpu", plugin=plugins(plugin)[plugin]())
    trained = [each for each in model.parameters() if each.requires_grad]
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(trained, lr=0.5, momentum=0.9))
    with KeepFloat64():
        for _ in range(2):
            booster.execute_pipeline(iter([inputs_of("llama")]), model, lambda out, _: out.loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    booster.save_lora_as_pretrained(model, folder, use_safetensors=True)


@pytest.mark.parametrize("case", ["parameters", "first layer", pytest.param("last layer", marks=pytest.mark.slow)])
def test_train_as_in_one_process(case: str, tmp_path: Path) -> None:
    run_processes(train, 2, case, CASES[case][0], str(tmp_path / "sharded"))
    train(case, "none", str(tmp_path / "alone"))
    found, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("sharded", "alone"))
    assert found.keys() == expected.keys()
    assert expected
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize(
    ("config", "added"),
    [
        (peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9), "AdaLoraConfig.*forward pass of AdaLoraModel"),
        (
            peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
            "PromptTuningConfig, which adds prompts",
        ),
    ],
)
def test_what_peft_adds_to_the_forward_pass_is_refused_in_stages(config: peft.PeftConfig, added: str) -> None:
    model = peft.get_peft_model(build("llama"), config)
    with fake_world(2), pytest.raises(UnsupportedError, match=rf"(?s){added}.*without pp_size"):
        Booster(device="cpu", plugin=HYBRID(1, 2, num_microbatches=2)).boost(model)


def test_adapters_of_parameters_that_cannot_be_sharded_are_refused() -> None:
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.c_fc.weight"])
    model: nn.Module = peft.get_peft_model(build("gpt2"), config)
    with fake_world(2), pytest.raises(PlanError, match="around Conv1D. Name the layer in target_modules alone"):
        Booster(device="cpu", plugin=HYBRID(2, 1)).boost(model)


def test_prompts_are_not_saved_as_adapters(tmp_path: Path) -> None:
    model = peft.get_peft_model(
        build("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    ).double()
    booster = Booster(device="cpu")
    trained = [each for each in model.parameters() if each.requires_grad]
    model, *_ = booster.boost(model, torch.optim.SGD(trained, lr=0.1))
    with pytest.raises(UnsupportedError, match=r"PromptTuningConfig.*booster\.save_model"):
        booster.save_lora_as_pretrained(model, tmp_path / "adapters")
    booster.save_model(model, tmp_path / "model.safetensors", use_safetensors=True)
    assert "prompt_encoder.default.embedding.weight" in load_file(tmp_path / "model.safetensors")
