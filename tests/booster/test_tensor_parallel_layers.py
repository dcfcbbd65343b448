"""Tensor-parallel layers of `colossal.nn` under every plugin: clipping, overflow and steps equal one process."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from equality import assert_equal

from colossal import nn
from colossal.booster import Booster
from colossal.booster.mixed_precision import FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from colossal.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import UnsupportedError
from colossal.nn.layer import ParallelLayer
from colossal.tensor import resting_part, shard, whole_of
from colossal.testing import fake_world, run_threads

BATCH, WIDTH, CLASSES, STEPS, LARGE = 8, 8, 6, 3, 8
MESHES: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp3": {"tp": 3},
    "dp2 x tp2": {"dp": 2, "tp": 2},
    "2d": {"tp": 4, "tp_mode": "2d"},
    "dp2 x 2d": {"dp": 2, "tp": 4, "tp_mode": "2d"},
    "2.5d": {"tp": 8, "tp_mode": "2.5d", "tp_depth": 2},
    "3d": {"tp": 8, "tp_mode": "3d"},
}
CHUNKS = {size: {"chunk_size": 99} for size in (1, 2)}
PLUGINS: dict[str, Callable[..., Any]] = {
    "none": lambda **_: None,
    "DDP": lambda **_: TorchDDPPlugin(),
    "ZeRO-1": LowLevelZeroPlugin,
    "ZeRO-2": partial(LowLevelZeroPlugin, stage=2, reduce_bucket_size_in_m=0.0001),
    "Gemini": partial(GeminiPlugin, chunk_config_dict=CHUNKS),
}
CASES = [
    (name, plugin)
    for name, mesh in MESHES.items()
    for plugin in PLUGINS
    if plugin != "none" or "dp" not in mesh  # without a plugin nothing averages gradients
]
IN_STEP = "norm, in the step"
CLIPS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda optimizer: optimizer.clip_grad_by_norm(0.05),
    "value": lambda optimizer: optimizer.clip_grad_by_value(0.002),
    "largest": lambda optimizer: optimizer.clip_grad_by_norm(0.01, norm_type=float("inf")),
    "sum of magnitudes": lambda optimizer: optimizer.clip_grad_by_norm(0.1, norm_type=1.0),
    IN_STEP: lambda _optimizer: None,
}


class Net(torch.nn.Module):
    """Sharded matrices and biases, and replicated ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.VocabParallelEmbedding(17, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.outer = nn.Linear(3 * WIDTH, WIDTH)
        self.classify = nn.Classifier(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        x = x + self.outer(torch.nn.functional.gelu(self.inner(self.norm(x))))
        return self.classify(x)


DRAWS = torch.Generator().manual_seed(3)
INITIAL = {
    name: 0.5 * torch.randn(parameter.shape, generator=DRAWS, dtype=torch.float64)
    for name, parameter in Net().named_parameters()
}
"""The full parameters; ranks that are threads of one process cannot draw the same numbers."""


def build(dtype: torch.dtype, mesh: ParallelMesh) -> Net:
    model = Net()
    with torch.no_grad():
        for prefix, layer in model.named_children():
            assert isinstance(layer, ParallelLayer)
            for name, layout in layer.layouts.items():
                layer.get_parameter(name).copy_(shard(INITIAL[f"{prefix}.{name}"], layout, mesh.global_rank))
    return model.to(dtype)


def batch_of(step: int, mesh: ParallelMesh) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank gets of its data-parallel share of a batch."""
    draws = torch.Generator().manual_seed(step)
    tokens = torch.randint(17, (BATCH, 4), generator=draws)
    labels = torch.randint(CLASSES, (BATCH, 4), generator=draws)
    tokens, labels = (each.chunk(mesh.size("dp"))[mesh.rank("dp")] for each in (tokens, labels))
    return nn.split_input(tokens), nn.split_input(labels)


def boost(plugin: Any, dtype: torch.dtype, mesh: ParallelMesh, precision: Any = None) -> tuple[Booster, Any, Any, Any]:
    booster, model = Booster(device="cpu", plugin=plugin, mixed_precision=precision), build(dtype, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.CrossEntropyLoss())
    return booster, model, optimizer, criterion


def values(model: Any) -> dict[str, torch.Tensor]:
    """The full parameters."""
    return {
        name: whole_of(resting_part(parameter)).detach().clone()
        for name, parameter in model.unwrap().named_parameters()
    }


def train(mesh: ParallelMesh, plugin: str, clip: str) -> dict[str, Any]:
    """Losses, norms before and after clipping, and the full parameters after some steps."""
    clips_in_step = clip == IN_STEP and plugin not in {"none", "DDP"}
    clip_now = CLIPS["norm" if clip == IN_STEP and not clips_in_step else clip]
    options = {"max_norm": 0.05} if clips_in_step else {}
    booster, model, optimizer, criterion = boost(PLUGINS[plugin](precision="fp32", **options), torch.float64, mesh)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, labels = batch_of(step, mesh)
        loss = criterion(model(tokens), labels)
        booster.backward(loss, optimizer)
        norms.append(optimizer.get_grad_norm())
        clip_now(optimizer)
        if clip != IN_STEP:
            norms.append(optimizer.get_grad_norm(float("inf")))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "norms": torch.tensor(norms, dtype=torch.float64),
        "values": values(model),
    }


def clips_of(name: str) -> list[str]:
    """With 8 ranks on few cores two are enough."""
    return list(CLIPS)[: 2 if size_of(name) == LARGE else None]


def train_all(name: str, plugin: str) -> dict[str, Any]:
    with ParallelMesh(**MESHES[name]) as mesh:
        return {clip: train(mesh, plugin, clip) for clip in clips_of(name)}


@cache
def alone(clip: str) -> dict[str, Any]:
    return run_threads(lambda: train(ParallelMesh(), "none", clip), 1)[0]


def size_of(name: str) -> int:
    return MESHES[name].get("dp", 1) * MESHES[name]["tp"]


@pytest.mark.parametrize(("name", "plugin"), CASES)
def test_clipped_steps_equal_those_of_one_process(name: str, plugin: str) -> None:
    ranks = run_threads(train_all, size_of(name), name, plugin)
    for clip in clips_of(name):
        expected, found = alone(clip), [rank[clip] for rank in ranks]
        losses = torch.stack([each["losses"] for each in found]).mean(0)
        for each in found:
            pairs = {"losses": (losses, expected["losses"]), "norms": (each["norms"], expected["norms"])}
            assert each["values"].keys() == expected["values"].keys()
            pairs |= {key: (each["values"][key], value) for key, value in expected["values"].items()}
            for key, (actual, wanted) in pairs.items():
                assert_equal(actual, wanted, f"{name}, {plugin}, {clip}: {key}")


def test_every_clip_takes_effect() -> None:
    whole = alone("norm")["norms"].view(STEPS, 2)[0]
    for clip in CLIPS:
        if clip != IN_STEP:
            _, largest = alone(clip)["norms"].view(STEPS, 2)[0]
            assert largest < whole[0] / 2


# --------------------------------------------------------------------------------------------------------- overflow


SCALE = 8.0
HALF: dict[str, Callable[[], tuple[Any, Any]]] = {
    "none": lambda: (None, FP16TorchMixedPrecision(init_scale=SCALE)),
    "DDP": lambda: (TorchDDPPlugin(), FP16TorchMixedPrecision(init_scale=SCALE)),
    "DDP, float32 copies": lambda: (TorchDDPPlugin(), FP16NaiveMixedPrecision(initial_scale=SCALE, hysteresis=1)),
    "ZeRO-1": lambda: (LowLevelZeroPlugin(precision="fp16", initial_scale=SCALE, hysteresis=1), None),
    "ZeRO-2": lambda: (LowLevelZeroPlugin(stage=2, precision="fp16", initial_scale=SCALE, hysteresis=1), None),
    "ZeRO-1, clips": lambda: (
        LowLevelZeroPlugin(precision="fp16", initial_scale=SCALE, hysteresis=1, max_norm=1.0),
        None,
    ),
    "Gemini": lambda: (
        GeminiPlugin(precision="fp16", initial_scale=SCALE, hysteresis=1, chunk_config_dict=CHUNKS),
        None,
    ),
}


def overflow_on_the_last_rank(name: str, plugin: str) -> list[tuple[bool, float, bool]]:
    """Let one shard of one gradient overflow in the second of three steps."""
    with ParallelMesh(**MESHES[name]) as mesh:
        chosen, precision = HALF[plugin]()
        booster, model, optimizer, criterion = boost(chosen, torch.float32, mesh, precision)
        is_last = mesh.rank("tp") == mesh.size("tp") - 1 and mesh.rank("dp") == 0
        overflows, seen, before = [False], [], values(model)
        weight = model.unwrap().inner.weight
        weight.register_hook(lambda grad: grad * torch.inf if overflows[0] else None)
        for step in range(STEPS):
            overflows[0] = is_last and step == 1
            tokens, labels = batch_of(step, mesh)
            booster.backward(criterion(model(tokens), labels), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            after = values(model)
            moved = any(not torch.equal(after[key], value) for key, value in before.items())
            seen.append((optimizer.scaler.dropped, optimizer.scaler.scale_value, moved))
            before = after
        return seen


@pytest.mark.parametrize("plugin", HALF)
@pytest.mark.parametrize("name", ["tp2", "dp2 x tp2", "2d", "3d"])
def test_an_overflow_in_one_shard_skips_the_step_on_all_ranks(name: str, plugin: str) -> None:
    if plugin == "none" and "dp" in MESHES[name]:
        name = "tp3"
    expected = [(False, SCALE, True), (True, SCALE / 2, False), (False, SCALE / 2, True)]
    assert run_threads(overflow_on_the_last_rank, size_of(name), name, plugin) == [expected] * size_of(name)


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon])
def test_optimizers_that_need_full_parameters_are_refused(kind: Any, plugin: str) -> None:
    with fake_world(2), ParallelMesh(tp=2):
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        booster = Booster(device="cpu", plugin=PLUGINS[plugin](precision="fp32"))
        with pytest.raises(UnsupportedError, match=kind.__name__):
            booster.boost(model, kind(model.parameters(), lr=0.1))


def test_fsdp_refuses_what_is_sharded_already() -> None:
    with fake_world(4), ParallelMesh(dp=2, tp=2):
        booster = Booster(device="cpu", plugin=TorchFSDPPlugin())
        with pytest.raises(UnsupportedError, match=r"Found table\.weight.*LowLevelZeroPlugin"):
            booster.boost(Net())
