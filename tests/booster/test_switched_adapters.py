"""Adapters that a program switches, turns off and merges between steps, as in one process."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import build, inputs_of
from float64 import KeepFloat64
from plugins import HYBRID, plugins
from safetensors.torch import load_file

from colossal._src.testing.processes import PRELOADED
from colossal.booster import Booster
from colossal.errors import UnsupportedError
from colossal.testing import run_processes

PRELOADED.append("peft")

PLUGINS = plugins("none", "tp2", "pp2", "tp2 pp2")
PLUGINS |= {"pp2 zero1": lambda: HYBRID(1, 2, num_microbatches=2, zero_stage=1)}
LORA = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "init_lora_weights": False}
OTHER = LORA | {"r": 2, "layers_to_transform": [1], "layers_pattern": "layers"}  # the first stage has none of it


def adapted() -> Any:
    torch.manual_seed(3)
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(**LORA, target_modules=["q_proj", "down_proj"]))
    model.add_adapter("other", peft.LoraConfig(**OTHER, target_modules=["v_proj"]))
    return model.double()


def train(plugin: str, folder: Path) -> list[float]:
    model = adapted()
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    optimizer = torch.optim.SGD([each for name, each in model.named_parameters() if "lora" in name], lr=0.5)
    model, optimizer, *_ = booster.boost(model, optimizer)
    switched: Any = model.unwrap(unwrap_peft=False)
    losses = []

    def run(with_gradients: bool) -> None:
        batch, trained = iter([inputs_of("llama")]), optimizer if with_gradients else None
        with torch.set_grad_enabled(with_gradients), KeepFloat64():
            out = booster.execute_pipeline(batch, model, lambda out, _: out.loss, trained, return_loss=True)
        losses.append(out["loss"].item())

    for name in ("default", "other", "default", "other"):
        switched.set_adapter(name)
        run(with_gradients=True)
        optimizer.step()
        optimizer.zero_grad()
        with switched.disable_adapter():
            run(with_gradients=False)
        switched.merge_adapter()
        run(with_gradients=False)
        switched.unmerge_adapter()
        assert switched.active_adapter == name
        booster.save_lora_as_pretrained(model, folder / name, use_safetensors=True)
    booster.save_model(model, folder / "all", shard=True, use_safetensors=True)
    return losses


def config_in(file: Path) -> dict[str, Any]:
    config = json.loads(file.read_text())
    return config | {"target_modules": sorted(config["target_modules"])}  # peft writes a set, in any order


@pytest.mark.parametrize(
    "plugin", ["pp2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tp2", "tp2 pp2", "pp2 zero1"))]
)
def test_adapters_switch_as_in_one_process(plugin: str, tmp_path: Path) -> None:
    expected = train("none", tmp_path / "alone")
    found = run_processes(train, 4 if plugin == "tp2 pp2" else 2, plugin, tmp_path / "sharded")
    torch.testing.assert_close(torch.tensor(found), torch.tensor([expected] * len(found)))
    files = [path.relative_to(tmp_path / "alone") for path in (tmp_path / "alone").rglob("adapter_*")]
    assert len(files) == 6  # of each adapter, and of the one that was active when the model was saved
    for file in files:
        if file.suffix == ".json":
            assert config_in(tmp_path / "sharded" / file) == config_in(tmp_path / "alone" / file)
            continue
        values = load_file(tmp_path / "alone" / file)
        torch.testing.assert_close(load_file(tmp_path / "sharded" / file), values, rtol=1e-9, atol=1e-12)


def refused() -> None:
    model, *_ = Booster(device="cpu", plugin=PLUGINS["pp2"]()).boost(adapted())
    switched: Any = model.unwrap(unwrap_peft=False)
    with pytest.raises(UnsupportedError, match=r"unwrap\(\)\.disable_adapter\(\), a context; or save it by"):
        switched.unload()
    with pytest.raises(AttributeError, match=r"use model\.unwrap\(\)\.set_adapter"):
        _ = model.set_adapter
    with pytest.raises(AttributeError, match="use add_adapter of the model before it is boosted"):
        switched.add_adapter("third", peft.LoraConfig(**LORA))
    with pytest.raises(ValueError, match="third"):
        switched.set_adapter("third")
    assert (switched.active_adapter, [*switched.peft_config]) == ("default", ["default", "other"])


def test_what_takes_the_full_model_is_refused() -> None:
    run_processes(refused, 2)
