# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""`GeminiPlugin`: precisions, checkpoints of any plugin and world, adapters, lazy models, and what it refuses."""

import copy
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chosen import crossed
from digits import digits
from equality import assert_equal, assert_within_rounding
from torch import distributed as dist
from torch import nn

from colossal._src.testing.processes import PRELOADED
from colossal.booster import Booster
from colossal.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colossal.errors import ConfigError, MeshError, UnsupportedError
from colossal.lazy import LazyInitContext, lazy_tensors
from colossal.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossal.nn.optimizer import DistributedLamb, HybridAdam
from colossal.tensor import full_tensor_of
from colossal.testing import fake_world, run_processes, run_threads

PRELOADED.extend(["peft", "transformers.models.gpt2.modeling_gpt2"])

GLOBAL_BATCH, STEPS, BEFORE = 24, 6, 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHUNKS = {size: {"chunk_size": 700} for size in range(1, 5)}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "static": {},
    "ahead, from the host": {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "max_prefetch": 1},
    "halves": {"offload_optim_frac": 0.5, "shard_param_frac": 0.5},
    "auto": {"placement_policy": "auto", "device_budget": 60_000},
    "replicas": {"extra_dp_size": 2},
}


class Net(nn.Module):
    """A tie, a scalar, a frozen layer, a buffer, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 17)
        self.body = nn.ModuleList([nn.Linear(17, 17), nn.LayerNorm(17)])
        self.tied = nn.Linear(17, 17)
        self.tied.weight = self.body[0].weight
        self.frozen = nn.Linear(17, 17).requires_grad_(False)
        self.factor = nn.Parameter(torch.tensor(0.9))
        self.head = nn.Linear(17, 10)
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.embed(x))
        for layer in (*self.body, self.tied, self.frozen):
            hidden = hidden + torch.tanh(layer(hidden)) * self.factor
        return self.head(hidden) * self.scale[0]


def build(kind: Callable[[], nn.Module] = Net) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return kind().double()  # half precision is cast from it


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = digits()
    rows = slice(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
    return torch.tensor(images[rows], dtype=torch.float64) / 16, torch.tensor(labels[rows])


BATCHES = [batch_of(step) for step in range(STEPS)]


def optimizer_of(model: nn.Module, kind: str = "adamw") -> torch.optim.Optimizer:
    decayed = [p for name, p in model.named_parameters() if p.requires_grad and name.endswith("weight")]
    others = [p for name, p in model.named_parameters() if p.requires_grad and not name.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return {"adamw": torch.optim.AdamW, "hybrid": HybridAdam}[kind](groups, lr=0.01, eps=1e-3)


def gemini(placement: str = "static", precision: str = "fp32", **options: Any) -> GeminiPlugin:
    extra = dict(PLACEMENTS[placement])
    if placement == "replicas" and dist.get_world_size() < 4:
        extra = {}
    return GeminiPlugin(
        **({"precision": precision, "initial_scale": 2.0**10, "chunk_config_dict": CHUNKS} | extra | options)
    )


OTHERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero1": lambda: LowLevelZeroPlugin(precision="fp32"),
    "zero2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32", reduce_bucket_size_in_m=0.001),
}


def boost(plugin: Any, model: nn.Module, kind: str = "adamw") -> tuple[Booster, tuple[Any, ...]]:
    booster = Booster(device="cpu", plugin=plugin)
    model = copy.deepcopy(model)
    optimizer = optimizer_of(model, kind)
    schedule = CosineAnnealingWarmupLR(optimizer, total_steps=STEPS + 1, warmup_steps=2)
    return booster, booster.boost(model, optimizer, nn.CrossEntropyLoss(), None, schedule)


def go_on(booster: Booster, boosted: tuple[Any, ...], first: int, last: int) -> list[float]:
    model, optimizer, criterion, _, schedule = boosted
    rank, size = booster.plugin.data_parallel_rank_and_size()
    losses = []
    for inputs, labels in BATCHES[first:last]:
        loss = criterion(model(inputs.chunk(size)[rank]), labels.chunk(size)[rank])
        booster.backward(loss, optimizer)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_of(model: Any) -> dict[str, torch.Tensor]:
    from colossal._src.tensor import backing_shard

    return {
        name: full_tensor_of(backing_shard(value)).detach().clone().double()
        for name, value in model.unwrap().state_dict(keep_vars=True).items()
    }


def train(model: nn.Module, kind: str, placement: str, precision: str, **options: Any) -> Any:
    booster, boosted = boost(gemini(placement, precision, **options), model, kind)
    return go_on(booster, boosted, 0, STEPS), state_of(boosted[0])


def train_by(plugin: Callable[[], Any], model: nn.Module, kind: str) -> Any:
    booster, boosted = boost(plugin(), model, kind)
    return go_on(booster, boosted, 0, STEPS), state_of(boosted[0])


def close(ranks: list[Any], expected: Any, exact: Any = None, precision: str = "fp32") -> None:
    """Compare losses and states: in float64, or by what rounding does in half precision to the exact ones."""

    def check(found: torch.Tensor, wanted: torch.Tensor, of_exact: torch.Tensor | None, name: str) -> None:
        if of_exact is None:
            assert_equal(found, wanted, name)
        else:
            assert_within_rounding(found, wanted, of_exact, DTYPES[precision], name)

    if precision == "fp32":
        exact = None
    means = torch.tensor([rank[0] for rank in ranks], dtype=torch.float64).mean(0)
    losses = torch.tensor(expected[0], dtype=torch.float64)
    check(means, losses, None if exact is None else torch.tensor(exact[0], dtype=torch.float64), "losses")
    for rank in ranks:
        assert rank[1].keys() == expected[1].keys()
        for name, value in expected[1].items():
            check(rank[1][name], value, None if exact is None else exact[1][name], name)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build()


@pytest.fixture(scope="module")
def alone(model: nn.Module) -> dict[tuple[str, str], Any]:
    """One process: without a plugin in float32, and by LowLevelZeroPlugin in half precision."""
    found: dict[tuple[str, str], Any] = {}
    for kind in KINDS:
        (found[kind, "fp32"],) = run_threads(train_by, 1, OTHERS["none"], model, kind)
        for precision in ("bf16", "fp16"):
            plugin = lambda p=precision: LowLevelZeroPlugin(precision=p, initial_scale=2.0**10)  # noqa: E731
            (found[kind, precision],) = run_threads(train_by, 1, plugin, model, kind)
    return found


KINDS = ("adamw", "hybrid", "sgd")


@pytest.mark.chosen
@pytest.mark.parametrize(
    ("kind", "placement", "precision", "size"), crossed(KINDS, PLACEMENTS, DTYPES, [1, 2, 4], one_in=3)
)
def test_it_trains_like_one_process(kind: str, placement: str, precision: str, size: int, model, alone) -> None:
    ranks = run_threads(train, size, model, kind, placement, precision)
    close(ranks, alone[kind, precision], alone[kind, "fp32"], precision)
    assert all(torch.equal(ranks[0][1][name], value) for each in ranks for name, value in each[1].items())


def test_a_run_that_moves(model, alone) -> None:
    start = dict(model.named_parameters())
    for (_, precision), (losses, state) in alone.items():
        assert losses[-1] < 0.95 * losses[0], precision
        assert all((state[name] - value).abs().max() > 1e-3 for name, value in start.items() if value.requires_grad)


def test_without_masters_small_updates_get_lost(model, alone) -> None:
    ranks = run_threads(train, 2, model, "sgd", "static", "bf16", master_weights=False)
    _, state = alone["sgd", "bf16"]
    for name, value in state.items():
        torch.testing.assert_close(ranks[0][1][name], value, rtol=5e-2, atol=5e-2, msg=name)
        assert torch.equal(ranks[0][1][name], ranks[0][1][name].bfloat16().float())


# ------------------------------------------------------------------------------------------------- checkpoints

WORLDS: list[tuple[str, int]] = [
    ("none", 1),
    ("ddp", 2),
    ("zero1", 2),
    ("zero2", 4),
    ("gemini static", 1),
    ("gemini static", 2),
    ("gemini static", 4),
    ("gemini replicas", 4),
    ("gemini ahead, from the host", 2),
    ("gemini auto", 2),
]


def plugin_of(kind: str) -> Any:
    return gemini(kind.removeprefix("gemini ")) if kind.startswith("gemini ") else OTHERS[kind]()


def save(kind: str, model: nn.Module, folder: Path, use_async: bool) -> Any:
    booster, boosted = boost(plugin_of(kind), model)
    go_on(booster, boosted, 0, BEFORE)
    booster.save(folder, *boosted[:2], boosted[4], BEFORE, use_async=use_async)
    losses = go_on(booster, boosted, BEFORE, STEPS)
    booster.checkpoint_io.synchronize()
    return losses, state_of(boosted[0])


def load_all(kind: str, model: nn.Module, folders: list[Path]) -> list[Any]:
    found = []
    for folder in folders:
        booster, boosted = boost(plugin_of(kind), model)
        assert booster.load(folder, *boosted[:2], boosted[4]) == BEFORE
        found.append((go_on(booster, boosted, BEFORE, STEPS), state_of(boosted[0])))
    return found


@pytest.mark.slow
def test_any_world_goes_on_from_any_other(model, alone, tmp_path: Path) -> None:
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        nn.init.constant_(parameter, 3.0)
    folders = [tmp_path / f"{number}" for number in range(len(WORLDS))]
    losses, state = alone["adamw", "fp32"]
    expected = losses[BEFORE:], state
    for folder, (kind, size) in zip(folders, WORLDS, strict=True):
        close(run_threads(save, size, kind, model, folder, False), expected)
    for kind, size in WORLDS:
        ranks = run_threads(load_all, size, kind, other, folders)
        for reached in zip(*ranks, strict=True):
            close(list(reached), expected)


def save_in_processes(root: str) -> Any:
    """Save by FSDP, and asynchronously by two placements."""
    return [
        save("fsdp", build(), Path(root, "fsdp"), False),
        *(save(f"gemini {each}", build(), Path(root, each), True) for each in ("static", "ahead, from the host")),
    ]


def load_by_fsdp(root: str) -> Any:
    return load_all("fsdp", build(), [Path(root, each) for each in ("static", "ahead, from the host")])


@pytest.mark.slow
def test_processes_save_asynchronously_and_fsdp_goes_on_too(model, alone, tmp_path: Path) -> None:
    losses, state = alone["adamw", "fp32"]
    expected = losses[BEFORE:], state
    for run in (run_processes(save_in_processes, 2, str(tmp_path)), run_processes(load_by_fsdp, 2, str(tmp_path))):
        for reached in zip(*run, strict=True):
            close(list(reached), expected)
    folders = [tmp_path / each for each in ("fsdp", "static", "ahead, from the host")]
    for reached in zip(*run_threads(load_all, 3, "gemini static", model, folders), strict=True):
        close(list(reached), expected)


def save_apart(model: nn.Module, folder: Path, shard: bool, precision: str) -> Any:
    booster, boosted = boost(gemini("halves", precision), model, "hybrid")
    go_on(booster, boosted, 0, BEFORE)
    name = "" if shard else ".safetensors"
    booster.save_model(boosted[0], folder / f"model{name}", shard=shard, use_safetensors=True)
    booster.save_optimizer(boosted[1], folder / f"optimizer{'' if shard else '.bin'}", shard=shard)
    booster.save_lr_scheduler(boosted[4], folder / "schedule")
    return go_on(booster, boosted, BEFORE, STEPS), state_of(boosted[0])


def load_apart(model: nn.Module, folder: Path, shard: bool, placement: str, precision: str) -> Any:
    booster, boosted = boost(gemini(placement, precision), model, "hybrid")
    name = "" if shard else ".safetensors"
    booster.load_model(boosted[0], folder / f"model{name}")
    booster.load_optimizer(boosted[1], folder / f"optimizer{'' if shard else '.bin'}")
    booster.load_lr_scheduler(boosted[4], folder / "schedule")
    return go_on(booster, boosted, BEFORE, STEPS), state_of(boosted[0])


@pytest.mark.chosen
@pytest.mark.parametrize(("shard", "precision"), crossed([False, True], DTYPES, one_in=2))
def test_parts_are_saved_and_loaded_alone(model, alone, tmp_path: Path, shard: bool, precision: str) -> None:
    losses, state = alone["hybrid", "fp32"]
    expected = run_threads(save_apart, 2, model, tmp_path, shard, precision)
    mean = torch.tensor([rank[0] for rank in expected], dtype=torch.float64).mean(0).tolist(), expected[0][1]
    for placement, size in (("static", 1), ("auto", 2), ("ahead, from the host", 3), ("replicas", 4)):
        ranks = run_threads(load_apart, size, model, tmp_path, shard, placement, precision)
        close(ranks, mean, (losses[BEFORE:], state), precision)


def save_whole(model: nn.Module, path: Path) -> None:
    booster, boosted = boost(gemini(), model)
    booster.save_model(boosted[0], path, shard=False, use_safetensors=True)


def test_the_file_is_that_of_the_plain_model(model, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run_threads(save_whole, 2, model, tmp_path / "model.safetensors")
    found, expected = load_file(tmp_path / "model.safetensors"), model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert set(found) >= set(expected) - {"tied.weight"}


# ------------------------------------------------------------------------------------------------- adapters


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh())
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def train_adapters(start: nn.Module, folder: Path | None, loaded: Path | None, placement: str, plain: bool) -> Any:
    import peft

    booster = Booster(device="cpu", plugin=None if plain else gemini(placement))
    model = copy.deepcopy(start)
    config = peft.LoraConfig(r=4, target_modules=["0", "2", "head"], init_lora_weights=False)
    if loaded is None:
        model = booster.enable_lora(model, lora_config=config)
    else:
        model = booster.enable_lora(model, pretrained_dir=str(loaded))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.requires_grad and loaded is None:
                parameter.copy_(torch.linspace(-0.3, 0.3 + 0.1 * number, parameter.numel()).view_as(parameter))
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.5)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.CrossEntropyLoss())
    rank, size = (0, 1) if plain else booster.plugin.data_parallel_rank_and_size()
    losses = []
    for inputs, labels in BATCHES[:BEFORE]:
        loss = criterion(model(inputs.chunk(size)[rank]), labels.chunk(size)[rank])
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if folder is not None:
        booster.save_lora_as_pretrained(model, folder, use_safetensors=True)
    return losses, {}


@pytest.mark.parametrize("placement", ["static", "ahead, from the host", "auto"])
@pytest.mark.parametrize("size", [1, 2])
def test_adapters(placement: str, size: int, tmp_path: Path) -> None:
    start = build(Classifier)
    (alone,) = run_threads(train_adapters, 1, start, tmp_path / "alone", None, placement, True)
    ranks = run_threads(train_adapters, size, start, tmp_path / "own", None, placement, False)
    close(ranks, alone)
    from safetensors.torch import load_file

    own, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("own", "alone"))
    assert own.keys() == theirs.keys()
    for name, value in theirs.items():
        assert_equal(own[name].double(), value.double(), name)
    (again,) = run_threads(train_adapters, 1, start, None, tmp_path / "alone", placement, True)
    close(run_threads(train_adapters, size, start, None, tmp_path / "own", placement, False), again)


# ------------------------------------------------------------------------------------------------- lazy models


def boost_lazily(lazily: bool, precision: str, placement: str) -> Any:
    torch.manual_seed(7)
    if lazily:
        with LazyInitContext():
            model = Net()
    else:
        model = Net()
    assert bool(list(lazy_tensors(model))) == lazily
    booster = Booster(device="cpu", plugin=gemini(placement, precision))
    boosted = booster.boost(model, optimizer_of(model), nn.CrossEntropyLoss())
    assert not list(lazy_tensors(boosted[0]))
    model, optimizer, criterion, *_ = boosted
    for inputs, labels in BATCHES[:2]:
        booster.backward(criterion(model(inputs.float()), labels), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


def all_lazily() -> Any:
    return [
        [boost_lazily(lazily, precision, placement) for lazily in (False, True)]
        for precision, placement in (("fp32", "static"), ("bf16", "ahead, from the host"), ("fp32", "auto"))
    ]


def test_lazy_models_start_and_train_bit_for_bit_like_others() -> None:
    for rank in run_processes(all_lazily, 2):
        for eager, lazy in rank:
            assert eager.keys() == lazy.keys()
            assert all(torch.equal(value, lazy[name]) for name, value in eager.items())


STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
M_MMAP_THRESHOLD = -3  # of malloc.h
WIDTH, BLOCKS, RANKS = 1024, 12, 4
BLOCK = (WIDTH * WIDTH + WIDTH) * 4  # bytes


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))


def bytes_in(name: str) -> int:
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


def rise(lazily: bool) -> int:
    """Return how far resident memory rose while a model was built and boosted."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # or freed blocks stay resident, for the next ones
    plugin = GeminiPlugin(precision="fp32", chunk_config_dict={RANKS: {"chunk_size": 2 * BLOCK // 4}})
    booster = Booster(device="cpu", plugin=plugin)
    with LazyInitContext():
        warm = nn.Sequential(nn.Linear(64, 64))
    booster.boost(warm, torch.optim.AdamW(warm.parameters()))
    before = bytes_in("VmRSS")
    CLEAR_REFS.write_text("5")
    if lazily:
        with LazyInitContext():
            model = Blocks()
    else:
        model = Blocks()
    booster.boost(model, torch.optim.AdamW(model.parameters()))
    return bytes_in("VmHWM") - before


@pytest.mark.slow
def test_no_rank_holds_more_than_its_part_and_one_parameter() -> None:
    limit = BLOCKS * BLOCK / RANKS + 4 * BLOCK  # a parameter, what it is cut with, what the backend still looks at
    lazy, eager = (max(run_processes(rise, RANKS, lazily, fresh=True)) for lazily in (True, False))
    assert lazy < limit < BLOCKS * BLOCK < eager


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"precision": "int8"}, ConfigError, "GeminiPlugin takes the precision.*precision='int8'"),
        ({"max_norm": -1.0}, ConfigError, "max_norm=-1.0"),
        ({"norm_type": 0.0}, ConfigError, "norm_type=0.0"),
        ({"extra_dp_size": 0}, ConfigError, "extra_dp_size=0"),
        ({"growth_factor": 1.0}, ConfigError, "growth_factor"),
        ({"placement_policy": "gpu"}, ConfigError, "Found 'gpu'.*Pass 'static'"),
        ({"tp_size": 0}, ConfigError, "Found tp_size=0. Pass 1 or more"),
        (
            {"gpu_margin_mem_ratio": 0.5, "offload_optim_frac": 0.5},
            UnsupportedError,
            "gpu_margin_mem_ratio=0.5.*offload_optim_frac",
        ),
        (
            {"gpu_margin_mem_ratio": 0.5, "placement_policy": "auto"},
            UnsupportedError,
            "gpu_margin_mem_ratio=0.5.*offload_optim_frac",
        ),
        ({"use_fp8": True}, UnsupportedError, "use_fp8=True.*mixed_precision='fp8'"),
        ({"max_prefetch": -1}, ConfigError, "Found -1"),
        ({"shard_param_frac": 1.5}, ConfigError, "shard_param_frac"),
        ({"offload_param_frac": 0.5}, ConfigError, "offload_optim_frac"),
        ({"placement_policy": "auto", "shard_param_frac": 0.5}, ConfigError, "'auto' sets the fractions itself"),
        ({"device_budget": -5}, ConfigError, "device_budget is a number of bytes. Found -5"),
        ({"warmup_non_model_data_ratio": 2, "placement_policy": "auto"}, ConfigError, "warmup_non_model_data_ratio"),
        ({"steady_cuda_cap_ratio": 2.0}, ConfigError, "steady_cuda_cap_ratio"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        GeminiPlugin(**options)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"extra_dp_size": 3}, MeshError, "Found 3 for 4 ranks"),
        ({"device": "cuda"}, ConfigError, "Found device='cuda' for a rank on cpu"),
        ({"enable_flash_attention": True}, UnsupportedError, "enable_flash_attention"),
        ({"chunk_init_device": "cuda"}, ConfigError, "chunk_init_device='cuda'"),
        ({"chunk_config_dict": {2: {"chunk_size": 10}}}, ConfigError, "for 4 ranks. Add an entry"),
        ({"chunk_config_dict": {4: {"chunk_size": 0}}}, ConfigError, "at least one element"),
        ({"chunk_config_dict": None, "min_chunk_size_m": -1}, ConfigError, "min_chunk_size_m"),
        ({"chunk_config_dict": None, "search_range_m": -1}, ConfigError, "search_range_m"),
        ({"device_budget": 1000}, ConfigError, "bytes needed on cpu for parameters.*device_budget=1000"),
        ({"device_budget": 4000}, ConfigError, "bytes needed on cpu for optimizer.*device_budget=4000"),
    ],
)
def test_what_is_refused_when_boosting(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with fake_world(4), pytest.raises(error, match=match):
        boost(gemini(**options), build())


def test_boosting_twice_is_refused() -> None:
    with fake_world(2):
        booster, (model, *_) = boost(gemini(), build())
        for again in (model, model.unwrap()):
            with pytest.raises(
                ConfigError, match="is in one already. Wrap or boost it once|boosted already. Boost once"
            ):
                booster.boost(again)


def boost_on(model: nn.Module, devices: list[Any]) -> Any:
    with pytest.raises(ConfigError) as error:
        boost(gemini(device=devices[dist.get_rank()]), copy.deepcopy(model))
    return str(error.value)


def test_ranks_have_devices_of_their_own() -> None:
    """They agree on the plugin, and then each looks at its device: here they are CPUs."""
    for rank, message in enumerate(run_threads(boost_on, 2, build(), ["cuda:0", torch.device("cuda", 1)])):
        assert f"Found device='cuda:{rank}' for a rank on cpu" in message
    for message in run_threads(boost_on, 2, build(), ["cuda:0", "cpu"]):
        assert "the plugin" in message


def test_optimizers_that_look_at_more_than_elements() -> None:
    with fake_world(2):
        booster, model = Booster(device="cpu", plugin=gemini()), build()
        with pytest.raises(UnsupportedError, match="Adafactor"):
            booster.boost(model, torch.optim.Adafactor(model.parameters()))


def test_a_foreign_parameter() -> None:
    with fake_world(2):
        booster, model = Booster(device="cpu", plugin=gemini()), build()
        with pytest.raises(ConfigError, match="Found 1 that the model does not have"):
            booster.boost(model, torch.optim.SGD([*model.parameters(), nn.Linear(2, 2).weight], lr=0.1))


def test_a_model_without_optimizer_only_evaluates() -> None:
    with fake_world(2):
        model, optimizer, *_ = Booster(device="cpu", plugin=GeminiPlugin()).boost(build())
        assert optimizer is None
        assert model(torch.ones(2, 64)).dtype == torch.float32
        model, *_ = Booster(device="cpu", plugin=GeminiPlugin(precision="fp32", force_outputs_fp32=True)).boost(
            build().double()
        )
        assert model(torch.ones(2, 64).double()).dtype == torch.float32


def boost_unlike(models: list[nn.Module]) -> str:
    with pytest.raises(ConfigError) as error:
        boost(gemini(), models[dist.get_rank()])
    return str(error.value)


def test_ranks_with_different_models_are_told() -> None:
    models = [build(), build(Classifier)]
    for message in run_threads(boost_unlike, 2, models):
        assert "Build the same ones on all ranks" in message


def train_lamb(model: nn.Module, plain: bool) -> Any:
    booster = Booster(device="cpu", plugin=None if plain else gemini())
    model = copy.deepcopy(model)
    boosted = booster.boost(model, DistributedLamb(model.parameters(), lr=0.01), nn.CrossEntropyLoss())
    rank, size = (0, 1) if plain else booster.plugin.data_parallel_rank_and_size()
    for inputs, labels in BATCHES[:2]:
        booster.backward(boosted[2](boosted[0](inputs.chunk(size)[rank]), labels.chunk(size)[rank]), boosted[1])
        boosted[1].step()
        boosted[1].zero_grad()
    return [0.0], state_of(boosted[0])


def test_own_optimizers_know_of_ranges(model) -> None:
    (alone,) = run_threads(train_lamb, 1, model, True)
    close(run_threads(train_lamb, 3, model, False), alone)


# ------------------------------------------------------------------------------------------------- real processes


def train_in_a_process(placement: str, precision: str) -> Any:
    return train(build(), "sgd", placement, precision)


@pytest.mark.parametrize(("placement", "precision"), [("static", "fp16"), ("auto", "fp32"), ("replicas", "bf16")])
def test_ranks_that_are_processes(placement: str, precision: str, alone) -> None:
    close(
        run_processes(train_in_a_process, 4, placement, precision),
        alone["sgd", precision],
        alone["sgd", "fp32"],
        precision,
    )
