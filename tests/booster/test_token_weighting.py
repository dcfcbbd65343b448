# pyright: reportArgumentType=false
"""Losses weighted by tokens: however a batch is divided, the loss and every gradient are those of one process."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from equality import assert_equal
from families import build, inputs_of
from float64 import KeepFloat64
from plugins import HYBRID, plugins
from torch import distributed as dist

from colossal._src.interface import TokenWeighting
from colossal._src.pipeline import lacks_labels
from colossal._src.tensor import copy_placement
from colossal.booster import Booster
from colossal.cluster import ParallelMesh
from colossal.errors import ColossalError, ConfigError
from colossal.tensor import full_tensor_of
from colossal.testing import run_processes, run_threads

FAMILY = "llama-tied"
WORLDS: dict[str, tuple[dict[str, int], dict[str, Callable[[], Any]]]] = {
    "dp2": (
        {"dp": 2},
        plugins("none", "DDP", "FSDP", "ZeRO-1", "ZeRO-2", "Gemini", "Hybrid")
        | {"Hybrid, 1 stage": partial(HYBRID, 1, 1, num_microbatches=2)},
    ),
    "tp2": ({"tp": 2}, {"Hybrid": partial(HYBRID, 2, 1)}),
    "sp2": (
        {"sp": 2},
        {
            mode: partial(HYBRID, 1, 1, 2, enable_sequence_parallelism=True, sequence_parallelism_mode=mode)
            for mode in ("all_to_all", "ring_attn")
        },
    ),
    "pp2": (
        {"pp": 2},
        {
            "2 micro-batches": partial(HYBRID, 1, 2, num_microbatches=2),
            "micro-batches of 1": partial(HYBRID, 1, 2, microbatch_size=1, pp_style="1f1b"),
        },
    ),
    "pp2 x dp2": ({"pp": 2, "dp": 2}, {"Hybrid": partial(HYBRID, 1, 2, num_microbatches=2)}),
}
DATA_PARALLEL = plugins("DDP", "FSDP", "ZeRO-1", "ZeRO-2", "Gemini", "Hybrid", "Hybrid with ZeRO-1")
ACCUMULATED = (1, 2)


@cache
def batch() -> dict[str, torch.Tensor]:
    """Eight samples; one has no label, one has all, and the first label of some counts, which nothing predicts."""
    inputs = [inputs_of(FAMILY, num_changed=4 * number) for number in range(4)]
    joined = {key: torch.cat([each[key] for each in inputs]) for key in inputs[0]}
    lengths = torch.tensor([1, 12, 5, 2, 0, 0, 3, 9])
    at = torch.arange(joined["labels"].shape[1])
    return joined | {"labels": joined["labels"].masked_fill(at >= lengths[:, None], -100)}


def grads_of(optimizer: Any) -> dict[str, torch.Tensor]:
    """The full gradients of the parameters that this rank has."""
    return {
        optimizer.param_names[parameter]: full_tensor_of(copy_placement(parameter.grad.detach(), parameter)).clone()
        for parameter in optimizer.parameters
        if parameter.grad is not None
    }


def run(plugin: Any, num_batches: int, calls_model: bool, weighs: bool = True) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a step on the batch, and the gradients."""
    booster, model = Booster(device="cpu", plugin=plugin), build(FAMILY)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    place, size = booster.plugin.data_parallel_rank_and_size()
    batches = [
        {key: value.chunk(num_batches)[number].chunk(size)[place] for key, value in batch().items()}
        for number in range(num_batches)
    ]
    weighted: Any = booster.weight_by_tokens([each["labels"] for each in batches], causal=True)
    weight = weighted if weighs else lambda loss, _labels: loss / num_batches
    total = 0.0
    for each in batches:
        if calls_model:
            loss = weight(boosted(**each).loss, each["labels"])
            booster.backward(loss, optimizer)
        else:
            criterion = lambda outputs, inputs: weight(outputs.loss, inputs["labels"])  # noqa: E731
            loss = booster.execute_pipeline(iter([each]), boosted, criterion, optimizer)["loss"]
        total += loss.item()
    optimizer.get_grad_norm()  # gradients that are reduced late are there now
    return total, grads_of(optimizer)


def run_all(world: str) -> dict[Any, tuple[float, dict[str, torch.Tensor]]]:
    axes, plugins = WORLDS[world]
    found = {}
    with ParallelMesh(**axes), KeepFloat64():
        for name, plugin in plugins.items():
            for num_batches in ACCUMULATED:
                found[name, num_batches, "execute_pipeline"] = run(plugin(), num_batches, calls_model=False)
            if "stage" not in name and "pp" not in axes:
                found[name, ACCUMULATED[-1], "backward"] = run(plugin(), ACCUMULATED[-1], calls_model=True)
    return found


@cache
def alone() -> tuple[float, dict[str, torch.Tensor]]:
    """One process, all samples at once, and the loss as transformers has it."""
    model: Any = build(FAMILY)
    with KeepFloat64():
        loss = model(**batch()).loss
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("world", WORLDS)
def test_a_weighted_step_is_that_of_one_process(world: str) -> None:
    loss, grads = alone()
    axes, _ = WORLDS[world]
    size = 1
    for number in axes.values():
        size *= number
    ranks = run_processes(run_all, size, world)
    for key in ranks[0]:
        at = f"{world}, {key}"
        mean = torch.tensor([rank[key][0] for rank in ranks], dtype=torch.float64).mean()
        assert_equal(mean, torch.tensor(loss, dtype=torch.float64), f"{at}: loss")
        for rank in ranks:
            for name, grad in rank[key][1].items():
                assert_equal(grad, grads[name], f"{at}: {name}")
        assert {name for rank in ranks for name in rank[key][1]} == grads.keys(), at


def test_a_mean_of_means_is_another_one() -> None:
    """What the weights are for: on the same samples it differs by far more than rounding."""
    with KeepFloat64():
        loss, _ = run(None, 2, calls_model=True, weighs=False)
    assert abs(loss - alone()[0]) > 1e-3


def test_the_number_of_labels_is_that_of_all_ranks_and_batches() -> None:
    labels = torch.tensor([[1, 2, -100], [3, -100, -100]])

    def count() -> tuple[int, int]:
        mesh = ParallelMesh(dp=2)
        own = labels if mesh.rank("dp") else labels.roll(1, 1)
        both = [own, labels]
        causal, every = (TokenWeighting(both, causal=causal, mesh=mesh).num_labels for causal in (True, False))
        return causal, every

    assert run_threads(count, 2) == [(6, 12)] * 2


def test_without_any_label_the_loss_is_what_it_is_in_one_process() -> None:
    labels, logits = torch.full((2, 3), -100), torch.zeros(2, 3, 4, requires_grad=True)
    weight = TokenWeighting(labels, causal=False)
    loss = weight(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), labels)
    assert loss.isnan()


def test_what_was_not_counted_is_refused() -> None:
    labels = torch.zeros(4, 3, dtype=torch.long)
    weight = TokenWeighting([labels, labels], causal=True)
    with pytest.raises(ConfigError, match="of the 4 samples of .* Found labels of 3 samples. Count"):
        weight(torch.tensor(1.0), labels[:3])

    for odd, found in (
        ([], "none"),
        ([labels.tolist()], "list"),
        ({"labels": labels}, "str"),
        (labels[0], r"shape \(3,\)"),
        (labels[0, 0], r"shape \(\)"),
    ):
        with pytest.raises(ConfigError, match=f"Found {found} and causal=True. Pass labels such as"):
            TokenWeighting(odd, causal=True)
        with pytest.raises(ConfigError, match="Labels are counted in tensors"):
            weight(torch.tensor(1.0), odd)
    assert TokenWeighting(labels[0], causal=False).num_labels == 3

    def program() -> None:
        mesh = ParallelMesh(dp=2)
        batches = [labels, labels[: 4 - mesh.rank("dp")]]
        with pytest.raises(ConfigError, match="and different numbers on 1 ranks"):
            TokenWeighting(batches, causal=True, mesh=mesh)

    run_threads(program, 2)


# ------------------------------------------------------------------------------------------ without any label

LACKING = {
    "2 micro-batches, pp2": (2, {"pp": 2}, partial(HYBRID, 1, 2, num_microbatches=2)),
    "micro-batches of 1, pp2": (2, {"pp": 2}, partial(HYBRID, 1, 2, microbatch_size=1, pp_style="1f1b")),
    "2 micro-batches, 1 stage": (1, {}, partial(HYBRID, 1, 1, num_microbatches=2)),
    "1 stage, tp2": (2, {"tp": 2}, partial(HYBRID, 2, 1, num_microbatches=2)),
}


def run_lacking(axes: dict[str, int], plugin: Callable[[], Any]) -> None:
    """Half of a batch has no labels: refused on all ranks where its mean is taken, and right by tokens."""
    with ParallelMesh(**axes), KeepFloat64():
        booster, model = Booster(device="cpu", plugin=plugin()), build(FAMILY)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        inputs = {key: value.chunk(2)[0] for key, value in batch().items()}
        for num_labels in (0, 1):  # with a first label, which nothing predicts
            inputs["labels"][:2, :num_labels], inputs["labels"][:2, num_labels:] = 1, -100
            for trained, return_loss in ((optimizer, True), (optimizer, False), (None, True)):
                with pytest.raises(ConfigError, match="micro-batch without.* booster.weight_by_tokens"):
                    booster.execute_pipeline(iter([inputs]), model, lambda out, _: out.loss, trained, return_loss)
        optimizer.zero_grad()
        weight = booster.weight_by_tokens(inputs["labels"], causal=True)
        criterion = lambda outputs, part: weight(outputs.loss, part["labels"])  # noqa: E731
        found = booster.execute_pipeline(iter([inputs]), model, criterion, optimizer)["loss"]
        assert_equal(found, build(FAMILY)(**inputs).loss, "loss")


@pytest.mark.parametrize("world", LACKING)
def test_a_mean_over_no_labels_is_refused_on_all_ranks(world: str) -> None:
    size, axes, plugin = LACKING[world]
    run_processes(run_lacking, size, axes, plugin)


def run_one_rank_lacking(plugin: Callable[[], Any]) -> str:
    """Return the error of a step in which rank 0 has no labels, after a weighted one, which is right."""
    booster, model = Booster(device="cpu", plugin=plugin()), build(FAMILY)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank, size = booster.plugin.data_parallel_rank_and_size()
    inputs = lacking_batch()
    inputs = {key: value.chunk(size)[rank] for key, value in inputs.items()}
    with KeepFloat64():
        weight = booster.weight_by_tokens(inputs["labels"], causal=True)
        criterion = lambda outputs, part: weight(outputs.loss, part["labels"])  # noqa: E731
        loss = booster.execute_pipeline(iter([inputs]), model, criterion, optimizer)["loss"]
        optimizer.step()
        losses, (expected, _) = [torch.zeros_like(loss) for _ in range(size)], train_on_lacking_batch()
        dist.all_gather(losses, loss)
        assert_equal(torch.stack(losses).mean(), expected, "loss")
        for name, value in model.state_dict(only_rank_0=False).items():
            assert_equal(value, train_on_lacking_batch()[1][name], name)
        optimizer.zero_grad()
        try:
            booster.execute_pipeline(iter([inputs]), model, lambda outputs, _: outputs.loss, optimizer)
            optimizer.step()
        except (ColossalError, RuntimeError) as error:
            return "\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])
    return ""


def lacking_batch() -> dict[str, torch.Tensor]:
    inputs, counts = batch(), torch.arange(8)[:, None] >= 4
    return inputs | {"labels": inputs["labels"].masked_fill(~counts, -100)}


@cache
def train_on_lacking_batch() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One process: the loss of the batch, and the parameters after a step."""
    model: Any = build(FAMILY)
    loss = model(**lacking_batch()).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss.detach(), {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("plugin", DATA_PARALLEL)
def test_a_rank_without_labels_is_weighted_or_says_so(plugin: str) -> None:
    first, second = run_processes(run_one_rank_lacking, 2, DATA_PARALLEL[plugin])
    assert first.startswith("ConfigError")
    assert "on each rank. Found a micro-batch without" in first
    assert "CommunicationError" in second
    assert all("booster.weight_by_tokens" in message for message in (first, second)), second


def test_only_labels_of_which_none_counts_are_lacking() -> None:
    nothing = torch.full((2, 3), -100)
    some, first = nothing.clone(), nothing.clone()
    some[1, 2], first[:, 0] = 5, 5
    ids = torch.ones(2, 3, dtype=torch.long)
    assert lacks_labels({"input_ids": ids, "labels": nothing}, 1) == [True]
    assert lacks_labels((torch.ones(2, 3), nothing[:, 0]), 2) == [True, True]
    assert lacks_labels([first], 1) == [True]
    assert lacks_labels([some], 1) == [False]
    assert lacks_labels({"input_ids": ids, "labels": some}, 2) == [True, False]
    assert lacks_labels({"x": nothing.float(), "names": ["a"], "step": torch.tensor(-100)}, 1) == [False]
    assert lacks_labels([nothing.to("meta")], 1) == [False]  # what a device holds is not read
    assert lacks_labels([nothing[:0]], 1) == [True]


def test_a_loss_that_is_no_mean_over_labels_needs_none() -> None:
    booster, model = Booster(device="cpu"), torch.nn.Linear(2, 2)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = (torch.ones(2, 2), torch.full((2,), -100))
    criterion = lambda out, part: torch.nn.functional.cross_entropy(out, part[1], reduction="sum")  # noqa: E731
    assert booster.execute_pipeline(iter([inputs]), boosted, criterion, optimizer)["loss"] == 0
