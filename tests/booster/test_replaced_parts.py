# pyright: reportArgumentType=false
"""Hooks and attributes of parameters and modules survive where a plugin puts others in their place, or are refused."""

from typing import Any

import pytest
import torch
from plugins import plugins
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from colossal.booster import Booster
from colossal.errors import ColossalError, PlanError, UnsupportedError
from colossal.testing import run_processes

PLUGINS = plugins("DDP", "ZeRO-1", "ZeRO-2", "FSDP", "Gemini", "tp2") | {
    "hybrid": plugins("Hybrid")["Hybrid"],
    "Gemini tp2": plugins("Gemini, tp2")["Gemini, tp2"],
}
REFUSE = ("FSDP", "tp2", "Gemini tp2")
IDS = torch.arange(32).view(2, 16)
MASK = (torch.arange(32) >= 24).float()[:, None]


def build() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    return LlamaForCausalLM(config)


def boost(plugin: str, model: Any) -> tuple[Booster, Any, Any]:
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return booster, boosted, optimizer


def train_with_gradient_hook(plugin: str, kind: str) -> Any:
    """Train only some rows of the embedding, by a hook; return how far the others moved, or the error."""
    model = build()
    weight: Any = model.model.embed_tokens.weight
    start = weight.detach().clone()
    if kind == "gradient":
        weight.register_hook(lambda grad: grad * MASK)
    else:
        weight.register_post_accumulate_grad_hook(lambda param: (param.grad.mul_(MASK), None)[1])
    try:
        booster, boosted, optimizer = boost(plugin, model)
    except UnsupportedError as error:
        return str(error)
    booster.backward(boosted(input_ids=IDS, labels=IDS).loss, optimizer)
    optimizer.step()
    moved = (boosted.state_dict(only_rank_0=False)["model.embed_tokens.weight"] - start).abs().amax(1)
    return bool((moved[:24] == 0).all()), bool((moved[24:] > 0).any())


def forward_with_module_hooks(plugin: str) -> dict[str, Any]:
    """Put hooks and attributes on modules, and one on a parameter; remove one hook after boost."""
    model, calls = build(), []
    mlp: Any = model.model.layers[0].mlp
    mlp.up_proj.register_forward_hook(lambda *_: calls.append("up"))
    mlp.down_proj.register_forward_hook(lambda _module, _args, output: output * 2)
    mlp.down_proj.register_forward_pre_hook(lambda _module, _args, _kwargs: calls.append("down"), with_kwargs=True)
    mlp.gate_proj.register_full_backward_hook(lambda *_: calls.append("gate"))
    handle = mlp.up_proj.register_forward_hook(lambda *_: calls.append("removed"))
    mlp.up_proj.part = "own"
    mlp.up_proj.weight.part = "own"
    mlp.up_proj.weight._no_weight_decay = True
    booster, boosted, optimizer = boost(plugin, model)
    handle.remove()
    loss = boosted(input_ids=IDS, labels=IDS).loss
    booster.backward(loss, optimizer)
    new: Any = boosted.unwrap().model.layers[0].mlp.up_proj
    tags = [getattr(each, "part", None) for each in (new, new.weight)]
    return {"calls": calls, "loss": loss.item(), "tags": [*tags, getattr(new.weight, "_no_weight_decay", None)]}


def replace_forward(plugin: str) -> str | None:
    model = build()
    layer: nn.Module = model.model.layers[0].mlp.up_proj
    layer.forward = lambda x: nn.functional.linear(x, layer.weight * 2)  # type: ignore[method-assign]
    try:
        boost(plugin, model)
    except ColossalError as error:
        return f"{type(error).__name__}: {error}"
    return None


def run_all(_: None) -> dict[str, Any]:
    return {
        "hooks": {
            (name, kind): train_with_gradient_hook(name, kind) for name in PLUGINS for kind in ("gradient", "sum")
        },
        "modules": {name: forward_with_module_hooks(name) for name in PLUGINS if name != "Gemini"},
        "forward": {name: replace_forward(name) for name in ("tp2", "DDP")},
    }


def test_what_hangs_on_parameters_and_modules_survives_or_is_refused() -> None:
    single = build()
    single.model.layers[0].mlp.down_proj.register_forward_hook(lambda _module, _args, output: output * 2)
    loss = single(input_ids=IDS, labels=IDS).loss.item()
    for rank in run_processes(run_all, 2, None):
        for (name, kind), found in rank["hooks"].items():
            if name in REFUSE:
                assert "embed_tokens.weight" in found, (name, kind)
                assert "TorchDDPPlugin" in found
            else:
                assert found == (True, True), (name, kind)
        for name, found in rank["modules"].items():
            assert found["calls"] == ["up", "down", "gate"], name
            assert found["loss"] == pytest.approx(loss, abs=1e-5), name
            assert found["tags"] == ["own", "own", True], name
        assert rank["forward"]["DDP"] is None
        assert PlanError.__name__ in rank["forward"]["tp2"]
        assert "forward method of" in rank["forward"]["tp2"]
