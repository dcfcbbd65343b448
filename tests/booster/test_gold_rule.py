# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""Same seed, same data: N ranks equal one process, in loss, gradients and parameters after several steps.

Training in float64 leaves rounding no room; what runs in half precision may differ by what rounding does to one process
(see `equality`).
"""

import re
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from digits import digits
from equality import assert_equal, assert_within_rounding
from plugins import plugins
from torch import distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from colossal._src.tensor import backing_shard
from colossal.booster import Booster
from colossal.booster.mixed_precision import FP16TorchMixedPrecision
from colossal.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from colossal.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossal.tensor import full_tensor_of
from colossal.testing import assert_same_on_all_ranks, run_processes

GLOBAL_BATCH = 36
STEPS = 6
LR = {"AdamW": 0.01, "SGD": 1.0}
PLUGINS = plugins("DDP", "FSDP", "ZeRO-1") | {
    "ZeRO-2": partial(LowLevelZeroPlugin, stage=2, precision="fp32", reduce_bucket_size_in_m=0.002),
    "Gemini": partial(GeminiPlugin, precision="fp32", chunk_config_dict={n: {"chunk_size": 3000} for n in (1, 2, 3)}),
}
WITH_PRECISIONS = ("DDP", "FSDP")
VOCABULARY, TOKENS = 31, 9


@dataclass(frozen=True)
class Recipe:
    """What a training run does besides a plain step; `options` are keywords of the plugins that run it.

    With a `precision` the model is in float32, as `dtype` rounds; without one everything is in float64.
    """

    accumulate: int = 1
    max_norm: float | None = None
    clip_value: float | None = None
    precision: Any = None
    dtype: torch.dtype = torch.float64
    optimizer: str = "AdamW"
    groups: bool = False
    model: str = "digits"
    plugins: tuple[str, ...] = tuple(PLUGINS)
    options: dict[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------- what is trained


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.factor * torch.tanh(self.inner(x))


class Odd(nn.Module):
    """Lengths that no number of ranks divides, a scalar, a frozen layer, and a block that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 7)
        shared = Block()
        self.blocks = nn.ModuleList([Block(), shared, Block(), shared])
        self.frozen = nn.Linear(7, 5).requires_grad_(False)
        self.head = nn.Linear(5, 10, bias=False)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.embed(images.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x)) / self.temperature


class Logits(nn.Module):
    """A language model whose output is the logits, (batch x tokens, vocabulary)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits.flatten(0, 1)


def language_model(family: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    common: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    if family == "gpt2":
        off: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return Logits(GPT2LMHeadModel(GPT2Config(n_positions=TOKENS, n_embd=24, n_layer=2, n_head=3, **common, **off)))
    heads: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True}
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**common, **heads, **sizes))
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, LlamaRMSNorm):  # which computes in float32 whatever the model is in
                setattr(module, name, nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon))
    return Logits(model)


def digits_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)
    )


def build_model(recipe: Recipe) -> nn.Module:
    torch.manual_seed(11)
    kinds = {"odd": Odd, "digits": digits_model}
    model = kinds[recipe.model]() if recipe.model in kinds else language_model(recipe.model)
    return model.double() if recipe.precision is None else model


def dataset_for(recipe: Recipe) -> TensorDataset:
    name = recipe.model
    if name in {"gpt2", "llama"}:
        draw = torch.randint(VOCABULARY, (GLOBAL_BATCH * STEPS, TOKENS + 1), generator=torch.Generator().manual_seed(3))
        return TensorDataset(draw[:, :-1], draw[:, 1:] // 4)  # predictable from nothing, but more often small
    images, labels = digits()
    dtype = torch.float64 if recipe.precision is None else torch.float32
    return TensorDataset(torch.tensor(images, dtype=dtype).view(-1, 1, 8, 8) / 16, torch.tensor(labels))


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    kind, lr = getattr(torch.optim, recipe.optimizer), LR[recipe.optimizer]
    if not recipe.groups:
        return kind(model.parameters(), lr=lr)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return kind(
        [
            {"params": matrices[:1], "lr": lr / 2, "weight_decay": 0.1},
            {"params": vectors, "lr": lr * 2, "weight_decay": 0.0},
            {"params": matrices[1:]},
        ],
        lr=lr,
    )


# ------------------------------------------------------------------------------------------------- how it is trained


def train(recipe: Recipe, world_size: int, plugin: str | None) -> dict[str, Any]:
    """Train for a few steps on this rank's part of the data and return what must not depend on the world."""
    booster = Booster(
        device="cpu", plugin=plugin and PLUGINS[plugin](**recipe.options), mixed_precision=recipe.precision
    )
    model = build_model(recipe)
    optimizer = build_optimizer(model, recipe)
    schedule = CosineAnnealingWarmupLR(optimizer, total_steps=STEPS, warmup_steps=2)
    batch = GLOBAL_BATCH // world_size // recipe.accumulate
    loader = booster.plugin.prepare_dataloader(dataset_for(recipe), batch, shuffle=True, drop_last=True)
    model, optimizer, criterion, loader, schedule = booster.boost(
        model, optimizer, nn.CrossEntropyLoss(), loader, schedule
    )
    batches = iter(loader)
    losses, gradients, norms = [], [], []
    for _ in range(STEPS):
        losses.append(step(booster, model, optimizer, criterion, batches, recipe))
        if recipe.max_norm is not None:
            norms.append(optimizer.clip_grad_by_norm(recipe.max_norm).item())
        if recipe.clip_value is not None:
            optimizer.clip_grad_by_value(recipe.clip_value)
        optimizer.unscale_grad()
        norms.append(optimizer.get_grad_norm(float("inf")))
        gradients.append(gradients_of(model, optimizer))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    parameters = {
        name: full_tensor_of(backing_shard(parameter)).detach().clone()
        for name, parameter in model.unwrap().named_parameters()
    }
    if plugin:
        for parameter in parameters.values():
            assert_same_on_all_ranks(parameter)
    return {
        "losses": torch.stack(losses),
        "gradients": gradients,
        "norms": torch.tensor(norms, dtype=torch.float64),
        "parameters": parameters,
        "scale": optimizer.scaler.scale_value,
    }


def gradients_of(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """Every gradient, put together where ranks share it, in the order of the model's parameters."""
    masters = {working: master for master, working in optimizer.masters.pairs.items()} if optimizer.masters else {}
    return [
        full_tensor_of(masters.get(parameter, parameter).grad).detach().clone()
        for parameter in model.parameters()
        if parameter.requires_grad
    ]


def step(booster, model, optimizer, criterion, batches, recipe: Recipe) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for micro in range(recipe.accumulate):
        inputs, labels = next(batches)
        if micro < recipe.accumulate - 1:
            shares_gradients = optimizer.masters is not None and not optimizer.masters.buckets[0].keeps_gradients
            with nullcontext() if shares_gradients else booster.no_sync(model):
                loss = criterion(model(inputs), labels.flatten()) / recipe.accumulate
                booster.backward(loss, optimizer)
        else:
            loss = criterion(model(inputs), labels.flatten()) / recipe.accumulate
            booster.backward(loss, optimizer)
        total += loss.detach()
    return total


def wrap_linear(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or (isinstance(module, nn.Linear) and nonwrapped_numel > 0)


def policies() -> dict[str, Any]:
    from torch.distributed.fsdp import wrap

    return {
        "classes": wrap.ModuleWrapPolicy({nn.Linear, nn.Conv2d}),
        "custom": wrap.CustomPolicy(lambda module: isinstance(module, nn.Linear)),
        "size": partial(wrap.size_based_auto_wrap_policy, min_num_params=500),
        "blocks": partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block, nn.Embedding}),
        "lambda": partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block)),
        "own": wrap_linear,
    }


def sharded(**options: Any) -> dict[str, Any]:
    return {"plugins": ("FSDP",), "options": options}


HALF = {"optimizer": "SGD", "plugins": WITH_PRECISIONS}
RECIPES = {
    "plain": Recipe(),
    "SGD": Recipe(optimizer="SGD"),
    "several groups": Recipe(groups=True),
    "accumulation": Recipe(accumulate=3),
    "clip by norm": Recipe(max_norm=0.5),
    "clip by value": Recipe(clip_value=0.01),
    "accumulation and clip": Recipe(accumulate=2, max_norm=0.5, clip_value=0.05),
    "bucket views, small buckets": Recipe(
        plugins=("DDP",), options={"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}
    ),
    "static graph": Recipe(plugins=("DDP",), options={"static_graph": True, "find_unused_parameters": False}),
    "bf16": Recipe(precision="bf16", dtype=torch.bfloat16, **HALF),
    "bf16, accumulation, clip": Recipe(accumulate=2, max_norm=0.5, precision="bf16", dtype=torch.bfloat16, **HALF),
    "fp16, clip": Recipe(
        precision=FP16TorchMixedPrecision(init_scale=2.0**10), dtype=torch.float16, max_norm=0.5, **HALF
    ),
    "parameters kept for the backward pass": Recipe(
        accumulate=2, max_norm=0.5, **sharded(sharding_strategy="SHARD_GRAD_OP")
    ),
    **{
        f"units by {name}": Recipe(max_norm=0.5, **sharded(auto_wrap_policy=policy))
        for name, policy in policies().items()
    },
    "odd shapes": Recipe(model="odd", max_norm=0.5, optimizer="SGD"),
    "odd shapes, groups, accumulation, value": Recipe(model="odd", groups=True, accumulate=2, clip_value=0.01),
    "odd shapes, units inside of units": Recipe(
        model="odd", max_norm=0.5, **sharded(auto_wrap_policy=policies()["own"])
    ),
    "Llama with tied embeddings": Recipe(model="llama", max_norm=0.5),
    "GPT-2 with tied embeddings": Recipe(model="gpt2", accumulate=2, max_norm=0.5, groups=True),
    "tied embeddings torn by a policy": Recipe(
        model="llama", max_norm=0.5, **sharded(auto_wrap_policy=policies()["blocks"])
    ),
}
OTHERS = (  # are slow: what they do is part of another recipe as well
    "SGD",
    "several groups",
    "accumulation",
    "clip by norm",
    "bf16",
    *(f"units by {name}" for name in ("custom", "size", "lambda", "own")),
)
MAIN = tuple(name for name in RECIPES if name not in OTHERS)
NAMES = {plugin: [name for name, recipe in RECIPES.items() if plugin in recipe.plugins] for plugin in PLUGINS}


def train_some(plugin: str | None, names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: train(RECIPES[name], dist.get_world_size(), plugin) for name in names}


def train_exactly(names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: train(replace(RECIPES[name], precision=None, dtype=torch.float64), 1, None) for name in names}


@cache
def some_alone(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return run_processes(train_some, 1, None, list(names))[0]


def alone(name: str) -> dict[str, Any]:
    return some_alone(OTHERS if name in OTHERS else MAIN)[name]


@cache
def exactly() -> dict[str, dict[str, Any]]:
    half = [name for name, recipe in RECIPES.items() if recipe.precision is not None]
    return run_processes(train_exactly, 1, half)[0]


@cache
def world(plugin: str, size: int, others: bool) -> list[dict[str, dict[str, Any]]]:
    return run_processes(train_some, size, plugin, [name for name in NAMES[plugin] if (name in OTHERS) == others])


@pytest.mark.parametrize(
    ("plugin", "size", "name"),
    [
        pytest.param(plugin, size, name, marks=pytest.mark.slow if size != 2 or name in OTHERS else ())
        for plugin in PLUGINS
        for size in (1, 2, 3)
        for name in NAMES[plugin]
    ],
)
def test_any_number_of_ranks_trains_like_one(plugin: str, size: int, name: str) -> None:
    ranks = world(plugin, size, name in OTHERS)
    compare([rank[name] for rank in ranks], name, f"{name}, {plugin}, {size} ranks")


def compare(ranks: list[dict[str, Any]], name: str, at: str) -> None:
    expected = tensors(alone(name))
    exact = None if RECIPES[name].precision is None else tensors(exactly()[name])
    losses = torch.stack([rank["losses"] for rank in ranks]).mean(0)
    for rank in ranks:
        found = tensors(rank | {"losses": losses})
        assert found.keys() == expected.keys()
        for key, value in found.items():
            if exact is None:
                assert_equal(value, expected[key], f"{at}: {key}")
            else:
                assert_within_rounding(value, expected[key], exact[key], RECIPES[name].dtype, f"{at}: {key}")
        assert rank["scale"] == alone(name)["scale"]


def tensors(run: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Everything that a run must share with one process."""
    gradients = {
        f"gradient {index} of step {number}": gradient
        for number, step_ in enumerate(run["gradients"])
        for index, gradient in enumerate(step_)
    }
    return {"losses": run["losses"], "norms": run["norms"], **gradients, **run["parameters"]}


@pytest.mark.parametrize("names", [MAIN, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["main", "others"])
def test_a_missing_reduction_would_be_seen(names: tuple[str, ...]) -> None:
    ranks = run_processes(train_some, 2, None, list(names))
    for name in names:
        with pytest.raises(AssertionError, match=re.escape(name)):
            compare([rank[name] for rank in ranks], name, name)


@pytest.mark.parametrize("name", [*MAIN, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_the_loss_moves(name: str) -> None:
    losses = alone(name)["losses"]
    assert abs(losses[-1] - losses[0]) > 0.02 * losses.max()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_no_token_sees_a_later_one(family: str, plugin: str) -> None:
    for tied in run_processes(look_ahead, 2, family, plugin):
        assert tied


def look_ahead(family: str, plugin: str) -> bool:
    """Change the last token: the logits before it stay. Return whether embedding and head are still one."""
    model, *_ = Booster(device="cpu", plugin=PLUGINS[plugin]()).boost(build_model(Recipe(model=family)))
    tokens = torch.arange(TOKENS)[None]
    changed = tokens.clone()
    changed[0, -1] += 1
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:-1], after[:-1])
    assert not torch.equal(before[-1], after[-1])
    inner = model.unwrap().model
    return inner.get_input_embeddings().weight is inner.get_output_embeddings().weight
