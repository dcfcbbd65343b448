# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""The equality matrix: every mesh, with every plugin, with every way of clipping and every optimizer, is one process.

A cell is compared in its losses, every gradient, norms and parameters of three steps, in float64; what is replicated is
the same to the bit. A cell that a plugin does not support is refused with a reason.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chosen import ALL, crossed
from equality import assert_equal
from families import build as build_family
from families import inputs_of
from float64 import KeepFloat64

from colossal import nn
from colossal._src.booster.plugin.base import Plugin
from colossal._src.booster.plugin.single_process import SingleProcessPlugin
from colossal._src.cluster import AXES
from colossal._src.nn.layer import ParallelLayer
from colossal._src.tensor import backing_shard, copy_placement
from colossal.booster import Booster
from colossal.booster.mixed_precision import FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from colossal.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossal.cluster import ParallelMesh
from colossal.errors import UnsupportedError
from colossal.nn import optimizer as optimizers
from colossal.tensor import full_tensor_of, shard
from colossal.testing import fake_world, run_processes, run_threads

BATCH, WIDTH, CLASSES, STEPS = 8, 8, 6, 3
DEVICE = os.environ.get("COLOSSAL_DEVICE", "cpu")
"""What ``tests/device`` repeats some of the cells on is an accelerator."""

# ---------------------------------------------------------------------------------------------------------- the axes


WORLDS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "tp3": {"tp": 3},
    "dp2 x tp2": {"dp": 2, "tp": 2},
    "2d": {"tp": 4, "tp_mode": "2d"},
    "dp2 x 2d": {"dp": 2, "tp": 4, "tp_mode": "2d"},
    "2.5d": {"tp": 8, "tp_mode": "2.5d", "tp_depth": 2},
    "3d": {"tp": 8, "tp_mode": "3d"},
    "pp2 x 2d": {"pp": 2, "tp": 4, "tp_mode": "2d"},
    "pp2 x 2.5d": {"pp": 2, "tp": 8, "tp_mode": "2.5d", "tp_depth": 2},
    "pp2 x 3d": {"pp": 2, "tp": 8, "tp_mode": "3d"},
}
"""Meshes of models that are built of layers of `colossal.nn`."""

MANY_RANKS = ("pp2 x 2.5d", "pp2 x 3d")
"""16 processes, as threads send no messages: some of the ways, where every case is run (``nox -s exhaustive``)."""

SEQUENCES = {"enable_sequence_parallelism": True}
DIVIDED: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "sp2, split_gather": ({"tp": 2}, SEQUENCES | {"sequence_parallelism_mode": "split_gather"}),
    "sp2, ring": ({"tp": 2}, SEQUENCES | {"sequence_parallelism_mode": "ring"}),
    "sp2, all_to_all": ({"sp": 2}, SEQUENCES | {"sequence_parallelism_mode": "all_to_all"}),
    "sp2, ring_attn": ({"sp": 2}, SEQUENCES | {"sequence_parallelism_mode": "ring_attn"}),
    "pp2": ({"pp": 2}, {}),
    "pp2 x tp2": ({"pp": 2, "tp": 2}, {}),
    "pp2 x dp2": ({"pp": 2, "dp": 2}, {}),
    "ep2": ({"dp": 2}, {"ep_size": 2}),
    "tp2 x ep2": ({"tp": 2}, {"ep_size": 2}),
    "sp2 x ep2": ({"sp": 2}, SEQUENCES | {"sequence_parallelism_mode": "all_to_all", "ep_size": 2}),
    "dp4 x ep2": ({"dp": 4}, {"ep_size": 2}),
    "dp2 x tp2 x ep4": ({"dp": 2, "tp": 2}, {"ep_size": 4}),
    "pp2 x dp2 x ep2": ({"pp": 2, "dp": 2}, {"ep_size": 2}),
}
"""Meshes, and options of HybridParallelPlugin, of models of transformers that it divides."""

CHUNKED: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "Gemini, tp2": ({"tp": 2}, {}),
    "Gemini, tp2 x dp2": ({"tp": 2, "dp": 2}, {}),
    "Gemini, tp2 x dp2, from the host": ({"tp": 2, "dp": 2}, {"placement_policy": "cpu"}),
    "Gemini, sp2, split_gather": ({"tp": 2}, SEQUENCES),
}
"""Meshes, and options of GeminiPlugin, of models of transformers that it shards over tp and puts into chunks."""

WITH_CHUNKS = ("Gemini, tp2", "Gemini, tp2 x dp2", "Gemini, tp2 x dp2, from the host")
LONG = (*(name for name in DIVIDED if "ep" in name), "sp2, ring", *WITH_CHUNKS)
MOST_RANKS = 4
"""Cells that take long, and how many ranks those of the gate have."""

CHUNKS = {size: {"chunk_size": 99} for size in (1, 2)}


def hybrid(mesh: ParallelMesh, **options: Any) -> HybridParallelPlugin:
    sizes = {"tp_size": mesh.size("tp"), "pp_size": mesh.size("pp"), "sp_size": mesh.size("sp")}
    parts = {"num_microbatches": 2} if mesh.size("pp") > 1 else {}
    return HybridParallelPlugin(**sizes, **parts, **options)


def gemini(mesh: ParallelMesh, **options: Any) -> GeminiPlugin:
    return GeminiPlugin(tp_size=mesh.size("tp"), chunk_config_dict={n: {"chunk_size": 6000} for n in (1, 2)}, **options)


PLUGINS: dict[str, Callable[..., Any]] = {
    "none": lambda _mesh, **_: None,
    "DDP": lambda _mesh, **_: TorchDDPPlugin(),
    "FSDP": lambda _mesh, **_: TorchFSDPPlugin(),
    "ZeRO-1": lambda _mesh, **options: LowLevelZeroPlugin(**options),
    "ZeRO-2": lambda _mesh, **options: LowLevelZeroPlugin(stage=2, reduce_bucket_size_in_m=0.0001, **options),
    "Gemini": lambda _mesh, **options: GeminiPlugin(chunk_config_dict=CHUNKS, **options),
    "Hybrid": hybrid,
    "Hybrid, ZeRO-1": partial(hybrid, zero_stage=1),
}
KINDS: dict[str, type[Plugin]] = {
    "none": SingleProcessPlugin,
    "DDP": TorchDDPPlugin,
    "FSDP": TorchFSDPPlugin,
    "ZeRO-1": LowLevelZeroPlugin,
    "ZeRO-2": LowLevelZeroPlugin,
    "Gemini": GeminiPlugin,
    "Hybrid": HybridParallelPlugin,
    "Hybrid, ZeRO-1": HybridParallelPlugin,
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)


@dataclass(frozen=True)
class Way:
    """What a training run does besides a plain step.

    Attributes:
        clip: What is called before the step.
        in_step: The options of a plugin that clips in the step itself; others call `clip`.
        accumulate: Number of backward passes of a step, each on its part of the batch.
        optimizer: Makes the optimizer.
    """

    clip: Callable[[Any], Any] = field(default=lambda _optimizer: None)
    in_step: dict[str, Any] | None = None
    accumulate: int = 1
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd


WAYS: dict[str, Way] = {
    "plain": Way(),
    "1-norm": Way(lambda optimizer: optimizer.clip_grad_by_norm(0.1, norm_type=1.0)),
    "2-norm": Way(lambda optimizer: optimizer.clip_grad_by_norm(0.05)),
    "largest": Way(lambda optimizer: optimizer.clip_grad_by_norm(0.01, norm_type=float("inf"))),
    "value": Way(lambda optimizer: optimizer.clip_grad_by_value(0.002)),
    "2-norm, in the step": Way(lambda optimizer: optimizer.clip_grad_by_norm(0.05), {"max_norm": 0.05}),
    "accumulation": Way(accumulate=2),
    "Lamb": Way(optimizer=partial(optimizers.Lamb, lr=0.1, weight_decay=0.1)),
    "Lars": Way(optimizer=partial(optimizers.Lars, lr=0.5, momentum=0.9, weight_decay=0.1, eeta=0.1)),
    "Adafactor": Way(optimizer=optimizers.Adafactor),
    "GaLore": Way(optimizer=lambda params: optimizers.GaLoreAdamW([{"params": list(params), "rank": 2}], lr=0.01)),
    "CAME": Way(optimizer=partial(optimizers.CAME, lr=0.01, weight_decay=0.1)),
    "HybridAdam": Way(optimizer=partial(optimizers.HybridAdam, lr=0.01, weight_decay=0.1)),
}
LONG_CELLS = {("2d", name) for name in ("none", "ZeRO-1", "Gemini", "Hybrid", "Hybrid, ZeRO-1")}
LONG_CELLS |= {("2d", "DDP")} | {("tp3", name) for name in ("DDP", "ZeRO-1", "ZeRO-2", "Hybrid, ZeRO-1")}
"""Other cells have the plugin, and the world."""
CLIP_IN_STEP = ("ZeRO-1", "ZeRO-2", "Gemini", "Hybrid", "Hybrid, ZeRO-1")


def size_of(mesh: dict[str, Any]) -> int:
    size = 1
    for axis in AXES:
        size *= mesh.get(axis, 1)
    return size


def marked(cells: Sequence[Any]) -> list[Any]:
    """Mark cells of two ranks, which an accelerator repeats, and slow ones; a cell is a world, or begins with it."""
    meshes = WORLDS | {name: mesh for name, (mesh, _) in (DIVIDED | CHUNKED).items()}
    found = []
    for cell in cells:
        parts = (cell,) if isinstance(cell, str) else cell
        size = size_of(meshes[parts[0]])
        marks = [pytest.mark.two_ranks] if size == 2 else []
        if size > MOST_RANKS or parts[0] in LONG or parts in LONG_CELLS:
            marks.append(pytest.mark.slow)
        found.append(pytest.param(*parts, marks=marks))
    return found


# ------------------------------------------------------------------------------------ models of layers of colossal.nn


class Block(torch.nn.Module):
    """Sharded matrices and biases, and replicated ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.outer = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.nn.functional.gelu(self.inner(self.norm(x))))


def make_net() -> torch.nn.Sequential:
    """Layers that a pipeline can cut."""
    layers = {"table": nn.VocabParallelEmbedding(17, WIDTH), "block": Block()}
    return torch.nn.Sequential(OrderedDict(layers | {"classify": nn.Classifier(WIDTH, CLASSES)}))


DRAWS = torch.Generator().manual_seed(3)
INITIAL = {
    name: 0.5 * torch.randn(parameter.shape, generator=DRAWS, dtype=torch.float64)
    for name, parameter in make_net().named_parameters()
}
"""The full parameters; ranks that are threads of one process cannot draw the same numbers."""


def build(dtype: torch.dtype, mesh: ParallelMesh) -> torch.nn.Sequential:
    model = make_net()
    with torch.no_grad():
        for prefix, layer in model.named_modules():
            for name, layout in layer.layouts.items() if isinstance(layer, ParallelLayer) else ():
                full = INITIAL[f"{prefix}.{name}"]
                own = full if mesh.size("tp") == 1 else shard(full, layout, mesh.global_rank)
                layer.get_parameter(name).copy_(own)
    return model.to(dtype)


def batches_of(step: int, count: int, place: tuple[int, int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What this rank gets of its data-parallel share of each part of a batch."""
    draws = torch.Generator().manual_seed(step)
    tokens = torch.randint(17, (BATCH, 4), generator=draws)
    labels = torch.randint(CLASSES, (BATCH, 4), generator=draws)
    for part in zip(tokens.chunk(count), labels.chunk(count), strict=True):
        own_tokens, own_labels = (each.chunk(place[1])[place[0]] for each in part)
        yield nn.split_input(own_tokens).to(DEVICE), nn.split_input(own_labels).to(DEVICE)


def boost(plugin: Any, way: Way, dtype: torch.dtype, mesh: ParallelMesh, precision: Any = None) -> tuple[Any, ...]:
    booster, model = Booster(device=DEVICE, plugin=plugin, mixed_precision=precision), build(dtype, mesh)
    model, optimizer, criterion, *_ = booster.boost(model, way.optimizer(model.parameters()), nn.CrossEntropyLoss())
    return booster, model, optimizer, criterion


def values(model: Any) -> dict[str, torch.Tensor]:
    """The full parameters, of a pipelined model those of this rank."""
    return {
        name.rpartition(".module.")[2]: full_tensor_of(backing_shard(parameter)).detach().clone()
        for name, parameter in model.unwrap().named_parameters()
    }


def grads(optimizer: Any) -> dict[str, torch.Tensor]:
    """The full gradients."""
    return {
        optimizer.param_names[parameter]: full_tensor_of(copy_placement(parameter.grad.detach(), parameter)).clone()
        for parameter in optimizer.parameters
        if parameter.grad is not None
    }


def train(mesh: ParallelMesh, plugin: str, way: Way) -> dict[str, Any]:
    """Losses, norms, gradients, and the full parameters after some steps."""
    in_step = way.in_step if plugin in CLIP_IN_STEP else None
    chosen = PLUGINS[plugin](mesh, precision="fp32", **(in_step or {}))
    booster, model, optimizer, criterion = boost(chosen, way, torch.float64, mesh)
    place = booster.plugin.data_parallel_rank_and_size()
    losses, norms, seen = [], [], {}
    for step in range(STEPS):
        for tokens, labels in batches_of(step, way.accumulate, place):
            scaled = lambda outputs, batch: criterion(outputs, batch[1]) / way.accumulate  # noqa: E731
            done = booster.execute_pipeline(iter([(tokens, labels)]), model, scaled, optimizer)
            losses.append(done["loss"].item())
        norms.append(optimizer.get_grad_norm())
        seen |= {f"gradient of {name} in step {step}": grad for name, grad in grads(optimizer).items()}
        if in_step is None:
            way.clip(optimizer)
            norms.append(optimizer.get_grad_norm(float("inf")) if way.in_step is None else 0.0)
        else:
            norms.append(0.0)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "norms": torch.tensor(norms, dtype=torch.float64),
        "values": seen | values(model),
    }


def train_all(world: str, plugin: str) -> dict[str, Any]:
    with ParallelMesh(**WORLDS[world]) as mesh:
        return {name: train(mesh, plugin, WAYS[name]) for name in ways_in(world)}


def ways_in(world: str) -> tuple[str, ...]:
    return ("plain", "2-norm, in the step", "Lamb") if world in MANY_RANKS else tuple(WAYS)


@cache
def alone(name: str) -> dict[str, Any]:
    return run_threads(lambda: train(ParallelMesh(), "none", WAYS[name]), 1)[0]


def runner_of(world: str, plugin: str) -> Callable[..., list[Any]]:
    """Threads where they will do: FSDP2's streams are those of a process, as is a backward pass on an accelerator."""
    return run_processes if plugin == "FSDP" or "pp" in WORLDS[world] or DEVICE != "cpu" else run_threads


def is_supported(mesh: dict[str, Any], plugin: str) -> bool:
    """What the code says: the axes of the mesh that have several ranks are among those of the plugin."""
    return {axis for axis in AXES if mesh.get(axis, 1) > 1} <= set(KINDS[plugin].supported_axes)


SUPPORTED = [(world, plugin) for world, mesh in WORLDS.items() for plugin in PLUGINS if is_supported(mesh, plugin)]
RUN = [(world, plugin) for world, plugin in SUPPORTED if ALL or world not in MANY_RANKS]


@pytest.mark.chosen
@pytest.mark.parametrize(("world", "plugin"), marked(RUN))
def test_a_cell_is_one_process(world: str, plugin: str) -> None:
    is_cut = "pp" in WORLDS[world]
    ranks = runner_of(world, plugin)(train_all, size_of(WORLDS[world]), world, plugin)
    for name in ways_in(world):
        compare(alone(name), [rank[name] for rank in ranks], f"{world}, {plugin}, {name}", is_cut)


def compare(expected: dict[str, Any], found: list[dict[str, Any]], cell: str, is_cut: bool) -> None:
    losses = torch.stack([each["losses"] for each in found]).mean(0)
    assert_equal(losses, expected["losses"], f"{cell}: losses")
    first: dict[str, torch.Tensor] = {}
    for each in found:
        assert is_cut or each["values"].keys() == expected["values"].keys()
        assert_equal(each["norms"], expected["norms"], f"{cell}: norms")
        for key, value in each["values"].items():
            assert_equal(value, expected["values"][key], f"{cell}: {key}")
            assert torch.equal(first.setdefault(key, value), value), f"{cell}: {key} differs between ranks"
    assert first.keys() == expected["values"].keys()


def test_every_way_of_clipping_takes_effect_and_every_optimizer_learns() -> None:
    norm = alone("plain")["norms"].view(STEPS, 2)[0][0]
    for name in ("1-norm", "2-norm", "largest", "value"):
        assert alone(name)["norms"].view(STEPS, 2)[0][1] < norm / 4
    plain = alone("plain")["values"]
    for name in (name for name in WAYS if name != "plain"):
        moved = [key for key, value in INITIAL.items() if not torch.allclose(alone(name)["values"][key], value)]
        assert moved == list(INITIAL)
        same = all(torch.allclose(alone(name)["values"][key], plain[key], rtol=1e-6) for key in INITIAL)
        assert same == (name == "accumulation")


# ------------------------------------------------------------------------------------------------------- checkpoints


KEEP_MORE = ("Lamb", "Adafactor", "CAME", "GaLore", "HybridAdam")


def train_on(mesh: ParallelMesh, plugin: str, name: str, folder: str) -> dict[str, torch.Tensor]:
    """Make a step, save, load into other parts, and make another step."""
    for step in range(2):
        chosen = PLUGINS[plugin](mesh, precision="fp32")
        booster, model, optimizer, criterion = boost(chosen, WAYS[name], torch.float64, mesh)
        if step:
            booster.load_model(model, f"{folder}/model")
            booster.load_optimizer(optimizer, f"{folder}/optimizer")
        for batch in batches_of(step, 1, booster.plugin.data_parallel_rank_and_size()):
            loss_of_batch = lambda outputs, inputs, of=criterion: of(outputs, inputs[1])  # noqa: E731
            booster.execute_pipeline(iter([batch]), model, loss_of_batch, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if folder and not step:
            booster.save_model(model, f"{folder}/model", shard=True)
            booster.save_optimizer(optimizer, f"{folder}/optimizer", shard=True)
    return values(model)


def train_on_all(world: str, plugin: str, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    with ParallelMesh(**WORLDS[world]) as mesh:
        return {name: train_on(mesh, plugin, name, f"{folder}/{name}") for name in KEEP_MORE}


@cache
def alone_for_two_steps(name: str) -> dict[str, torch.Tensor]:
    def program() -> dict[str, torch.Tensor]:
        mesh = ParallelMesh()
        booster, model, optimizer, criterion = boost(None, WAYS[name], torch.float64, mesh)
        for step in range(2):
            for tokens, labels in batches_of(step, 1, (0, 1)):
                booster.backward(criterion(model(tokens), labels), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    return run_threads(program, 1)[0]


SAVED = crossed(["tp2", "dp2 x tp2"], ["DDP", "ZeRO-1", "Gemini", "Hybrid"], one_in=2)


@pytest.mark.chosen
@pytest.mark.parametrize(("world", "plugin"), marked([*SAVED, ("pp2 x 2d", "Hybrid")]))
def test_states_of_every_optimizer_go_on_from_a_checkpoint(world: str, plugin: str, tmp_path: Path) -> None:
    for name in KEEP_MORE:
        (tmp_path / name).mkdir()
    ranks = run_processes(train_on_all, size_of(WORLDS[world]), world, plugin, str(tmp_path))
    for name in KEEP_MORE:
        expected = alone_for_two_steps(name)
        assert {key for rank in ranks for key in rank[name]} == expected.keys()
        for rank in ranks:
            for key, value in rank[name].items():
                assert_equal(value, expected[key], f"{world}, {plugin}, {name}: {key}")


# --------------------------------------------------------------------------------- models of transformers, divided


def family_of(world: str) -> str:
    """A mesh with an ep axis needs experts."""
    return "mixtral" if "ep" in world else "llama-tied"


def family_batches(step: int, count: int, place: tuple[int, int]) -> Iterator[dict[str, torch.Tensor]]:
    """Eight samples, in parts, and of these what this rank gets."""
    inputs = [inputs_of("llama", num_changed=step + 4 * number) for number in range(4)]
    batch = {key: torch.cat([each[key] for each in inputs]).to(DEVICE) for key in inputs[0]}
    for part in range(count):
        yield {key: value.chunk(count)[part].chunk(place[1])[place[0]] for key, value in batch.items()}


def loss_of(outputs: Any, _inputs: Any = None) -> torch.Tensor:
    return outputs.loss


def train_family(family: str, world: str | None, name: str, **more: Any) -> dict[str, Any]:
    """The same of a causal language model, whose layers the plugin divides; of None, in one process."""
    way = WAYS[name]
    sizes, options = ({}, {}) if world is None else (DIVIDED | CHUNKED)[world]
    clips = way.in_step if world is not None else None
    with ParallelMesh(**sizes) as mesh:
        make = gemini if world in CHUNKED else hybrid
        plugin = None if world is None else make(mesh, precision="fp32", **options, **(clips or {}), **more)
        booster = Booster(device=DEVICE, plugin=plugin)
        model: Any = build_family(family)
        model, optimizer, criterion, *_ = booster.boost(model, way.optimizer(model.parameters()), loss_of)
        place, losses, norms, seen = booster.plugin.data_parallel_rank_and_size(), [], [], dict[str, torch.Tensor]()
        for step in range(STEPS):
            for batch in family_batches(step, way.accumulate, place):
                scaled = lambda outputs, inputs: criterion(outputs, inputs) / way.accumulate  # noqa: E731
                losses.append(booster.execute_pipeline(iter([batch]), model, scaled, optimizer)["loss"].item())
            norms.append(optimizer.get_grad_norm())
            seen |= {f"gradient of {key} in step {step}": grad for key, grad in grads(optimizer).items()}
            if clips is None:
                way.clip(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        model.state_dict()
        working = {} if optimizer.masters is None else optimizer.masters.pairs
        seen |= {
            optimizer.param_names[each]: full_tensor_of(backing_shard(working.get(each, each))).detach().clone()
            for each in optimizer.parameters
        }
    return {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "norms": torch.tensor(norms, dtype=torch.float64),
        "values": seen,
    }


MOST_WAYS = {
    "some ways": (("1-norm", "2-norm, in the step", "value", "accumulation", "Lamb", "Adafactor"), ("2-norm", "Lamb")),
    "others": (("plain", "2-norm", "largest", "Lars", "GaLore", "CAME", "HybridAdam"), ()),
}
"""Ways without and with ZeRO-1; the former are in the gate, and those of layers of `colossal.nn` are so all."""


def train_family_all(world: str, some: str) -> dict[tuple[str, int], dict[str, Any]]:
    plain, with_zero = MOST_WAYS[some]
    stages = [{}] if world in CHUNKED else [{"zero_stage": 0}, {"zero_stage": 1}]
    with KeepFloat64():
        return {
            (name, stage): train_family(family_of(world), world, name, **options)
            for stage, (names, options) in enumerate(zip((plain, with_zero), stages, strict=False))
            for name in names
        }


@cache
def family_alone(family: str, name: str) -> dict[str, Any]:
    return run_threads(train_one_family, 1, family, name)[0]


def train_one_family(family: str, name: str) -> dict[str, Any]:
    with KeepFloat64():
        return train_family(family, None, name)


@pytest.mark.parametrize("some", ["some ways", pytest.param("others", marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", marked([*DIVIDED, *CHUNKED]))
def test_a_divided_transformer_is_one_process(world: str, some: str) -> None:
    ranks = run_processes(train_family_all, size_of((DIVIDED | CHUNKED)[world][0]), world, some)
    for way, stage in ranks[0]:
        expected, found = family_alone(family_of(world), way), [rank[way, stage] for rank in ranks]
        compare(expected, found, f"{world}, {way}, zero_stage={stage}", is_cut=True)


# --------------------------------------------------------------------------------------------------------- overflow


SCALE = 8.0
HALF: dict[str, Callable[[ParallelMesh], tuple[Any, Any]]] = {
    "none": lambda _mesh: (None, FP16TorchMixedPrecision(init_scale=SCALE)),
    "DDP": lambda _mesh: (TorchDDPPlugin(), FP16TorchMixedPrecision(init_scale=SCALE)),
    "DDP, float32 copies": lambda _mesh: (TorchDDPPlugin(), FP16NaiveMixedPrecision(initial_scale=SCALE, hysteresis=1)),
    "ZeRO-1": lambda _mesh: (LowLevelZeroPlugin(precision="fp16", initial_scale=SCALE, hysteresis=1), None),
    "ZeRO-2": lambda _mesh: (LowLevelZeroPlugin(stage=2, precision="fp16", initial_scale=SCALE, hysteresis=1), None),
    "ZeRO-1, clips": lambda _mesh: (
        LowLevelZeroPlugin(precision="fp16", initial_scale=SCALE, hysteresis=1, max_norm=1.0),
        None,
    ),
    "Gemini": lambda _mesh: (
        GeminiPlugin(precision="fp16", initial_scale=SCALE, hysteresis=1, chunk_config_dict=CHUNKS),
        None,
    ),
    "Hybrid": lambda mesh: (hybrid(mesh, precision="fp16", initial_scale=SCALE, hysteresis=1), None),
    "Hybrid, ZeRO-1": lambda mesh: (
        hybrid(mesh, precision="fp16", initial_scale=SCALE, hysteresis=1, zero_stage=1),
        None,
    ),
}


def overflow_on_the_last_rank(world: str, plugin: str, layer: str) -> list[tuple[bool, float, bool]]:
    """Let one local gradient overflow in the second of three steps."""
    with ParallelMesh(**WORLDS[world]) as mesh:
        chosen, precision = HALF[plugin](mesh)
        booster, model, optimizer, criterion = boost(chosen, WAYS["plain"], torch.float32, mesh, precision)
        place = booster.plugin.data_parallel_rank_and_size()
        is_last = mesh.rank("tp") == mesh.size("tp") - 1 and (mesh.rank("dp") == 0 or place[1] == 1)
        overflows, seen, before = [False], [], values(model)
        weight = model.unwrap().get_submodule(f"block.{layer}").weight
        weight.register_hook(lambda grad: grad * torch.inf if overflows[0] else None)
        for step in range(STEPS):
            overflows[0] = is_last and step == 1
            for tokens, labels in batches_of(step, 1, place):
                booster.backward(criterion(model(tokens), labels), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            after = values(model)
            moved = any(not torch.equal(after[key], value) for key, value in before.items())
            seen.append((optimizer.scaler.skipped, optimizer.scaler.scale_value, moved))
            before = after
        return seen


@pytest.mark.chosen
@pytest.mark.parametrize(("plugin", "layer"), crossed(HALF, ["inner", "norm"], one_in=2))
@pytest.mark.parametrize("world", marked(["dp2", "tp2", "dp2 x tp2", "2d", "3d"]))
def test_an_overflow_on_one_rank_skips_the_step_on_all(world: str, plugin: str, layer: str) -> None:
    """In a shard of a matrix, and in one of the replicas of a vector."""
    expected = [(False, SCALE, True), (True, SCALE / 2, False), (False, SCALE / 2, True)]
    size = size_of(WORLDS[world])
    assert runner_of(world, plugin)(overflow_on_the_last_rank, size, world, plugin, layer) == [expected] * size


# --------------------------------------------------------------------------------------------------------- refusals


MESHES = WORLDS | {name: mesh for name, (mesh, _) in DIVIDED.items()}
REFUSED = [(world, plugin) for world, mesh in MESHES.items() for plugin in PLUGINS if not is_supported(mesh, plugin)]


@pytest.mark.parametrize(("world", "plugin"), REFUSED)
def test_every_other_cell_is_refused_with_a_reason(world: str, plugin: str) -> None:
    with fake_world(size_of(MESHES[world])), ParallelMesh(**MESHES[world]) as mesh:
        booster = Booster(device=DEVICE, plugin=PLUGINS[plugin](mesh))
        with pytest.raises(UnsupportedError, match=r"trains on a mesh with the axes .* Use HybridParallelPlugin\("):
            booster.boost(torch.nn.Linear(2, 2))


def test_no_more_cells_are_refused_than_these() -> None:
    refused = {(plugin, axis) for plugin, kind in KINDS.items() for axis in set(AXES) - set(kind.supported_axes)}
    only_hybrid = {(plugin, axis) for plugin in PLUGINS if "Hybrid" not in plugin for axis in ("pp", "sp", "ep")}
    assert refused & {(plugin, axis) for plugin in PLUGINS for axis in AXES} == {
        *((plugin, axis) for plugin, axis in only_hybrid if axis in AXES),
        ("FSDP", "tp"),
    }


@pytest.mark.parametrize("plugin", [plugin for plugin in PLUGINS if plugin != "FSDP"])
@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon])
def test_optimizers_that_need_full_parameters_are_refused(kind: Any, plugin: str) -> None:
    with fake_world(2), ParallelMesh(tp=2) as mesh:
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        booster = Booster(device=DEVICE, plugin=PLUGINS[plugin](mesh, precision="fp32"))
        with pytest.raises(UnsupportedError, match=kind.__name__):
            booster.boost(model, kind(model.parameters(), lr=0.1))
