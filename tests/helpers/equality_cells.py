# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""What the cells of the equality matrix are made of: meshes, plugins, ways to train, and a model of `colossal.nn`."""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from equality import assert_equal

from colossal import nn
from colossal._src.booster.plugin.base import Plugin
from colossal._src.booster.plugin.single_process import SingleProcessPlugin
from colossal._src.cluster import AXES
from colossal._src.nn.layer import ParallelLayer
from colossal._src.tensor import backing_shard, copy_placement
from colossal.booster import Booster
from colossal.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossal.cluster import ParallelMesh
from colossal.nn import optimizer as optimizers
from colossal.tensor import full_tensor_of, shard

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
