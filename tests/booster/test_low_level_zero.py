# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""`LowLevelZeroPlugin`: half precision, options that it honours or refuses, and ranks that are lost."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from digits import digits
from equality import assert_equal
from torch import distributed as dist
from torch import nn

from colossal._src.testing.processes import WorldError
from colossal.booster import Booster
from colossal.booster.plugin import LowLevelZeroPlugin
from colossal.errors import ConfigError, MeshError, UnsupportedError
from colossal.nn.optimizer import DistributedLamb, HybridAdam
from colossal.tensor import full_tensor_of
from colossal.testing import TOLERANCES, fake_world, run_processes
from colossal.zero import zero_model_wrapper, zero_optim_wrapper

GLOBAL_BATCH, STEPS = 48, 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 33), nn.LayerNorm(33), nn.Linear(33, 10))


def batch_of(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = digits()
    rows = slice(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
    return torch.tensor(images[rows], dtype=torch.float32)[rank::size] / 16, torch.tensor(labels[rows])[rank::size]


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    kinds = {"hybrid": HybridAdam, "lamb": DistributedLamb, "sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    options = {"eps": 1e-3} if kind in {"hybrid", "adamw"} else {}  # or rounding of tiny gradients would be a step
    return kinds[kind](model.parameters(), lr={"sgd": 0.5}.get(kind, 0.01), **options)


def train(
    kind: str = "sgd", steps: int = STEPS, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor], float]:
    given: dict[str, Any] = {"initial_scale": 2.0**10} | options
    booster = Booster(device="cpu", plugin=LowLevelZeroPlugin(**given))
    model = build().to(dtype)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer_of(kind, model), nn.CrossEntropyLoss())
    losses = []
    for step in range(steps):
        inputs, labels = batch_of(step, *booster.plugin.data_parallel_rank_and_size())
        loss = criterion(model(inputs.to(dtype)), labels)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = {name: value.to(dtype) for name, value in model.unwrap().state_dict().items()}
    return losses, state, optimizer.scaler.scale_value


def train_plainly(
    kind: str, max_norm: float = 0.0, dtype: torch.dtype = torch.float32
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, losses = build().to(dtype), []
    optimizer = optimizer_of(kind, model)
    for step in range(STEPS):
        inputs, labels = batch_of(step, 0, 1)
        loss = nn.functional.cross_entropy(model(inputs.to(dtype)), labels)
        loss.backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


def assert_alike(ranks: list[Any], expected: tuple[list[float], dict[str, torch.Tensor]], dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    losses = torch.tensor([rank[0] for rank in ranks]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(expected[0]), rtol=tolerance.rtol, atol=tolerance.atol)
    for rank in ranks:
        for name, value in expected[1].items():
            torch.testing.assert_close(rank[1][name], value, rtol=tolerance.rtol, atol=tolerance.atol)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("stage", [1, 2])
def test_half_precision_trains_like_float32_within_its_rounding(precision: str, stage: int) -> None:
    ranks = run_processes(train, 2, "sgd", stage=stage, precision=precision, max_norm=1.0)
    assert_alike(ranks, train_plainly("sgd", max_norm=1.0), DTYPES[precision])


@pytest.mark.parametrize("kind", ["hybrid", "lamb"])
def test_own_optimizers_on_shards(kind: str) -> None:
    options = {"stage": 2, "precision": "fp32", "reduce_bucket_size_in_m": 0.001, "overlap_allgather": True}
    ranks = run_processes(train, 3, kind, dtype=torch.float64, **options)
    losses, state = train_plainly(kind, dtype=torch.float64)
    found = torch.tensor([rank[0] for rank in ranks], dtype=torch.float64).mean(0)
    assert_equal(found, torch.tensor(losses, dtype=torch.float64), "losses")
    for rank in ranks:
        for name, value in state.items():
            assert_equal(rank[1][name], value, name)


def test_copies_written_by_the_optimizer_or_by_the_plugin() -> None:
    """HybridAdam writes the bf16 parameters in its own pass; after torch's AdamW the plugin does."""
    own, others = (run_processes(train, 2, kind, stage=1, precision="bf16") for kind in ("hybrid", "adamw"))
    for name, value in own[0][1].items():
        torch.testing.assert_close(value, others[0][1][name], rtol=2e-2, atol=2e-3)
    assert own[0][0][-1] < own[0][0][0]


def test_masters_on_the_host_train_alike() -> None:
    offloaded, plain = (
        run_processes(train, 2, "hybrid", precision="bf16", cpu_offload=where)[0] for where in (True, False)
    )
    assert offloaded[0] == plain[0]


def test_the_loss_scale_falls_until_a_step_succeeds() -> None:
    ranks = run_processes(train, 2, "sgd", precision="fp16", initial_scale=2.0**32, hysteresis=1)
    assert {rank[2] for rank in ranks} == {2.0**24}
    assert all(torch.equal(ranks[0][1][name], value) for name, value in ranks[1][1].items())


def test_sums_in_another_dtype() -> None:
    ranks = run_processes(train, 2, "sgd", precision="bf16", communication_dtype=torch.float32, stage=2)
    assert_alike(ranks, train_plainly("sgd"), torch.bfloat16)


def wrap_by_hand(stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*build()) if dist.get_rank() == 0 else build().apply(_spoil)
    chunks = {"mixed_precision": None, "chunk_config_dict": {2: {"chunk_size": 99}}} if stage == 3 else None
    model = zero_model_wrapper(model, zero_stage=stage, gemini_config=chunks)
    options = None if stage == 3 else {"reduce_bucket_size": 99}
    optimizer = zero_optim_wrapper(model, optimizer_of("sgd", model), max_norm=1.0, optim_config=options)
    losses = []
    for step in range(STEPS):
        inputs, labels = batch_of(step, dist.get_rank(), dist.get_world_size())
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.state_dict(only_rank_0=False) if stage == 3 else model.state_dict())


def _spoil(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 7.0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_two_wrappers_start_from_the_first_rank(stage: int) -> None:
    assert_alike(run_processes(wrap_by_hand, 2, stage), train_plainly("sgd", max_norm=1.0), torch.float32)


def leave(root: str) -> None:
    """One rank dies in the middle of training."""
    booster = Booster(device="cpu", plugin=LowLevelZeroPlugin(precision="fp32", stage=2))
    model = build()
    model, optimizer, *_ = booster.boost(model, optimizer_of("adamw", model))
    for step in range(3):
        if step == 1 and dist.get_rank() == 1:
            raise SystemExit("this rank is gone")
        inputs, labels = batch_of(step, dist.get_rank(), dist.get_world_size())
        booster.backward(nn.functional.cross_entropy(model(inputs), labels), optimizer)
        optimizer.step()
    Path(root, f"finished-{dist.get_rank()}").touch()


def test_a_lost_rank_is_an_error_on_the_others(tmp_path: Path) -> None:
    with pytest.raises(WorldError):
        run_processes(leave, 2, str(tmp_path), timeout_seconds=60)
    assert list(tmp_path.iterdir()) == []


def build_unlike() -> None:
    model = nn.Linear(4, 3 + dist.get_rank())
    Booster(device="cpu", plugin=LowLevelZeroPlugin()).boost(model, optimizer_of("sgd", model))


def test_ranks_with_different_models_are_told() -> None:
    with pytest.raises(WorldError, match="2 of 2 processes failed") as error:
        run_processes(build_unlike, 2)
    _, _, reports = str(error.value).partition("\n")
    assert reports.count("Build the same ones on all ranks") == 2


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"stage": 3}, ConfigError, "Pass 1 or 2"),
        ({"precision": "int8"}, ConfigError, "precision='int8'"),
        ({"max_norm": -1.0}, ConfigError, "max_norm=-1.0"),
        ({"norm_type": 0.0}, ConfigError, "norm_type=0.0"),
        ({"extra_dp_size": 0}, ConfigError, "extra_dp_size=0"),
        ({"reduce_bucket_size_in_m": 0}, ConfigError, "at least one element"),
        ({"growth_factor": 1.0}, ConfigError, "growth_factor"),
        ({"use_fp8": True}, UnsupportedError, "mixed_precision='fp8'"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        LowLevelZeroPlugin(**options)


def test_replicas_divide_the_ranks() -> None:
    with fake_world(4), pytest.raises(MeshError, match="Found 3 for 4 ranks"):
        Booster(device="cpu", plugin=LowLevelZeroPlugin(extra_dp_size=3)).boost(
            model := build(), optimizer_of("sgd", model)
        )


def test_a_model_without_optimizer_only_evaluates() -> None:
    with fake_world(2):
        model, optimizer, *_ = Booster(device="cpu", plugin=LowLevelZeroPlugin(precision="bf16")).boost(build())
        assert optimizer is None
        assert model(torch.ones(2, 64)).dtype == torch.float32


def test_inputs_are_cast_only_on_request() -> None:
    with fake_world(2):
        booster = Booster(device="cpu", plugin=LowLevelZeroPlugin(precision="bf16", cast_inputs=False))
        model, *_ = booster.boost(build())
        assert model(torch.ones(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="dtype"):
            model(torch.ones(2, 64))


DOCUMENTED: dict[int, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    1: (None, {"verbose": True, "reduce_bucket_size": 99}),
    3: (
        {
            "strict_ddp_mode": True,
            "device": torch.device("cpu"),
            "placement_policy": "cpu",
            "pin_memory": True,
            "hidden_dim": 8,
            "search_range_mb": 1,
            "min_chunk_size_mb": 0,
            "mixed_precision": None,
        },
        {"verbose": False},
    ),
}


def train_as_documented(stage: int) -> list[float]:
    gemini_config, optim_config = DOCUMENTED[stage]
    model = zero_model_wrapper(build(), stage, gemini_config, verbose=True)
    optimizer = zero_optim_wrapper(model, HybridAdam(model.parameters(), lr=0.01), optim_config=optim_config)
    losses = []
    for step in range(STEPS):
        inputs, labels = batch_of(step, dist.get_rank(), dist.get_world_size())
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", DOCUMENTED)
def test_documented_calls_of_the_two_wrappers_train_like_one_process(stage: int) -> None:
    expected = run_processes(train_as_documented, 1, stage)[0]
    ranks = run_processes(train_as_documented, 2, stage)
    means = torch.tensor(ranks).mean(0)
    torch.testing.assert_close(means, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert expected[-1] < 0.8 * expected[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_loss_scale_may_be_in_optim_config(stage: int) -> None:
    """As programs wrote it whose options are one dictionary."""
    options = {"initial_scale": 8.0, "max_norm": 0.5}
    with fake_world(2):
        model = zero_model_wrapper(build().half(), stage)
        optimizer = zero_optim_wrapper(model, optimizer_of("sgd", model), max_norm=0.5, optim_config=options)
        assert optimizer.scale_loss(torch.ones((), device="cpu")).item() == 8.0
        with pytest.raises(ConfigError, match=r"max_norm=1.0.* next to 0.5"):
            optimizer.set_max_norm(1.0)


@pytest.mark.parametrize(
    ("wrap", "match"),
    [
        (lambda m: zero_model_wrapper(m, zero_stage=4), "Found stage=4"),
        (lambda m: zero_model_wrapper(m, zero_stage=3, gemini_config={"use_fp8": True}), "use_fp8"),
        (
            lambda m: zero_optim_wrapper(
                zero_model_wrapper(m, zero_stage=3), optimizer_of("sgd", m), optim_config={"cpu_offload": True}
            ),
            "gemini_config of zero_model_wrapper",
        ),
        (lambda m: zero_model_wrapper(m, gemini_config={"placement_policy": "auto"}), "belongs to stage 3"),
        (lambda m: zero_optim_wrapper(m, optimizer_of("sgd", m)), "zero_model_wrapper returned"),
        (
            lambda m: zero_optim_wrapper(zero_model_wrapper(m), optimizer_of("sgd", m), optim_config={"bucket": 1}),
            "Found bucket. Remove or correct it",
        ),
        (
            lambda m: zero_optim_wrapper(
                zero_model_wrapper(m), optimizer_of("sgd", m), max_norm=1.0, optim_config={"max_norm": 2.0}
            ),
            "Found max_norm=1.0, and 2.0 in optim_config",
        ),
    ],
)
def test_wrappers_say_what_they_do_not_know(wrap: Any, match: str) -> None:
    with fake_world(2), pytest.raises((ConfigError, UnsupportedError), match=match):
        wrap(build())


def test_shards_put_together_are_the_parameters() -> None:
    for rank in run_processes(put_together, 3):
        assert rank


def train_on_disk(root: str, fraction: float, saved: bool) -> tuple[list[float], list[float]]:
    """Train with states on a disk or in memory, save halfway, and go on from there with them on the other side."""
    options = {"lr": 0.01, "nvme_offload_dir": root}
    losses = []
    for part, share in enumerate((fraction, 1.0 - fraction)):
        booster = Booster(device="cpu", plugin=LowLevelZeroPlugin(stage=2, precision="bf16"))
        model = build()
        optimizer = HybridAdam(model.parameters(), nvme_offload_fraction=share, **options)
        model, optimizer, *_ = booster.boost(model, optimizer)
        if part and saved:
            booster.load_model(model, Path(root, "model"))
            booster.load_optimizer(optimizer, Path(root, "optimizer"))
        steps = range(part * 4, part * 4 + 4) if saved else range(8 - 8 * part)
        for step in steps:
            inputs, labels = batch_of(step, *booster.plugin.data_parallel_rank_and_size())
            loss = nn.functional.cross_entropy(model(inputs), labels)
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if not part:
            booster.save_model(model, Path(root, "model"), use_safetensors=True)
            booster.save_optimizer(optimizer, Path(root, "optimizer"), shard=True)
    shards: list[Any] = list(optimizer.parameters)
    return losses, [shard.data.to_local().sum().item() for shard in shards]


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_states_on_a_disk_under_zero(fraction: float, tmp_path: Path) -> None:
    plain, split = (
        run_processes(train_on_disk, 2, str(tmp_path), share, saved=saved)
        for share, saved in ((0.0, False), (fraction, True))
    )
    assert [rank[0] for rank in plain] == [rank[0] for rank in split]


def train_adapters(plugin: bool) -> dict[str, torch.Tensor]:
    """Train low-rank adapters: by the plugin on this rank's rows, or by peft alone on all."""
    config = peft.LoraConfig(r=3, target_modules=["0", "2"], init_lora_weights=False)
    model = build().double()
    if plugin:
        booster = Booster(device="cpu", plugin=LowLevelZeroPlugin(stage=2, precision="fp32"))
        torch.manual_seed(9 + dist.get_rank())
        adapted = booster.enable_lora(model, lora_config=config)
        boosted, optimizer, *_ = booster.boost(adapted, optimizer_of("hybrid", adapted))
    else:
        torch.manual_seed(9)
        adapted = boosted = peft.get_peft_model(model, config)
        optimizer = optimizer_of("hybrid", adapted)
    rank, size = (dist.get_rank(), dist.get_world_size()) if plugin else (0, 1)
    for step in range(STEPS):
        inputs, labels = batch_of(step, rank, size)
        loss = nn.functional.cross_entropy(boosted(inputs.double()), labels)
        booster.backward(loss, optimizer) if plugin else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in adapted.named_parameters()}


def test_adapters_train_as_by_peft_alone() -> None:
    expected = train_adapters(plugin=False)
    for reached in run_processes(train_adapters, 2, plugin=True):
        for name, value in expected.items():
            assert_equal(reached[name], value, name)
    start = dict(build().double().named_parameters())
    assert torch.equal(expected["base_model.model.0.base_layer.weight"], start["0.weight"])
    assert "base_model.model.2.lora_B.default.weight" in expected


def put_together() -> bool:
    booster = Booster(device="cpu", plugin=LowLevelZeroPlugin(precision="fp32"))
    model = build()
    model, optimizer, *_ = booster.boost(model, optimizer_of("adamw", model))
    pairs = optimizer.masters.pairs
    return all(torch.equal(full_tensor_of(shard), working) for shard, working in pairs.items())
