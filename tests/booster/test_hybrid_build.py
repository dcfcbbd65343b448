"""`HybridParallelPlugin` is built in one pass, runs one stage with a batch or its parts, and says where a rank is."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import colossal
from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.testing import fake_world, run_threads

LAYERS = (
    ("errors", "logging", "_cached", "_closest", "_registration", "_older_names"),
    ("cluster", "accelerator", "_native"),
    ("comm",),
    ("kernel", "offload"),
    ("tensor", "lazy"),
    ("nn", "amp", "interface"),
    ("shardformer", "pipeline", "zero", "checkpoint_io"),
    ("booster",),
    (),
    ("legacy",),
    ("cli", "testing"),
)
LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages}
MOST_UPWARD = 2
CALL_HOOKS = {kind.__code__.co_filename for kind in (nn.Module.__call__, torch.optim.Optimizer.profile_hook_step)}


def filled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.6, parameter.numel()).view_as(parameter))
    return model.double()


def net() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))


# ----------------------------------------------------------------------------------------------- one pass


def module_of(frame: FrameType) -> str | None:
    """The package of the library whose code runs in a frame; what it calls of other packages is passed over."""
    root = Path(colossal.__file__).parent / "_src"
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(root):
        return None
    parts = path.relative_to(root).parts
    return parts[parts[0] == "_src"].removesuffix(".py")  # of _src its packages, beside it what has none


def upward_calls(function: Any, *args: Any) -> list[str]:
    """The calls from a module of the library straight into one on a higher layer.

    What torch calls by itself is none: a hook that is registered with it is called for all modules or optimizers.
    """
    found = []

    def look(frame: FrameType, event: str, _arg: object) -> None:
        if event != "call" or (target := module_of(frame)) is None:
            return
        caller = frame.f_back
        if caller is not None and caller.f_code.co_filename in CALL_HOOKS:
            return
        while caller is not None and module_of(caller) is None:
            caller = caller.f_back
        source = None if caller is None else module_of(caller)
        if caller is not None and source in LAYER_OF and LAYER_OF[target] > LAYER_OF[source]:
            found.append(f"{source} {caller.f_code.co_name} -> {target} {frame.f_code.co_name}")

    sys.setprofile(look)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, "precision": "bf16"},
        pytest.param(
            {"tp_size": 2, "pp_size": 1, "zero_stage": 1, "precision": "fp16", "enable_all_optimization": True},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_build_hardly_calls_upward(options: dict[str, Any]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    with fake_world(8):
        model = LlamaForCausalLM(config)
        booster = Booster(device="cpu", plugin=HybridParallelPlugin(**options))
        found = upward_calls(booster.boost, model, torch.optim.AdamW(model.parameters()))
    assert len(found) <= MOST_UPWARD, "\n".join(found)


def test_a_call_upward_is_seen() -> None:
    from colossal._src.pipeline import map_tensors

    assert upward_calls(map_tensors, torch.ones(1), lambda tensor: tensor) == []
    with fake_world(2):
        booster = Booster(device="cpu", plugin=HybridParallelPlugin(1, 1, precision="fp32"))
        assert upward_calls(map_tensors, torch.ones(1), lambda _: booster.plugin.get_lora()) != []


def test_a_hook_that_torch_calls_is_no_call_upward() -> None:
    from colossal._src.legacy.registration_hooks import registration_hook
    from colossal._src.pipeline import map_tensors

    names: list[str] = []
    with registration_hook("parameter", lambda _module, name, _value: names.append(name)):
        assert upward_calls(map_tensors, torch.ones(1), lambda _: nn.Linear(1, 1)) == []
    assert names == ["weight", "bias"]


# ----------------------------------------------------------------------------------------------- parts of a batch


def loss_of(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return (outputs - batch[1]).square().mean()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    values = torch.linspace(-1, 1, 3 * 8 * 4, dtype=torch.float64).view(3, 8, 4).sin()
    return [(each, each[:, :2] * 2) for each in values]


def train(options: dict[str, Any], calls: bool, size: int) -> dict[str, Any]:
    plugin = HybridParallelPlugin(1, 1, precision="fp32", **options)
    booster = Booster(device="cpu", plugin=plugin)
    model, optimizer, *_ = booster.boost(own := net(), torch.optim.Adam(own.parameters(), lr=0.1))
    assert optimizer is not None
    losses = []
    for batch in batches():
        part = tuple(each.chunk(size)[plugin.data_parallel_rank_and_size()[0]] for each in batch)
        if calls:
            loss = loss_of(model(part[0]), part)
            booster.backward(loss, optimizer)
        else:
            loss = booster.execute_pipeline(iter([part]), model, loss_of, optimizer)["loss"]
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "parameters": [each.detach().clone() for each in model.unwrap().parameters()]}


def one_process() -> dict[str, Any]:
    model = net()
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.1), []
    for batch in batches():
        loss = loss_of(model(batch[0]), batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "parameters": [each.detach().clone() for each in model.parameters()]}


@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("parts", [{"num_microbatches": 4}, {"microbatch_size": 2}, {}])
@pytest.mark.parametrize("size", [1, 2])
def test_one_stage_trains_as_one_process(calls: bool, zero_stage: int, parts: dict[str, int], size: int) -> None:
    ranks = run_threads(train, size, {"zero_stage": zero_stage, **parts}, calls, size)
    expected = one_process()
    torch.testing.assert_close([sum(each) / size for each in zip(*(r["losses"] for r in ranks), strict=True)],
                               expected["losses"], rtol=1e-12, atol=1e-12)  # fmt: skip
    for rank in ranks:
        torch.testing.assert_close(rank["parameters"], expected["parameters"], rtol=1e-10, atol=1e-12)


def go_on(zero_stage: int, size: int) -> list[torch.Tensor]:
    """Boost an optimizer that has stepped, of a model that stays whole."""
    model, batch = net(), batches()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loss_of(model(batch[0][0]), batch[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    plugin = HybridParallelPlugin(1, 1, precision="fp32", zero_stage=zero_stage)
    booster = Booster(device="cpu", plugin=plugin)
    boosted, wrapper, *_ = booster.boost(model, optimizer)
    assert wrapper is not None
    for each in batch[1:]:
        part = tuple(tensor.chunk(size)[plugin.data_parallel_rank_and_size()[0]] for tensor in each)
        booster.backward(loss_of(boosted(part[0]), part), wrapper)
        wrapper.step()
        wrapper.zero_grad()
    return [parameter.detach().clone() for parameter in boosted.unwrap().parameters()]


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_an_optimizer_goes_on_where_its_parameters_stay_whole(zero_stage: int) -> None:
    for found in run_threads(go_on, 2, zero_stage, 2):
        torch.testing.assert_close(found, one_process()["parameters"], rtol=1e-10, atol=1e-12)


def evaluate() -> None:
    booster = Booster(device="cpu", plugin=HybridParallelPlugin(1, 1, precision="fp32", num_microbatches=4))
    model, *_ = booster.boost(net())
    batch = batches()[0]
    done = booster.execute_pipeline(iter([batch]), model, loss_of, return_outputs=True)
    torch.testing.assert_close(done["outputs"], model(batch[0]))
    torch.testing.assert_close(done["loss"], loss_of(model(batch[0]), batch))
    assert not done["outputs"].requires_grad


def test_outputs_of_the_parts_are_joined() -> None:
    run_threads(evaluate, 1)


# ----------------------------------------------------------------------------------------------- where a rank is


@pytest.mark.parametrize("rank", range(8))
def test_properties_tell_where_a_rank_is(rank: int) -> None:
    from torch import distributed as dist

    with fake_world(8, rank):
        plugin = HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=2)
        mesh, manager = plugin.mesh, plugin.stage_manager
        assert plugin.pg_mesh is mesh
        assert plugin.zero_stage == 0
        assert plugin.enable_pipeline_parallelism
        assert plugin.shard_config.mesh is mesh
        assert manager is not None
        assert not manager.use_zbv
        assert (manager.stage, manager.num_stages, manager.num_model_chunks) == (mesh.rank("pp"), 2, 1)
        assert manager.is_first_stage(ignore_chunk=True) is (manager.stage == 0)
        assert manager.is_last_stage(ignore_chunk=True) is (manager.stage == 1)
        ring = [manager.get_prev_rank(), manager.get_rank(), manager.get_next_rank()]
        assert ring[1] == rank
        assert set(ring) == set(mesh.ranks("pp"))
        assert manager.distribute_layers(5) == [2, 3] or manager.distribute_layers(5) == [3, 2]
        for axis, group in (("tp", plugin.tp_group), ("pp", plugin.pp_group), ("dp", plugin.dp_group),
                            ("sp", plugin.sp_group)):  # fmt: skip
            assert tuple(dist.get_process_group_ranks(group)) == mesh.ranks(axis)  # type: ignore[arg-type]


def test_the_group_that_shares_sequences_is_that_of_tp_in_its_modes() -> None:
    with fake_world(4):
        plugin = HybridParallelPlugin(2, 1, enable_sequence_parallelism=True, sequence_parallelism_mode="ring")
        assert plugin.sp_group is plugin.tp_group
        assert plugin.stage_manager is None
        assert not plugin.enable_pipeline_parallelism


def test_the_last_stage_of_a_v_is_on_the_first_rank() -> None:
    for rank in range(2):
        with fake_world(2, rank):
            plugin = HybridParallelPlugin(1, 2, num_microbatches=2, pp_style="zbv", num_model_chunks=2)
            assert plugin.stage_manager is not None
            assert plugin.stage_manager.use_zbv
            assert plugin.stage_manager.is_first_stage() is plugin.stage_manager.is_last_stage() is (rank == 0)
