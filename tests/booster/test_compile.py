# pyright: reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false
"""A compiled model trains as the plain one of one process, under every plugin, wherever it is compiled."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from chosen import chosen
from families import EXPERTS, build, inputs_of
from plugins import HYBRID, plugins
from torch import nn
from torch._dynamo.utils import counters

from colossal.booster import Booster
from colossal.errors import UnsupportedError
from colossal.testing import run_processes

pytestmark = pytest.mark.slow

SEQUENCE = partial(HYBRID, enable_sequence_parallelism=True)
PLUGINS = plugins("DDP", "FSDP", "ZeRO-1", "ZeRO-2", "Gemini", "Gemini, tp2", "tp2", "pp2") | {
    "tp2, split_gather": partial(SEQUENCE, 2, 1, sequence_parallelism_mode="split_gather"),
    "sp2, all_to_all": partial(SEQUENCE, 1, 1, 2, sequence_parallelism_mode="all_to_all"),
    "sp2, ring_attn": partial(SEQUENCE, 1, 1, 2, sequence_parallelism_mode="ring_attn"),
}
WITH_EXPERTS = {
    "ep2": partial(HYBRID, 1, 1, ep_size=2),
    "tp2, ep2": partial(HYBRID, 2, 1, ep_size=2),
}
WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], object]]] = {
    "in place": (lambda model: model.compile(backend="aot_eager") or model, lambda _: None),
    "wrapped": (lambda model: torch.compile(model, backend="aot_eager"), lambda _: None),
    "after boost": (lambda model: model, lambda boosted: boosted.unwrap().compile(backend="aot_eager")),
    "around boost": (lambda model: model, lambda boosted: boosted.compile(backend="aot_eager")),
    "of the boosted": (lambda model: model, lambda boosted: torch.compile(boosted, backend="aot_eager")),
}
SHARDED = {name for name in PLUGINS if "2" in name and name != "ZeRO-2"}
CASES = [
    (plugin, way)
    for plugin in PLUGINS
    for way in WAYS
    if not (way == "wrapped" and plugin in SHARDED) and not ("boost" in way and plugin == "pp2")
]


def make(name: str = "llama") -> nn.Module:
    model = build(name).float()
    if name in EXPERTS:
        model.set_experts_implementation("grouped_mm")  # as transformers has it by default
    return model


def batches() -> list[dict[str, torch.Tensor]]:
    return [
        {name: torch.cat([value, value.flip(0)]) for name, value in inputs_of("llama", n).items()} for n in range(3)
    ]


def train(booster: Booster, before: Callable[[Any], Any], after: Callable[[Any], Any], name: str) -> list[float]:
    torch._dynamo.reset()
    model = before(make(name))
    boosted: Any = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    model, optimizer, *_ = boosted
    compiled = after(model)
    model = compiled if isinstance(compiled, nn.Module) else model
    rank, size = booster.plugin.data_parallel_rank_and_size()
    losses = []
    for batch in batches():
        part = {name: value.chunk(size)[rank] for name, value in batch.items()}
        done = booster.execute_pipeline(iter([part]), model, lambda out, _: out.loss, optimizer)
        losses.append(done["loss"])
        optimizer.step()
        optimizer.zero_grad()
    total = torch.stack(losses)
    torch.distributed.all_reduce(total)
    return (total / torch.distributed.get_world_size()).tolist()


def compare_all(cases: list[tuple[str, str]], expected: list[float], name: str = "llama") -> None:
    warnings.simplefilter("ignore")
    for plugin, way in cases:
        counters.clear()
        losses = train(Booster(plugin=(PLUGINS | WITH_EXPERTS)[plugin](), device="cpu"), *WAYS[way], name)
        message = f"{plugin}, compiled {way}"
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0, msg=lambda text, at=message: f"{at}: {text}")
        assert counters["stats"]["unique_graphs"] > 0, message


def train_alone(name: str) -> list[float]:
    booster = Booster(device="cpu")
    model, optimizer, *_ = booster.boost((plain := make(name)), torch.optim.SGD(plain.parameters(), lr=0.5))
    expected = []
    for batch in batches():
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    return expected


@pytest.mark.chosen
def test_a_compiled_model_is_one_process() -> None:
    expected = train_alone("llama")
    kinds = [[case for case in CASES if (case[0] in SHARDED) is is_sharded] for is_sharded in (False, True)]
    cases = [*chosen(kinds[0], 1, "compiled models"), *chosen(kinds[1], 1, "compiled models, sharded")]
    run_processes(compare_all, 2, cases, expected, timeout_seconds=600)


OFTEN = {
    "FSDP gathers parameters": [("FSDP", "of the boosted")],
    "Gemini gathers parameters": [("Gemini", "of the boosted")],
    "a second model of one process": [("DDP", "in place"), ("DDP", "wrapped")],
}


@pytest.mark.parametrize("case", OFTEN)
def test_what_runs_around_passes_is_not_traced(case: str) -> None:
    run_processes(compare_all, 2, OFTEN[case], train_alone("llama"), timeout_seconds=600)


@pytest.mark.parametrize(("plugin", "ways"), [("ep2", ["in place", "after boost"]), ("tp2, ep2", ["of the boosted"])])
def test_a_compiled_model_with_experts_on_other_ranks_is_one_process(plugin: str, ways: list[str]) -> None:
    cases = [(plugin, way) for way in ways]
    run_processes(compare_all, 2, cases, train_alone("mixtral"), "mixtral", timeout_seconds=600)


def refuse(plugin: str) -> None:
    booster = Booster(plugin=(PLUGINS | WITH_EXPERTS)[plugin](), device="cpu")
    model = make("mixtral" if plugin in WITH_EXPERTS else "llama")
    with pytest.raises(UnsupportedError, match=r"model\.compile\(\) instead"):
        booster.boost(torch.compile(model, backend="eager"), torch.optim.SGD(model.parameters()))
    if plugin == "pp2":
        boosted, *_ = booster.boost(model, torch.optim.SGD(model.parameters()))
        for each in (boosted, boosted.unwrap()):
            with pytest.raises(UnsupportedError, match="before boost"):
                each.compile(backend="eager")


@pytest.mark.parametrize("plugin", sorted(SHARDED | WITH_EXPERTS.keys()))
def test_what_would_not_be_compiled_is_refused(plugin: str) -> None:
    run_processes(refuse, 2, plugin)
