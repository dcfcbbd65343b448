"""Checkpoints of divided models are those of one process, bit for bit, and any world goes on from them."""

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from families import MODELS, PAIRED, build, inputs_of
from float64 import KeepFloat64
from safetensors import safe_open
from torch import distributed as dist
from torch import nn

from colossal._src.checkpoint_io.file_writers import SafetensorsWriter
from colossal.booster import Booster
from colossal.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossal.errors import CheckpointError
from colossal.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossal.testing import WorldError, run_processes

BEFORE, AFTER, BATCH = 2, 2, 4
FAMILIES = ("llama-tied", "gpt2", "mixtral", "bert")
PIPELINE = {"tp_size": 1, "pp_size": 2, "num_microbatches": 2}
V = PIPELINE | {"pp_style": "zbv", "num_model_chunks": 2}
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-pp2": (4, PIPELINE | {"tp_size": 2}),
    "tp2-pp2-v": (4, V | {"tp_size": 2}),
    "tp2-dp2-zero1": (4, {"tp_size": 2, "pp_size": 1, "zero_stage": 1, "overlap_allgather": True}),
    "tp2-dp2-zero2": (4, {"tp_size": 2, "pp_size": 1, "zero_stage": 2, "dp_outside": False}),
    "pp2-dp2-zero1": (4, PIPELINE | {"zero_stage": 1, "dp_outside": False}),
    "pp2-interleaved-dp2": (4, PIPELINE | {"pp_style": "interleaved", "num_model_chunks": 2}),
}
OTHERS: dict[str, Any] = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="bf16", min_chunk_size_m=0.001, search_range_m=0.001),
}


def start(name: str, plugin: Any, dtype: torch.dtype = torch.float64) -> tuple[Booster, Any]:
    """Boost a model with values of its own, and an optimizer of two groups, of which a stage may lack one."""
    booster, model = Booster(device="cpu", plugin=plugin), build(name, num_layers=4).to(dtype)
    layers = [each for name, each in model.named_parameters() if ".0." in name]
    others = [each for name, each in model.named_parameters() if ".0." not in name]
    optimizer = torch.optim.AdamW([{"params": layers, "weight_decay": 0.1}, {"params": others, "lr": 0.02}], lr=0.01)
    schedule = CosineAnnealingWarmupLR(optimizer, total_steps=BEFORE + AFTER, warmup_steps=2)
    return booster, booster.boost(model, optimizer, loss_of, None, schedule)


def loss_of(outputs: Any, _inputs: Any = None) -> torch.Tensor:
    return outputs.loss


def train(name: str, booster: Booster, boosted: Any, first: int, steps: int) -> None:
    model, optimizer, criterion, _, schedule = boosted
    rank, size = booster.plugin.data_parallel_rank_and_size()
    for step in range(first, first + steps):
        pairs = [inputs_of(name, num_changed=each) for each in (step, step + 4)]
        dtype = next(model.parameters()).dtype
        batch = {key: torch.cat([pair[key] for pair in pairs]).chunk(size)[rank] for key in pairs[0]}
        batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
        with KeepFloat64() if dtype == torch.float64 else nullcontext():
            if isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.pp_size > 1:
                booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
            else:
                booster.backward(criterion(model(**batch)), optimizer)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def save(booster: Booster, boosted: Any, root: Path) -> None:
    """Save in both formats, as one file and as several."""
    model, optimizer, _, _, schedule = boosted
    booster.save_model(model, root / "model", shard=True, use_safetensors=True, size_per_shard=0.1)
    booster.save_model(model, root / "bin", shard=True, size_per_shard=0.1)
    booster.save_model(model, root / "model.safetensors", use_safetensors=True, use_async=True)
    booster.save_model(model, root / "model.bin", use_async=True)
    booster.save_optimizer(optimizer, root / "optimizer", shard=True, size_per_shard=0.1)
    booster.save_optimizer(optimizer, root / "optimizer.safetensors", use_async=True)
    booster.save_lr_scheduler(schedule, root / "schedule")
    booster.checkpoint_io.synchronize()


def load(booster: Booster, boosted: Any, root: Path) -> None:
    model, optimizer, _, _, schedule = boosted
    booster.load_model(model, root / "model")
    booster.load_optimizer(optimizer, root / "optimizer")
    booster.load_lr_scheduler(schedule, root / "schedule")


def content(path: Path) -> dict[str, Any]:
    """All that a checkpoint holds, by file and name, but for digests of blocks and identifiers of saves."""
    found: dict[str, Any] = {}
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_dir() or file.suffix == ".tmp":
            continue
        if file.suffix == ".safetensors" or file.name == "schedule":
            with safe_open(file, "pt") as tensors:
                found[file.name] = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
                found[f"{file.name} plain"] = (tensors.metadata() or {}).get("colossal.plain")
        elif file.suffix == ".bin":
            state = torch.load(file, weights_only=True)
            found[file.name] = dict(state)
            found[f"{file.name} versions"] = getattr(state, "_metadata", None)
        else:
            texts = json.loads(file.read_text())
            texts.get("metadata", {}).pop("save", None)
            texts.pop("problem_type", None)  # a model of images notes it when it first computes a loss
            found[file.name] = texts
    return found


def assert_same(found: Any, expected: Any, what: str) -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected), what
        for name, value in expected.items():
            assert_same(found[name], value, f"{what}: {name}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, what
        assert torch.equal(found, expected), what
    else:
        assert found == expected, what


def plugin_of(world: str, precision: str = "fp32") -> HybridParallelPlugin:
    return HybridParallelPlugin(precision=precision, **WORLDS[world][1])


def one_process(root: str) -> None:
    """Train each family, save, and train on."""
    for name in FAMILIES:
        booster, boosted = start(name, TorchDDPPlugin())
        train(name, booster, boosted, 0, BEFORE)
        save(booster, boosted, Path(root, name))
        train(name, booster, boosted, BEFORE, AFTER)
        booster.save_model(boosted[0], Path(root, f"{name}-end.safetensors"), use_safetensors=True)


def goes_on(world: str, root: str, own: str) -> None:
    """Load what one process saved, save it again, and go on."""
    for name in FAMILIES:
        booster, boosted = start(name, plugin_of(world))
        for parameter in boosted[0].parameters():
            nn.init.constant_(parameter, 3.0)
        load(booster, boosted, Path(root, name))
        save(booster, boosted, Path(own, name))
        train(name, booster, boosted, BEFORE, AFTER)
        booster.save_model(boosted[0], Path(own, f"{name}-end.safetensors"), use_safetensors=True)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("one")
    run_processes(one_process, 1, str(root))
    return root


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    run_processes(goes_on, WORLDS[request.param][0], request.param, str(reference), str(root))
    return root


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_files_are_those_of_one_process(name: str, world: Path, reference: Path) -> None:
    assert_same(content(world / name), content(reference / name), str(world / name))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_run_goes_on(name: str, world: Path, reference: Path) -> None:
    found, expected = (
        content(root / f"{name}-end.safetensors")[f"{name}-end.safetensors"] for root in (world, reference)
    )
    before = content(reference / name / "model.safetensors")["model.safetensors"]
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=lambda t, key=key: f"{key}: {t}")
    assert any(not torch.equal(before[key], value) for key, value in expected.items())


# ------------------------------------------------------------------------- parts that are divided in other ways

ODD = ("llama", "falcon-one-key", "t5", "deepseek", "gpt2-two-heads")


def saves_odd(plugin: Any, root: str, source: str | None) -> None:
    for name in ODD:
        booster, boosted = start(name, plugin())
        if source is None:
            train(name, booster, boosted, 0, 1)
        else:
            load(booster, boosted, Path(source, name))
        save(booster, boosted, Path(root, name))


def four_ranks() -> HybridParallelPlugin:
    return HybridParallelPlugin(tp_size=4, pp_size=1, precision="fp32")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_shared_heads_and_uneven_tables(tmp_path: Path) -> None:
    run_processes(saves_odd, 1, TorchDDPPlugin, str(tmp_path / "one"), None)
    run_processes(saves_odd, 4, four_ranks, str(tmp_path / "four"), str(tmp_path / "one"))
    for name in ODD:
        assert_same(content(tmp_path / "four" / name), content(tmp_path / "one" / name), name)


class Scaled(nn.Linear):
    """A layer with state that is no tensor."""

    scale = 1

    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


def sequence(value: float = 0.0) -> nn.Sequential:
    torch.manual_seed(7)
    layers: Any = nn.Sequential(
        nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Tanh(), Scaled(12, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)
    )
    for parameter in layers.parameters():
        parameter.data += value
    layers[1].running_mean += value
    layers[4].num_batches_tracked += int(value)
    layers[3].scale = 1 + int(value)
    return layers


def sequence_in_parts(root: str, **options: Any) -> tuple[list[str], Any]:
    """Load a sequence, save it again in PyTorch's format, and tell what is here."""
    booster = Booster(device="cpu", plugin=HybridParallelPlugin(tp_size=1, pp_size=2, precision="fp32", **options))
    layers = sequence()
    model, optimizer, *_ = booster.boost(layers, torch.optim.SGD(layers.parameters(), lr=0.1))
    assert optimizer is not None
    booster.load_model(model, Path(root, "layers.bin"))
    booster.save_model(model, Path(root, "again", "layers.bin"))
    booster.save_optimizer(optimizer, Path(root, "sgd"))
    booster.load_optimizer(optimizer, Path(root, "sgd"))
    return [name for name, _ in model.named_parameters()], [getattr(m, "scale", None) for m in model.modules()]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"pp_style": "interleaved", "num_model_chunks": 2}], ids=["1f1b", "chunks"])
def test_sequences_with_buffers_and_other_state(options: dict[str, Any], tmp_path: Path) -> None:
    saved = sequence(value=3.0)
    Booster(device="cpu").save_model(saved, tmp_path / "layers.bin")
    ranks = run_processes(sequence_in_parts, 2, str(tmp_path), num_microbatches=2, **options)
    assert_same(content(tmp_path / "again" / "layers.bin"), content(tmp_path / "layers.bin"), "again")
    assert not set(ranks[0][0]) & set(ranks[1][0]), "each rank has only some layers"
    assert sorted(each for _, scales in ranks for each in scales if each is not None) == [4]
    other = Booster(device="cpu")
    _, optimizer, *_ = other.boost(saved, torch.optim.SGD(saved.parameters(), lr=0.5))
    assert optimizer is not None
    other.load_optimizer(optimizer, tmp_path / "sgd")
    assert optimizer.param_groups[0]["lr"] == 0.1


def killed_while_saving(root: str, killed: bool) -> None:
    """Save a model; or begin to, and die on the last rank when it has written its part."""
    booster, (model, *_) = start("gpt2", plugin_of("tp2-pp2"))
    if killed:
        write = SafetensorsWriter._write_blocks
        last = dist.get_rank() == dist.get_world_size() - 1
        SafetensorsWriter._write_blocks = lambda self, *rest: (
            write(self, *rest),
            last and os.kill(os.getpid(), signal.SIGKILL),
        )  # type: ignore[assignment]
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    booster.save_model(model, Path(root, "model"), shard=True, use_safetensors=True, size_per_shard=0.1)


def test_killed_while_saving_leaves_what_was_there(tmp_path: Path) -> None:
    run_processes(killed_while_saving, 4, str(tmp_path), killed=False, fresh=True)
    before = content(tmp_path)
    with pytest.raises(WorldError, match="died"):
        run_processes(killed_while_saving, 4, str(tmp_path), killed=True, fresh=True)
    after = {name: value for name, value in content(tmp_path).items() if not name.startswith(".")}
    assert_same(after, before, "after a kill")


# ------------------------------------------------------------------------------------- other plugins and precisions

HALVES: dict[str, tuple[int, Any]] = {
    "one": (1, lambda: LowLevelZeroPlugin(precision="bf16")),
    "zero2": (2, lambda: LowLevelZeroPlugin(stage=2, precision="bf16")),
    "gemini": (2, lambda: GeminiPlugin(precision="bf16", min_chunk_size_m=0.001, search_range_m=0.001)),
    "tp2-pp2": (4, lambda: plugin_of("tp2-pp2", "bf16")),
    "tp2-dp2-zero1": (4, lambda: plugin_of("tp2-dp2-zero1", "bf16")),
    "pp2-dp2-zero1": (4, lambda: plugin_of("pp2-dp2-zero1", "bf16")),
}
WHOLES: dict[str, tuple[int, Any]] = {
    "ddp": (2, TorchDDPPlugin),
    "fsdp": (2, TorchFSDPPlugin),
    "zero2": (2, lambda: LowLevelZeroPlugin(stage=2, precision="fp32")),
    "tp2-dp2-zero2": (4, lambda: plugin_of("tp2-dp2-zero2")),
}


def copies(table: dict[str, tuple[int, Any]], kind: str, source: str | None, target: str) -> None:
    """Load a checkpoint, or train, and save."""
    booster, boosted = start("gpt2", table[kind][1](), torch.float32)
    if source is None:
        train("gpt2", booster, boosted, 0, BEFORE)
    else:
        load(booster, boosted, Path(source))
    model, optimizer, _, _, schedule = boosted
    booster.save_model(model, Path(target, "model"), shard=True, use_safetensors=True)
    booster.save_optimizer(optimizer, Path(target, "optimizer"), shard=True)
    booster.save_lr_scheduler(schedule, Path(target, "schedule"))


def pass_on(table: dict[str, tuple[int, Any]], kinds: list[str], root: Path) -> None:
    """Train under the first, and hand the checkpoint from one to the next: none changes a bit."""
    which = "HALVES" if table is HALVES else "WHOLES"
    for number, kind in enumerate(kinds):
        source = str(root / str(number - 1)) if number else None
        run_processes(copies_of, table[kind][0], which, kind, source, str(root / str(number)))
        assert_same(content(root / str(number)), content(root / "0"), f"{kind} after {kinds[number - 1]}")


def copies_of(which: str, kind: str, source: str | None, target: str) -> None:
    copies({"HALVES": HALVES, "WHOLES": WHOLES}[which], kind, source, target)


def test_masters_pass_through_every_plugin(tmp_path: Path) -> None:
    pass_on(HALVES, ["tp2-dp2-zero1", "gemini", "tp2-pp2", "zero2", "pp2-dp2-zero1", "one"], tmp_path)


def test_float32_passes_through_every_plugin(tmp_path: Path) -> None:
    pass_on(WHOLES, ["tp2-dp2-zero2", "fsdp", "tp2-dp2-zero2", "zero2", "ddp"], tmp_path)


# ----------------------------------------------------------------------------------------------------------- errors


def refused(root: str) -> list[tuple[str, bool]]:
    """Load what does not fit; return the messages, and whether everything stayed as it was."""
    booster, (model, optimizer, *_) = start("llama", plugin_of("tp2-pp2"))
    before = [each.detach().clone() for each in model.parameters()]
    messages = []
    for path, load_it in {
        "longer": lambda path: booster.load_model(model, path),
        "wider": lambda path: booster.load_model(model, path),
        "groups": lambda path: booster.load_optimizer(optimizer, path),
    }.items():
        with pytest.raises(CheckpointError) as caught:
            load_it(Path(root, path))
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        messages.append((str(caught.value), same and optimizer.param_groups[0]["lr"] != 7.0))
    return messages


def test_what_does_not_fit_is_refused_on_all_ranks(tmp_path: Path) -> None:
    alone = Booster(device="cpu")
    alone.save_model(build("llama", num_layers=5), tmp_path / "longer", use_safetensors=True)
    MODELS["wide"] = ("LlamaForCausalLM", PAIRED | {"intermediate_size": 192})
    alone.save_model(build("wide", num_layers=4), tmp_path / "wider", use_safetensors=True)
    model = build("llama", num_layers=4)
    _, optimizer, *_ = alone.boost(model, torch.optim.AdamW(model.parameters(), lr=7.0))
    assert optimizer is not None
    alone.save_optimizer(optimizer, tmp_path / "groups")
    ranks = run_processes(refused, 4, str(tmp_path))
    assert all(rank == ranks[0] for rank in ranks)
    (longer, _), (wider, _), (groups, _) = ranks[0]
    assert "9 unexpected in the file" in longer
    assert "model.layers.4." in longer
    assert "with another shape" in wider
    assert "up_proj.weight (file [192, 64], model [128, 64])" in wider
    assert "needs 2 parameter groups" in groups
    assert all(unchanged for _, unchanged in ranks[0])


def saves_different(root: str) -> str:
    """Save a model of which one rank has a layer more."""
    booster, layers = Booster(device="cpu", plugin=TorchDDPPlugin()), [nn.Linear(2, 2)]
    layers += [nn.Linear(2, 2)] * dist.get_rank()
    with pytest.raises(CheckpointError) as caught:
        booster.save_model(nn.Sequential(*layers), Path(root, "model"))
    return str(caught.value)


def test_ranks_that_should_have_the_same_and_do_not_are_refused(tmp_path: Path) -> None:
    first, second = run_processes(saves_different, 2, str(tmp_path))
    assert first == second
    assert "ranks differ in 1.weight, 1.bias" in first
    assert not list(tmp_path.iterdir())
