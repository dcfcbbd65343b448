# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""What `HybridParallelPlugin` refuses, what it does in half precision, and how it treats lazy models and sequences."""

import copy
from typing import Any

import pytest
import torch
from families import build, inputs_of
from torch import nn

from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError, MeshError, PlanError, UnsupportedError
from colossal.lazy import LazyInitContext
from colossal.nn import optimizer as optimizers
from colossal.tensor import ParallelPlan, Stages
from colossal.testing import fake_world, run_processes, run_threads


def plugin_of(**options: Any) -> HybridParallelPlugin:
    return HybridParallelPlugin(**{"tp_size": 1, "pp_size": 1, "precision": "fp32"} | options)


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon])
def test_optimizers_that_look_at_full_parameters_are_refused(kind: Any) -> None:
    with fake_world(2):
        model = build("llama")
        full: Any = kind([parameter for parameter in model.parameters() if parameter.dim() == 2])
        with pytest.raises(UnsupportedError, match=rf"shards of the parameters here\. Found {kind.__name__}, wh"):
            Booster(plugin=plugin_of(tp_size=2)).boost(model, full)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, optimizers.FusedLAMB])
def test_optimizers_that_look_at_several_parameters_are_refused_on_pipelines(kind: Any) -> None:
    with fake_world(2):
        model = build("llama")
        with pytest.raises(UnsupportedError, match=rf"only some of the parameters here\. Found {kind.__name__}, wh"):
            Booster(plugin=plugin_of(pp_size=2, num_microbatches=2)).boost(model, kind(model.parameters()))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"tp_size": 0}, ConfigError, "Found tp_size=0"),
        ({"zero_stage": 3}, ConfigError, "zero_stage=3"),
        ({"precision": "fp8"}, ConfigError, "HybridParallelPlugin takes the precision 'fp16'"),
        ({"pp_style": "gpipe"}, ConfigError, "Found 'gpipe'"),
        ({"pp_size": 2}, ConfigError, "Found neither num_microbatches nor microbatch_size"),
        ({"num_microbatches": 2, "microbatch_size": 2}, ConfigError, "one of them"),
        ({"pp_size": 2, "num_microbatches": 2, "num_model_chunks": 2}, ConfigError, "pp_style='1f1b' has 1 on each"),
        (
            {"pp_size": 2, "num_microbatches": 2, "pp_style": "interleaved"},
            ConfigError,
            "2 chunks of the model or more",
        ),
        ({"pp_size": 2, "num_microbatches": 2, "pp_style": "zbv"}, ConfigError, "Found num_model_chunks=1"),
        ({"pp_size": 2, "num_microbatches": 2, "zero_stage": 2}, UnsupportedError, "works is zero_stage=1"),
        ({"num_layers_per_stage": [2, 2]}, ConfigError, r"Found num_layers_per_stage=\(2, 2\)"),
        ({"pp_style": "zbv", "num_model_chunks": 2}, ConfigError, "pp_style='zbv', num_model_chunks=2 with pp_size=1"),
        ({"cpu_offload": True}, UnsupportedError, "Found cpu_offload with zero_stage=0"),
        ({"communication_dtype": torch.bfloat16}, UnsupportedError, "Found communication_dtype with zero_stage=0"),
        ({"overlap_allgather": True}, UnsupportedError, "it works with zero_stage=1 and no pipeline"),
        ({"overlap_allgather": True, "zero_stage": 1, "num_microbatches": 2}, UnsupportedError, "and a pipeline"),
        ({"static_graph": True, "zero_stage": 1}, UnsupportedError, "it works with zero_stage=0 and no pipeline"),
        ({"sp_size": 2}, ConfigError, r"Found it False with sp_size=2"),
        (
            {"make_vocab_size_divisible_by": 128},
            UnsupportedError,
            r"model\.resize_token_embeddings\(pad_to_multiple_of",
        ),
        ({"gradient_checkpoint_config": 0.5}, ConfigError, r"Found 0\.5\. Pass one of them"),
        ({"custom_policy": object()}, ConfigError, "custom_policy is a ParallelPlan.*Found <object"),
        ({"custom_policy": ParallelPlan, "tp_size": 2}, ConfigError, "custom_policy is a ParallelPlan"),
        ({"custom_policy": {}, "pp_size": 2, "num_microbatches": 2}, ConfigError, r"Found \{\}\. Pass ParallelPlan"),
        ({"overlap_p2p": False}, UnsupportedError, "always overlaps with computation"),
    ],
)
def test_options_that_cannot_work(options, kind, message) -> None:
    with pytest.raises(kind, match=message):
        plugin_of(**options)


def test_a_world_that_does_not_fit() -> None:
    with fake_world(3), pytest.raises(MeshError, match="3"):
        _ = plugin_of(tp_size=2).mesh


def test_the_mesh_in_force_is_used_if_it_fits() -> None:
    with fake_world(4), ParallelMesh(tp=2) as mesh:
        assert plugin_of(tp_size=2).mesh is mesh
        assert plugin_of(tp_size=4).mesh is not mesh


@pytest.mark.parametrize("mode", ["split_gather", "ring"])
@pytest.mark.parametrize(("sp_size", "warnings"), [(None, 0), (1, 0), (2, 0), (4, 1)])
def test_a_size_of_sp_has_no_effect_where_tp_shares_sequences(mode, sp_size, warnings, capsys) -> None:
    with fake_world(4):
        options = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": mode}
        plugin = plugin_of(tp_size=2, sp_size=sp_size, **options)
        assert (plugin.tp_size, plugin.sp_size, plugin.dp_size, plugin.mesh.world_size) == (2, 1, 2, 4)
    expected = f"In the mode '{mode}' sequences are sharded over the 2 ranks of tp: sp_size=4 has no effect."
    assert capsys.readouterr().err.count(expected) == warnings


@pytest.mark.parametrize(("dp_outside", "stages", "replicas"), [(True, (0, 1), (0, 2)), (False, (0, 2), (0, 1))])
def test_ranks_are_numbered_by_replica_or_by_stage(dp_outside, stages, replicas) -> None:
    with fake_world(4):
        plugin = plugin_of(pp_size=2, num_microbatches=2, dp_outside=dp_outside)
        assert (plugin.mesh.ranks("pp"), plugin.mesh.ranks("dp")) == (stages, replicas)
        assert (plugin.pp_size, plugin.dp_size, plugin.tp_size) == (2, 2, 1)


def boost(model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
    with fake_world(options.pop("size", 1)):
        return Booster(device="cpu", plugin=plugin_of(**options)).boost(model, optimizer)


def test_models_that_cannot_be_divided() -> None:
    with pytest.raises(UnsupportedError, match="whose plan has no stages"):
        boost(nn.Linear(1, 1), pp_size=2, num_microbatches=2, size=2, custom_policy=ParallelPlan({}))
    with pytest.raises(PlanError, match="Found Linear, which has none.*custom_policy=ParallelPlan.*stages=Stages"):
        boost(nn.Linear(2, 2), tp_size=2, size=2)
    with pytest.raises(PlanError, match="Found no module of GPT2Model for 'nothing'"):
        boost(build("gpt2"), tp_size=2, size=2, custom_policy=ParallelPlan({"nothing": "colwise"}))
    with pytest.raises(ConfigError, match=r"Found \[1, 1, 1\] for 2 layers"):
        boost(build("gpt2"), pp_size=2, num_microbatches=2, num_layers_per_stage=[1, 1, 1], size=2)
    with pytest.raises(ConfigError, match=r"a number for each of 2 stages\. Found \[1, 1, 1\]"):
        boost(build("gpt2", num_layers=3), pp_size=2, num_microbatches=2, num_layers_per_stage=[1, 1, 1], size=2)


def test_an_optimizer_that_has_made_a_step() -> None:
    model = build("gpt2")
    stepped = torch.optim.AdamW(model.parameters())
    model(**inputs_of("gpt2")).loss.backward()
    stepped.step()
    with pytest.raises(ConfigError, match=r"before its first step.*by booster\.load_optimizer"):
        boost(model, stepped, tp_size=2, size=2)


def call_in_stages(own: nn.Module) -> None:
    plugin = HybridParallelPlugin(1, 2, num_microbatches=2, precision="fp32")
    model, *_ = Booster(plugin=plugin).boost(copy.deepcopy(own))
    with pytest.raises(UnsupportedError, match=r"run by booster\.execute_pipeline"):
        model(torch.ones(2, 2))


def test_a_model_in_stages_is_not_called() -> None:
    run_threads(call_in_stages, 2, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


class Residual(nn.Sequential):
    """A sequence by its class, but not by its forward method."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def test_a_sequence_with_a_forward_method_of_its_own_is_not_cut_as_one() -> None:
    def cut() -> None:
        booster = Booster(plugin=HybridParallelPlugin(1, 2, num_microbatches=2, precision="fp32"))
        with pytest.raises(PlanError, match=r"Found Residual, .*Pass custom_policy=ParallelPlan"):
            booster.boost(Residual(nn.Linear(2, 2), nn.Linear(2, 2)))

    run_threads(cut, 2)


# ------------------------------------------------------------------------------------------ what it can besides


def loss_of(outputs: Any, _inputs: Any = None) -> torch.Tensor:
    return outputs.loss


def train(options: dict[str, Any], lazily: bool = False) -> dict[str, Any]:
    plugin = HybridParallelPlugin(**options)
    booster = Booster(plugin=plugin)
    if lazily:
        with LazyInitContext():
            model = build("llama-tied", num_layers=4)
    else:
        model = build("llama-tied", num_layers=4)
    if options["precision"] != "fp32":
        model = model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    for _ in range(6):
        if plugin.pp_size > 1:
            loss = booster.execute_pipeline(iter([inputs_of("llama-tied")]), model, loss_of, optimizer)["loss"]
        else:
            loss = model(**inputs_of("llama-tied")).loss
            booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    dtypes = {parameter.dtype for parameter in model.unwrap().parameters()}
    return {"losses": losses, "dtypes": dtypes, "scale": getattr(optimizer.scaler, "scale_value", None)}


PIPE = {"tp_size": 1, "pp_size": 2, "num_microbatches": 2}


@pytest.mark.parametrize(
    "options",
    [
        {"tp_size": 2, "pp_size": 1, "precision": "bf16"},
        {"tp_size": 2, "pp_size": 1, "precision": "fp16", "initial_scale": 2.0**40, "max_scale": 2.0**40},
        *(
            pytest.param(PIPE | options, marks=pytest.mark.slow)
            for options in (
                {"precision": "bf16", "zero_stage": 1},
                {"precision": "fp16", "initial_scale": 2.0**40, "max_scale": 2.0**40},
                {"precision": "bf16", "pp_style": "zbv", "num_model_chunks": 2},
            )
        ),
    ],
)
def test_half_precision_learns_as_float32_does(options) -> None:
    is_scaled = options["precision"] == "fp16"
    (whole,) = run_processes(train, 1, {"tp_size": 1, "pp_size": 1, "precision": "fp32"})
    first, second = run_processes(train, 2, options)
    assert first == second
    assert first["dtypes"] == {torch.float16 if is_scaled else torch.bfloat16}
    if is_scaled:  # the first steps overflow on some rank, and all ranks drop them
        assert first["scale"] < 2.0**40
        assert first["losses"][0] == pytest.approx(first["losses"][1], rel=1e-3)
    else:
        assert first["losses"] == pytest.approx(whole["losses"], rel=3e-2)


@pytest.mark.parametrize("options", [{"tp_size": 2, "pp_size": 1}, PIPE])
def test_a_lazy_model_is_built_from_the_same_values(options) -> None:
    eager = run_processes(train, 2, options | {"precision": "fp32"})
    assert run_processes(train, 2, options | {"precision": "fp32"}, lazily=True) == eager


def train_own() -> list[list[float]]:
    """A module of the user's own, with a plan of its own, on one process and on two."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(4, 8)
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
            self.leave = nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.enter(x)
            for block in self.blocks:
                hidden = block(hidden)
            return self.leave(hidden)

    plan, found = ParallelPlan({}, stages=Stages("blocks", pre_layers=("enter",))), []
    for layers in (None, [3, 1]):
        torch.manual_seed(0)
        model: nn.Module = Own().double()
        plugin = plugin_of(pp_size=2, num_microbatches=2, custom_policy=plan, num_layers_per_stage=layers)
        booster = Booster(plugin=plugin)
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        x, losses = torch.linspace(-1, 1, 16).double().view(4, 4), []
        for _ in range(3):
            done = booster.execute_pipeline(iter([x]), model, lambda y, x: (y - x[:, :1]).square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(done["loss"]))
        found.append(losses)
    return found


def test_a_plan_of_the_users_own_and_stages_of_other_lengths() -> None:
    (even, uneven), other = run_processes(train_own, 2)
    assert [even, uneven] == other
    assert even == pytest.approx(uneven, rel=1e-9)
    assert even[-1] < even[0]


def buffers_of(options: dict[str, Any]) -> list[Any]:
    """Train on other data on each rank: running means of replicas are those of the first one, or each its own."""
    found = []
    for broadcast in (True, False):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        booster = Booster(plugin=HybridParallelPlugin(1, 1, precision="fp32", broadcast_buffers=broadcast, **options))
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        rank, _ = booster.plugin.data_parallel_rank_and_size()
        x = torch.randn(4, 2, generator=torch.Generator().manual_seed(rank))

        def run(
            x: torch.Tensor = x, model: Any = model, optimizer: Any = optimizer, booster: Booster = booster
        ) -> None:
            if "num_microbatches" in options:
                booster.execute_pipeline(iter([x]), model, lambda y, _: y.square().mean(), optimizer)
            elif torch.is_grad_enabled():
                booster.backward(model(x).square().mean(), optimizer)
            else:
                model(x)

        run()
        model.unwrap().eval()
        with torch.no_grad():  # the first forward pass has moved them apart; this one brings them together
            run()
        found += [each.tolist() for name, each in model.state_dict().items() if name.endswith("running_mean")]
    return found


@pytest.mark.parametrize("options", [{"zero_stage": 1}, {"num_microbatches": 1}])
def test_replicas_have_the_buffers_of_the_first_if_asked(options) -> None:
    first, second = run_processes(buffers_of, 2, options)
    assert first[0] == second[0]
    assert first[1] != second[1]


# ------------------------------------------------------------------------------------------ dropout


def train_with_dropout(seed: int) -> dict[str, Any]:
    """Make two steps; each rank is seeded with a number of its own."""
    torch.manual_seed(seed + torch.distributed.get_rank())
    booster, model = Booster(plugin=plugin_of(tp_size=2)), build("gpt2")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    model, optimizer, *_ = booster.boost(model.train(), torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in range(2):
        loss = model(**inputs_of("gpt2")).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norm": model.unwrap().transformer.ln_f.weight.detach()}


def test_ranks_that_share_a_tensor_drop_alike_however_they_were_seeded() -> None:
    first, second = run_processes(train_with_dropout, 2, 7)
    assert first["losses"] == second["losses"]
    assert torch.equal(first["norm"], second["norm"])
    assert first["losses"][0] != run_processes(train_with_dropout, 2, 70)[0]["losses"][0]
