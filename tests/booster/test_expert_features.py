# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""Features of training programs, with experts sharded over ranks, under every plugin, are those of one process.

The equality matrix crosses the ep axis with clipping and optimizers; here it is crossed with what programs do besides.
A cell is compared in float64 in norms and all parameters after two steps.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import assert_equal
from families import build, inputs_of
from float64 import KeepFloat64
from plugins import HYBRID, plugins
from torch import nn

from colossal._src.tensor import backing_shard
from colossal.booster import Booster
from colossal.cluster import ParallelMesh
from colossal.errors import UnsupportedError
from colossal.nn import optimizer as optimizers
from colossal.shardformer import ShardConfig, ShardFormer
from colossal.tensor import full_tensor_of
from colossal.testing import run_processes

HYBRIDS: dict[str, tuple[int, Callable[[], Any]]] = {
    "ep2": (2, partial(HYBRID, 1, 1, ep_size=2)),
    "ep2, ZeRO-1": (2, partial(HYBRID, 1, 1, ep_size=2, zero_stage=1)),
    "ep2, ZeRO-2": (2, partial(HYBRID, 1, 1, ep_size=2, zero_stage=2)),
    "tp2 x ep2": (2, partial(HYBRID, 2, 1, ep_size=2)),
    "dp2 x tp2 x ep4, ZeRO-1": (4, partial(HYBRID, 2, 1, ep_size=4, zero_stage=1)),
    "dp4 x ep2, ZeRO-2": (4, partial(HYBRID, 1, 1, ep_size=2, zero_stage=2)),
}
BY_MESH = plugins("DDP", "ZeRO-1", "ZeRO-2", "Gemini")
"""Plugins that shard no experts: the mesh does."""
WORLDS = {name: size for name, (size, _) in HYBRIDS.items()} | {f"mesh of ep2, {name}": 2 for name in BY_MESH}
GROUP_OF_EXPERTS, ROUTER = ".mlp.experts.", ".mlp.gate."


def batch_of(step: int, part: int = 0, parts: int = 1) -> dict[str, torch.Tensor]:
    pairs = [inputs_of("mixtral", num_changed=each) for each in (step, step + 4)]
    return {key: torch.cat([pair[key] for pair in pairs]).chunk(parts)[part] for key in pairs[0]}


@dataclass
class Run:
    """A program of one rank, or of one process."""

    booster: Booster
    shard: Callable[[Any], Any]
    place: tuple[int, int]
    folder: Path

    def boost(self, prepare: Callable[[Any], object] = lambda _: None, make: Any = None) -> tuple[Any, Any]:
        source: Any = build("mixtral")
        source.router_aux_loss_coef = 0.7
        prepare(source)
        model = self.shard(source)
        make = make or partial(torch.optim.SGD, lr=0.5, momentum=0.9)
        optimizer = make([each for each in model.parameters() if each.requires_grad])
        return self.booster.boost(model, optimizer)[:2]

    def backward(self, model: Any, optimizer: Any, step: int, **options: Any) -> None:
        self.booster.backward(model(**batch_of(step, *self.place), **options).loss, optimizer)


def finish(optimizer: Any, norms: list[float]) -> None:
    norms.append(float(optimizer.clip_grad_by_norm(0.05)))
    optimizer.step()
    optimizer.zero_grad()


def train(run: Run, model: Any, optimizer: Any, **options: Any) -> Iterator[float]:
    for step in range(2):
        run.backward(model, optimizer, step, **options)
        norms: list[float] = []
        finish(optimizer, norms)
        yield norms[0]


Result = tuple[Any, list[float]]


def trained(run: Run, prepare: Callable[[Any], object] = lambda _: None, make: Any = None, **options: Any) -> Result:
    model, optimizer = run.boost(prepare, make)
    return model, list(train(run, model, optimizer, **options))


def freeze(model: nn.Module, *names: str, but: bool = False) -> None:
    for name, each in model.named_parameters():
        if any(text in name for text in names) is not but:
            each.requires_grad_(False)


def accumulate(run: Run, averages_each: bool = False, **options: Any) -> Result:
    model, optimizer = run.boost()
    norms: list[float] = []
    for step in range(2):
        with nullcontext() if averages_each else run.booster.no_sync(model, optimizer):
            run.backward(model, optimizer, step, **options)
        run.backward(model, optimizer, step + 2, **options)
        finish(optimizer, norms)
    return model, norms


def discard(run: Run) -> Result:
    """A pass whose gradients are dropped, set to zero or to None."""
    model, optimizer = run.boost()
    norms: list[float] = []
    for step, to_none in enumerate((True, False)):
        run.backward(model, optimizer, step + 3)
        optimizer.zero_grad(set_to_none=to_none)
        run.backward(model, optimizer, step)
        finish(optimizer, norms)
    return model, norms


def with_closure(run: Run) -> Result:
    model, optimizer = run.boost()
    norms: list[float] = []

    def closure(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**batch_of(step, *run.place)).loss
        run.booster.backward(loss, optimizer)
        norms.append(float(optimizer.clip_grad_by_norm(0.05)))
        return loss

    for step in range(2):
        optimizer.step(partial(closure, step))
    return model, norms


def freeze_in(run: Run, frozen: int) -> Result:
    """Experts that are frozen in one of three steps."""
    model, optimizer = run.boost()
    norms: list[float] = []
    for step in range(3):
        for name, each in model.unwrap().named_parameters():
            if GROUP_OF_EXPERTS in name:
                each.requires_grad_(step != frozen)
        run.backward(model, optimizer, step)
        finish(optimizer, norms)
    return model, norms


def groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Stacked weights of experts have three dimensions."""
    experts = [each for each in parameters if each.dim() == 3]
    others = [each for each in parameters if each.dim() != 3]
    return torch.optim.SGD([{"params": experts, "lr": 2.0, "weight_decay": 0.1}, {"params": others}], lr=0.5)


def scheduled(run: Run) -> Result:
    model, optimizer = run.boost()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    norms: list[float] = []
    for norm in train(run, model, optimizer):
        schedule.step()
        norms.append(norm)
    return model, norms


def between(run: Run, do: Callable[[Any], object]) -> Result:
    """Do something between steps."""
    model, optimizer = run.boost()
    norms: list[float] = []
    for norm in train(run, model, optimizer):
        do(model)
        norms.append(norm)
    return model, norms


def evaluate(model: Any, generates: bool) -> None:
    model.eval()
    with torch.no_grad():
        if generates:
            model.unwrap().generate(torch.arange(5, 9)[None], do_sample=False, max_new_tokens=3, pad_token_id=0)
        else:
            model(**batch_of(5))
    model.train()


@torch.no_grad()
def shrink(model: Any) -> None:
    for each in model.unwrap().parameters():
        each.mul_(0.9)


def use_one_expert(model: Any) -> None:
    for module in model.unwrap().modules():
        if hasattr(module, "top_k"):
            module.top_k = 1


def two_losses(run: Run) -> Result:
    """The loss of the model, and one of its outputs."""
    model, optimizer = run.boost()
    norms: list[float] = []
    for step in range(2):
        outputs = model(**batch_of(step, *run.place))
        run.booster.backward(outputs.loss + outputs.logits.square().mean(), optimizer)
        finish(optimizer, norms)
    return model, norms


def resume(run: Run) -> Result:
    model, optimizer = run.boost()
    first = next(train(run, model, optimizer))
    for kind, each in (("model", model), ("optimizer", optimizer)):
        getattr(run.booster, f"save_{kind}")(each, str(run.folder / kind), shard=True)
    model, optimizer = run.boost(shrink_source)
    for kind, each in (("model", model), ("optimizer", optimizer)):
        getattr(run.booster, f"load_{kind}")(each, str(run.folder / kind))
    return model, [first, *train(run, model, optimizer)]


@torch.no_grad()
def shrink_source(model: nn.Module) -> None:
    for each in model.parameters():
        each.mul_(0.5)


def recompute(model: Any) -> None:
    again = lambda: (nullcontext(), KeepFloat64())  # noqa: E731 - a mode ends where a backward pass begins
    options = {"use_reentrant": False, "context_fn": again}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def with_hook(run: Run) -> Result:
    """A hook of the gradients of routers."""
    model, optimizer = run.boost()
    for name, each in model.unwrap().named_parameters():
        if ROUTER in name:
            each.register_hook(lambda grad: 3 * grad)
    return model, list(train(run, model, optimizer))


FEATURES: dict[str, Callable[[Run], Result]] = {
    "no_sync": accumulate,
    "averaged after each pass": partial(accumulate, averages_each=True),
    "no_sync, aux loss": partial(accumulate, output_router_logits=True),
    "aux loss": partial(trained, output_router_logits=True),
    "zero_grad": discard,
    "closure": with_closure,
    "frozen routers": partial(trained, prepare=lambda model: freeze(model, ROUTER)),
    "frozen experts": partial(trained, prepare=lambda model: freeze(model, GROUP_OF_EXPERTS)),
    "experts alone": partial(trained, prepare=lambda model: freeze(model, GROUP_OF_EXPERTS, but=True)),
    "routers alone": partial(trained, prepare=lambda model: freeze(model, ROUTER, but=True)),
    "thawed experts": partial(freeze_in, frozen=0),
    "experts frozen between": partial(freeze_in, frozen=1),
    "groups": partial(trained, make=groups),
    "schedule": scheduled,
    "evaluation": partial(between, do=partial(evaluate, generates=False)),
    "generation": partial(between, do=partial(evaluate, generates=True)),
    "written values": partial(between, do=shrink),
    "another top_k": partial(between, do=use_one_expert),
    "recomputation": partial(trained, prepare=recompute),
    "two losses": two_losses,
    "hook": with_hook,
    "resume": resume,
    "Lamb": partial(trained, make=partial(optimizers.Lamb, lr=0.1, weight_decay=0.1)),
    "Adafactor": partial(trained, make=optimizers.Adafactor),
    "CAME": partial(trained, make=partial(optimizers.CAME, lr=0.01)),
}


REFUSED = {
    "two losses": ("tp2", "needs the logits of all"),
    "generation": ("Gemini", "generate needs full parameters"),
    "written values": ("Gemini", "the values of a parameter are sharded"),
}
"""By the feature: in which worlds, by a part of their names, and how."""


def refusal_of(world: str, name: str) -> str | None:
    part, message = REFUSED.get(name, ("", ""))
    return message if part and part in world else None


def run_feature(name: str, run: Run) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with KeepFloat64():
        model, norms = FEATURES[name](run)
    model.state_dict()  # waits for parameters that are still being gathered
    values = {
        key: full_tensor_of(backing_shard(each)).detach().clone() for key, each in model.unwrap().named_parameters()
    }
    return torch.tensor(norms, dtype=torch.float64), values


def train_on_ranks(world: str, names: list[str], folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        own = folder / name
        own.mkdir(exist_ok=True)
        with ParallelMesh(dp=2, ep=2) if world not in HYBRIDS else nullcontext() as mesh:
            plugin = HYBRIDS[world][1]() if mesh is None else BY_MESH[world.rpartition(", ")[2]]()
            place = plugin.data_parallel_rank_and_size() if mesh is None else (mesh.rank("dp"), 2)
            shard = partial(shard_on, mesh)
            if refusal := refusal_of(world, name):
                with pytest.raises(UnsupportedError, match=refusal):
                    run_feature(name, Run(Booster(device="cpu", plugin=plugin), shard, place, own))
            else:
                found[name] = run_feature(name, Run(Booster(device="cpu", plugin=plugin), shard, place, own))
    return found


def shard_on(mesh: ParallelMesh | None, model: nn.Module) -> nn.Module:
    """Shard the experts of a model that no plugin shards."""
    return model if mesh is None else ShardFormer(ShardConfig(mesh)).optimize(model)[0]


# In the gate, `test_sharded_experts.py` has some of them.
@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_a_feature_is_that_of_one_process(world: str, tmp_path: Path) -> None:
    names = list(FEATURES)
    ranks = run_processes(train_on_ranks, WORLDS[world], world, names, tmp_path)
    for name in ranks[0]:
        (own := tmp_path / f"{name}, one").mkdir()
        norms, values = run_feature(name, Run(Booster(device="cpu"), lambda model: model, (0, 1), own))
        for rank in ranks:
            assert_equal(rank[name][0], norms, f"{world}, {name}: norms")
            assert rank[name][1].keys() == values.keys()
            for key, value in values.items():
                assert_equal(rank[name][1][key], value, f"{world}, {name}: {key}")
