# pyright: reportArgumentType=false
"""Adapters on N ranks train like adapters that peft alone trains in one process."""

from typing import Any

import peft
import pytest
import torch
import transformers
from digits import digits
from equality import assert_equal
from torch import distributed as dist
from torch import nn

from colossal._src.testing.processes import PRELOADED
from colossal.booster import Booster
from colossal.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossal.testing import TOLERANCES, assert_close, assert_same_on_all_ranks, run_processes

PRELOADED.extend(["peft", "transformers.models.gpt2.modeling_gpt2"])

GLOBAL_BATCH = 48
STEPS = 6
PLUGINS = {"none": lambda: None, "ddp": TorchDDPPlugin, "fsdp": TorchFSDPPlugin}
PRECISIONS = {None: torch.float64, "bf16": torch.bfloat16}


def make_optimizer(parameters: Any, precision: str | None) -> torch.optim.Optimizer:
    """Adam makes the rounding of a tiny gradient as large as a step: it trains in float64, and SGD in bfloat16."""
    return torch.optim.AdamW(parameters, lr=0.01) if precision is None else torch.optim.SGD(parameters, lr=0.5)


class Classifier(nn.Module):
    """A plain module: nothing that transformers knows."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(512, 32), nn.Tanh())
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images.view(-1, 1, 8, 8)))


class Reader(nn.Module):
    """A small GPT-2 that reads an image as a text of 64 characters and says the digit."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            vocab_size=17,
            n_positions=64,
            n_embd=16,
            n_layer=2,
            n_head=2,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.gpt = transformers.GPT2Model(config)
        self.gpt.set_attn_implementation("eager")
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.gpt((images * 16).long()).last_hidden_state[:, -1])


MODELS = {
    "plain": (Classifier, {"r": 4, "target_modules": ["0", "3", "head"]}),
    "gpt2, dora, whole head": (
        Reader,
        {
            "r": 2,
            "target_modules": ["c_attn", "c_fc"],
            "modules_to_save": ["head"],
            "use_dora": True,
            "fan_in_fan_out": True,
        },
    ),
}


def samples_of(step: int, precision: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = digits()
    part = slice(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
    return torch.tensor(images[part], dtype=weights_of(precision)) / 16, torch.tensor(labels[part])


def weights_of(precision: str | None) -> torch.dtype:
    return torch.float64 if precision is None else torch.float32


def build(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    kind, keywords = MODELS[name]
    torch.manual_seed(5)
    model = kind().to(dtype)
    torch.manual_seed(8)
    return model, peft.LoraConfig(**keywords)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of a tensor, of which this rank may hold a shard only."""
    tensor = tensor.detach()
    return getattr(tensor, "full_tensor", tensor.clone)()


def by_hand(name: str, precision: str | None) -> dict[str, Any]:
    """Train adapters in one process by peft and torch alone."""
    model, config = build(name, weights_of(precision))
    model = peft.get_peft_model(model, config)
    optimizer = make_optimizer(trained(model).values(), precision)
    losses, gradients = [], []
    begin = {key: whole(value) for key, value in trained(model).items()}
    for step in range(STEPS):
        images, labels = samples_of(step, precision)
        with torch.autocast("cpu", PRECISIONS[precision], enabled=precision is not None):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        losses.append(loss.detach())
        gradients.append({key: value.grad.clone() for key, value in trained(model).items()})
        optimizer.step()
        optimizer.zero_grad()
    end = {key: whole(value) for key, value in trained(model).items()}
    return {"losses": torch.stack(losses), "gradients": gradients, "begin": begin, "end": end}


def by_booster(plugin: str, name: str, precision: str | None) -> dict[str, Any]:
    """Train the same adapters by a Booster on this rank's part of each batch, from generators that stand apart."""
    booster = Booster(device="cpu", plugin=PLUGINS[plugin](), mixed_precision=precision)
    model, config = build(name, weights_of(precision))
    if plugin != "none":
        torch.manual_seed(8 + dist.get_rank())
    model = booster.enable_lora(model, lora_config=config)
    frozen = {key: value.clone() for key, value in model.named_parameters() if not value.requires_grad}
    begin = {key: value.detach().clone() for key, value in trained(model).items()}
    optimizer = make_optimizer(model.parameters(), precision)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.CrossEntropyLoss())
    adapted = model.unwrap(unwrap_peft=False)
    assert {id(parameter) for parameter in optimizer.parameters} == {id(value) for value in trained(adapted).values()}
    rank, size = booster.plugin.data_parallel_rank_and_size()
    losses, gradients = [], []
    for step in range(STEPS):
        images, labels = (part.chunk(size)[rank] for part in samples_of(step, precision))
        loss = criterion(model(images), labels)
        booster.backward(loss, optimizer)
        losses.append(loss.detach())
        gradients.append({key: whole(value.grad) for key, value in trained(adapted).items()})
        optimizer.step()
        optimizer.zero_grad()
    now = {key: whole(value) for key, value in adapted.named_parameters()}
    for value in now.values():
        if size > 1:
            assert_same_on_all_ranks(value)
    assert all(torch.equal(now[key], value) for key, value in frozen.items()), "a frozen weight moved"
    end = {key: now[key] for key in begin}
    return {"losses": torch.stack(losses), "gradients": gradients, "begin": begin, "end": end}


def train_all(plugin: str) -> dict[tuple[str, str | None], dict[str, Any]]:
    return {(name, precision): by_booster(plugin, name, precision) for name in MODELS for precision in PRECISIONS}


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, str | None], dict[str, Any]]:
    return {(name, precision): by_hand(name, precision) for name in MODELS for precision in PRECISIONS}


@pytest.mark.parametrize(
    ("plugin", "size"),
    [
        ("none", 1),
        *(pytest.param(each, 2, marks=pytest.mark.slow if each == "ddp" else ()) for each in PLUGINS if each != "none"),
        *(pytest.param(plugin, n, marks=pytest.mark.slow) for plugin in PLUGINS if plugin != "none" for n in (1, 4)),
    ],
)
def test_adapters_train_as_by_hand(plugin, size, expected) -> None:
    ranks = run_processes(train_all, size, plugin)
    for case, wanted in expected.items():
        compare([rank[case] for rank in ranks], wanted, PRECISIONS[case[1]], f"{case}, {size} ranks")


def compare(ranks: list[dict[str, Any]], wanted: dict[str, Any], dtype: torch.dtype, name: str) -> None:
    def close(actual: torch.Tensor, value: torch.Tensor, what: str) -> None:
        if dtype == torch.float64:
            assert_equal(actual, value, f"{name}: {what}")
        else:
            assert_close(actual, value, f"{name}: {what}", rtol=TOLERANCES[dtype].rtol, atol=TOLERANCES[dtype].atol)

    close(torch.stack([rank["losses"] for rank in ranks]).mean(0), wanted["losses"], "losses")
    for rank in ranks:
        assert rank["begin"].keys() == wanted["begin"].keys()
        assert all(torch.equal(rank["begin"][key], value) for key, value in wanted["begin"].items()), f"{name}: begin"
        for step, gradients in enumerate(wanted["gradients"]):
            for key, value in gradients.items():
                close(rank["gradients"][step][key], value, f"gradient of {key} in step {step}")
        for key, value in wanted["end"].items():
            close(rank["end"][key], value, key)


@pytest.mark.parametrize("name", MODELS)
def test_adapters_learn(name, expected) -> None:
    run = expected[name, None]
    assert run["losses"][-1] < run["losses"][0] - 0.02
    moved = [not torch.equal(run["begin"][key], run["end"][key]) for key in run["end"]]
    assert all(moved)


def adapters_of_seeds(share: bool) -> tuple[dict[str, torch.Tensor], float]:
    """Draw adapters from a seed of this rank's own; return them, and what the generator draws next."""
    model, config = build("plain")
    torch.manual_seed(100 + dist.get_rank())
    model = Booster(device="cpu", plugin=TorchDDPPlugin() if share else None).enable_lora(model, lora_config=config)
    return {key: value.detach() for key, value in trained(model).items()}, torch.rand(()).item()


def test_all_ranks_draw_what_the_first_one_draws_and_keep_their_own_generators() -> None:
    (first, _), (apart, _) = run_processes(adapters_of_seeds, 2, share=False)
    assert not all(torch.equal(first[key], apart[key]) for key in first), "seeds make no difference here"
    (zero, after_zero), (one, after_one) = run_processes(adapters_of_seeds, 2, share=True)
    assert all(torch.equal(first[key], zero[key]) and torch.equal(first[key], one[key]) for key in first)
    model, config = build("plain")
    torch.manual_seed(100)
    peft.get_peft_model(model, config)
    assert after_zero == torch.rand(()).item(), "the first rank goes on as peft alone would"
    assert after_one == torch.rand((), generator=torch.Generator().manual_seed(101)).item()


@pytest.mark.parametrize("precision", ["fp16", "fp16_naive", "fp8"])
def test_adapters_learn_in_every_precision(precision, tmp_path) -> None:
    booster = Booster(device="cpu", mixed_precision=precision)
    model, config = build("plain")
    model = booster.enable_lora(model, lora_config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.CrossEntropyLoss())
    adapted = model.unwrap(unwrap_peft=False)
    frozen = {key: value.clone() for key, value in adapted.named_parameters() if not value.requires_grad}
    assert len(optimizer.parameters) == 6
    images, labels = samples_of(0, precision)
    images = images.half() if precision == "fp16_naive" else images
    losses = []
    for _ in range(STEPS):
        loss = criterion(model(images), labels)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    now = dict(adapted.named_parameters())
    assert all(torch.equal(now[key], value) for key, value in frozen.items())
    booster.save_lora_as_pretrained(model, tmp_path, use_safetensors=True)
    alone = peft.PeftModel.from_pretrained(build("plain")[0], tmp_path)
    own, theirs = (
        {key: value for key, value in each.state_dict().items() if "lora_" in key} for each in (adapted, alone)
    )
    assert own.keys() == theirs.keys()
    assert all(torch.equal(theirs[key], value.float()) for key, value in own.items())
