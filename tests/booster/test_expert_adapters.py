# pyright: reportArgumentType=false, reportCallIssue=false
"""Low-rank adapters of models whose experts are sharded over ranks, and of the experts themselves."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from equality import RTOL
from families import build, inputs_of
from float64 import KeepFloat64
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import nn

from colossal._src.testing.processes import PRELOADED
from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.errors import ConfigError, PlanError
from colossal.testing import fake_world, run_processes

PRELOADED.append("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # of peft
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),  # the same
]
STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
BIASES = ["mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"]
ADAPTED: dict[str, dict[str, dict[str, Any]]] = {
    "mixtral": {
        "attention": {"target_modules": ["q_proj", "v_proj", "o_proj"]},
        "attention and routers": {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]},
        "attention, and experts in full": {"target_modules": ["q_proj"], "modules_to_save": ["mlp.experts"]},
        "experts": {"target_modules": [], "target_parameters": STACKED},
        "experts by names of before they were stacked": {"target_modules": ["q_proj", "w1", "w2", "w3"]},
        "one parameter of experts": {"target_modules": ["q_proj"], "target_parameters": STACKED[1:]},
        "all layers": {"target_modules": "all-linear"},
    },
    "gpt-oss": {"experts": {"target_modules": [], "target_parameters": [*STACKED, *BIASES]}},
}
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"ep_size": 2}),
    "tp2": (2, {"tp_size": 2}),
    "tp2-ep2": (2, {"tp_size": 2, "ep_size": 2}),
    "ep4": (4, {"ep_size": 4, "zero_stage": 1}),  # one expert on each rank
    "dp2-tp2-ep2": (4, {"tp_size": 2, "ep_size": 2}),
}


def hybrid(**options: Any) -> HybridParallelPlugin:
    return HybridParallelPlugin(**{"tp_size": 1, "pp_size": 1, "precision": "fp32"} | options)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    pairs = [inputs_of("mixtral", num_changed=each) for each in (step, step + 4)]
    return {key: torch.cat([pair[key] for pair in pairs]) for key in pairs[0]}


def adapt(booster: Booster, name: str, options: dict[str, Any]) -> Any:
    model = booster.enable_lora(build(name), lora_config=peft.LoraConfig(r=3, **options)).double()
    draw = torch.Generator().manual_seed(6)
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            nn.init.normal_(parameter, std=0.1, generator=draw)
    return model


def train(world: str, name: str, folder: Path) -> dict[str, list[float]]:
    norms: dict[str, list[float]] = {}
    for case, options in ADAPTED[name].items():
        plugin = hybrid(**WORLDS[world][1]) if world in WORLDS else None
        part, parts = (0, 1) if plugin is None else plugin.data_parallel_rank_and_size()
        booster = Booster(device="cpu", plugin=plugin)
        model = adapt(booster, name, options)
        if world == "ep2":  # the others, and one process, run the forward method of the experts
            model.get_base_model().set_experts_implementation("grouped_mm")
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        norms[case] = []
        for step in range(3):
            batch = {key: value.chunk(parts)[part] for key, value in batch_of(step).items()}
            with KeepFloat64():
                booster.backward(model(**batch).loss, optimizer)
            norms[case].append(float(optimizer.clip_grad_by_norm(0.1)))
            optimizer.step()
            optimizer.zero_grad()
        booster.save_lora_as_pretrained(model, folder / world / case, use_safetensors=True)
    return norms


@pytest.mark.parametrize(
    ("world", "name"),
    [
        ("ep2", "mixtral"),
        pytest.param("tp2", "mixtral", marks=pytest.mark.slow),
        pytest.param("tp2-ep2", "mixtral", marks=pytest.mark.slow),
        ("ep2", "gpt-oss"),
        ("tp2-ep2", "gpt-oss"),
        pytest.param("ep4", "mixtral", marks=pytest.mark.slow),
        pytest.param("ep4", "gpt-oss", marks=pytest.mark.slow),
        pytest.param("dp2-tp2-ep2", "mixtral", marks=pytest.mark.slow),
        pytest.param("dp2-tp2-ep2", "gpt-oss", marks=pytest.mark.slow),
    ],
)
def test_trains_as_in_one_process(world: str, name: str, tmp_path: Path) -> None:
    expected = train("one", name, tmp_path)
    for norms in run_processes(train, WORLDS[world][0], world, name, tmp_path):
        for case, values in expected.items():
            assert norms[case] == pytest.approx(values, rel=RTOL), case
    for case in ADAPTED[name]:
        found, saved = (load_file(tmp_path / each / case / "adapter_model.safetensors") for each in (world, "one"))
        assert found.keys() == saved.keys()
        assert any("experts" in key for key in saved) == ("experts" in case or case == "all layers")
        for key, value in saved.items():
            torch.testing.assert_close(found[key], value, msg=f"{case}: {key}")


# ------------------------------------------------------------------------------------------ files


def save_first(folder: Path) -> None:
    booster = Booster(device="cpu", plugin=hybrid(ep_size=4))
    model, *_ = booster.boost(adapt(booster, "mixtral", ADAPTED["mixtral"]["experts"]))
    booster.save_lora_as_pretrained(model, folder, use_safetensors=True)


def save_again(options: dict[str, Any], folder: Path, target: Path) -> None:
    """Continue from saved adapters, and save what was loaded."""
    booster = Booster(device="cpu", plugin=hybrid(**options))
    model = booster.enable_lora(build("mixtral"), pretrained_dir=folder).double()
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.save_lora_as_pretrained(model, target, use_safetensors=True)


@pytest.mark.slow
def test_files_are_those_of_peft_with_all_experts(tmp_path: Path) -> None:
    run_processes(save_first, 4, tmp_path / "ep4")
    saved = load_file(tmp_path / "ep4/adapter_model.safetensors")
    alone = peft.PeftModel.from_pretrained(build("mixtral"), tmp_path / "ep4")  # no name of the file is unknown to it
    again = peft.get_peft_model_state_dict(alone)
    assert saved.keys() == again.keys()
    assert all(torch.equal(again[key], value) for key, value in saved.items())
    for name in ("ep2", "tp2"):
        size, options = WORLDS[name]
        run_processes(save_again, size, options, tmp_path / "ep4", tmp_path / name)
        found = load_file(tmp_path / name / "adapter_model.safetensors")
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[key], value) for key, value in saved.items())


# ------------------------------------------------------------------------------------------ names


def test_names_that_peft_takes_for_experts_are_found_and_what_they_skip_is_said(logged) -> None:
    names = ["o_proj", "gate_proj", "up_proj", "down_proj"]  # of the first layer and of shared experts too
    config = peft.LoraConfig(r=3, target_modules=names)
    model: Any = Booster(device="cpu").enable_lora(build("deepseek"), lora_config=config)
    alone = peft.get_peft_model(build("deepseek"), peft.LoraConfig(r=3, target_modules=names))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in alone.named_parameters() if parameter.requires_grad}
    assert any("experts" in name for name in trained)
    assert "Other layers of these names stay frozen: 6, such as model.layers.0.mlp.gate_proj" in "".join(logged())


def test_misspelt_names_beside_those_of_experts_are_refused() -> None:
    config = peft.LoraConfig(r=3, target_modules=["q_porj", "k_proj", "w1", "w2", "w3"])
    with pytest.raises(ConfigError, match=r"Found \['q_porj'\], which match no layer of MixtralForCausalLM"):
        Booster(device="cpu").enable_lora(build("mixtral"), lora_config=config)


# ------------------------------------------------------------------------------------------ what is refused


class WholeExperts(nn.Module, BaseTunerLayer):
    """Adapters that a program has registered with peft for the module of all experts."""

    def __init__(self, base_layer: nn.Module, *_args: Any, **_options: Any) -> None:
        super().__init__()
        self.base_layer = base_layer


def test_adapters_that_adapt_no_parameter_are_refused() -> None:
    with fake_world(2):
        booster = Booster(device="cpu", plugin=hybrid(ep_size=2))
        model = adapt(booster, "mixtral", ADAPTED["mixtral"]["attention"])
        layer: Any = model.get_base_model().model.layers[1].mlp
        layer.experts = WholeExperts(layer.experts)
        message = r"Found WholeExperts around layers\.1\.mlp\.experts, a MixtralExperts.*target_parameters"
        with pytest.raises(PlanError, match=message):
            booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
