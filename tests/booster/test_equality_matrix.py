# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""The equality matrix: every mesh, with every plugin, with every way of clipping and every optimizer, is one process.

A cell is compared in its losses, every gradient, norms and parameters of three steps, in float64; what is replicated is
the same to the bit. A cell that a plugin does not support is refused with a reason. Here are models of layers of
`colossal.nn`; `test_equality_transformers.py` has those of transformers.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from chosen import ALL, crossed
from equality import assert_equal
from equality_cells import (
    CHUNKS,
    CLIP_IN_STEP,
    DEVICE,
    DIVIDED,
    INITIAL,
    KINDS,
    MANY_RANKS,
    PLUGINS,
    STEPS,
    WAYS,
    WIDTH,
    WORLDS,
    Way,
    batches_of,
    boost,
    compare,
    grads,
    hybrid,
    marked,
    size_of,
    values,
)

from colossal import nn
from colossal._src.cluster import AXES
from colossal.booster import Booster
from colossal.booster.mixed_precision import FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from colossal.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import UnsupportedError
from colossal.testing import fake_world, run_processes, run_threads


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
