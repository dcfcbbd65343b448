# pyright: reportUnknownMemberType=false, reportPrivateUsage=false
"""Which experts a router chooses, by loops over tokens; what it drops, counts, records and draws."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from equality import assert_equal
from torch.utils.checkpoint import checkpoint

from colossal.cluster import ParallelMesh
from colossal.comm import CommCounter
from colossal.errors import ConfigError, ShapeError
from colossal.nn.moe import (
    Capacity,
    GaussianNoise,
    GroupLimit,
    Router,
    RouterLosses,
    UniformNoise,
    update_expert_biases,
)
from colossal.testing import run_processes

WIDTH, NUM_EXPERTS = 6, 8


def build(top_k: int = 2, dtype: torch.dtype = torch.float64, **options: Any) -> Router:
    router = Router(WIDTH, NUM_EXPERTS, top_k, **options).to(dtype)
    values = torch.randn(NUM_EXPERTS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with torch.no_grad():
        router.weight.copy_(values)
    return router


def tokens_of(number: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ------------------------------------------------------------------------------------------ choices and weights

LIMIT = GroupLimit(num_groups=4, num_chosen=2)
WEIGHINGS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, renormalized": {"renormalize": True},
    "sigmoid": {"scores": "sigmoid"},
    "as of DeepSeek-V3": {
        "scores": "sigmoid",
        "renormalize": True,
        "scale": 2.5,
        "group_limit": LIMIT,
        "bias_rate": 0.5,
    },
}


def choose(router: Router, token: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """One token, as the papers say it."""
    logits = router.weight.detach() @ token
    scores = torch.exp(logits) / torch.exp(logits).sum() if router.scores == "softmax" else 1 / (1 + torch.exp(-logits))
    ranking = scores if router.bias_steps is None else scores + router.bias_steps * router.bias_rate
    allowed = [*range(NUM_EXPERTS)]
    if router.group_limit is not None:
        groups = [allowed[at : at + 2] for at in range(0, NUM_EXPERTS, 2)]
        groups.sort(key=lambda group: -float(ranking[group].sum()))
        allowed = [*groups[0], *groups[1]]
    chosen = sorted(allowed, key=lambda expert: -float(ranking[expert]))[: router.top_k]
    weights = scores[chosen] / (scores[chosen].sum() if router.renormalize else 1)
    return chosen, weights * router.scale


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("options", WEIGHINGS.values(), ids=WEIGHINGS)
def test_choices_and_weights(options: dict[str, Any], top_k: int) -> None:
    router = build(top_k, **options)
    if router.bias_steps is not None:
        router.bias_steps.copy_(torch.tensor([0, 1, -1, 0, 2, 0, 0, -3]))
    tokens = tokens_of(20)
    routing = router(tokens)
    expected = [choose(router, token) for token in tokens]
    assert routing.chosen.tolist() == [chosen for chosen, _ in expected]
    assert_equal(routing.weights, torch.stack([weights for _, weights in expected]), "weights")
    numbers = torch.bincount(routing.chosen.flatten(), minlength=NUM_EXPERTS)
    assert torch.equal(routing.tokens_per_expert, numbers)
    assert routing.kept is None
    assert int(routing.num_dropped) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_are_computed_in_float32(dtype: torch.dtype) -> None:
    router, tokens = build(dtype=dtype), tokens_of(50).to(dtype)
    expected = build().requires_grad_(requires_grad=False)
    expected.weight.copy_(router.weight)
    with torch.autocast("cpu", torch.bfloat16):
        routing = router(tokens)
    assert routing.weights.dtype == torch.float32
    exact = expected(tokens.double())
    assert torch.equal(routing.chosen, exact.chosen)
    torch.testing.assert_close(routing.weights.double(), exact.weights, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------ capacity


def keep(chosen: torch.Tensor, capacity: int) -> torch.Tensor:
    kept, numbers = torch.zeros_like(chosen, dtype=torch.bool), [0] * NUM_EXPERTS
    for place in range(chosen.shape[1]):
        for token, expert in enumerate(chosen[:, place].tolist()):
            kept[token, place] = numbers[expert] < capacity
            numbers[expert] += 1
    return kept


@pytest.mark.parametrize(("training", "expected"), [(True, 6), (False, 10)])
def test_capacity_keeps_the_first_tokens(training: bool, expected: int) -> None:
    router, tokens = build(capacity=Capacity(train=1.0, eval=2.0, minimum=2)).train(training), tokens_of(20)
    assert router.capacity.of(num_tokens=20, num_experts=NUM_EXPERTS, top_k=2, training=training) == expected
    routing, free = router(tokens), build()(tokens)
    assert torch.equal(routing.kept, keep(free.chosen, expected))
    assert int(routing.num_dropped) == int((~routing.kept).sum()) > (0 if training else -1)
    assert torch.equal(routing.weights, free.weights * routing.kept)
    assert torch.equal(routing.tokens_per_expert, free.tokens_per_expert)


def test_capacity_keeps_random_tokens() -> None:
    router, tokens = build(1, capacity=Capacity(train=0.5, minimum=2, keep="random")), tokens_of(64)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(router(tokens))
    assert torch.equal(drawn[0].kept, drawn[1].kept)
    assert not torch.equal(drawn[0].kept, drawn[2].kept)
    for routing in drawn:
        numbers = torch.bincount(routing.chosen[routing.kept], minlength=NUM_EXPERTS)
        assert torch.equal(numbers, routing.tokens_per_expert.clamp_max(4))


@pytest.mark.parametrize(
    ("options", "sizes", "expected"),
    [
        ({"train": 1.25}, (64, 8, 1), 10),
        ({"train": 1.1}, (64, 8, 2), 18),
        ({}, (3, 8, 1), 4),
        ({"train": None}, (1, 1, 1), None),
    ],
)
def test_capacities(options: Any, sizes: tuple[int, int, int], expected: int | None) -> None:
    tokens, experts, top_k = sizes
    found = Capacity(**options).of(num_tokens=tokens, num_experts=experts, top_k=top_k, training=True)
    assert found == expected


# ------------------------------------------------------------------------------------------ record and replay


@pytest.mark.parametrize("capacity", [None, Capacity(train=0.5, minimum=2, keep="random")], ids=["all", "dropped"])
def test_what_was_recorded_is_replayed(capacity: Capacity | None) -> None:
    router, tokens = build(capacity=capacity, renormalize=True), tokens_of(30)
    first = router(tokens)
    again = router(tokens, replay=first.record)
    assert torch.equal(again.chosen, first.chosen)
    assert torch.equal(again.weights, first.weights)
    assert torch.equal(again.record, first.record)
    other = router(tokens_of(30, seed=2), replay=first.record)
    assert torch.equal(other.record, first.record)
    assert not torch.equal(other.weights, first.weights)
    other.weights.sum().backward()
    assert router.weight.grad is not None
    with pytest.raises(ShapeError, match=r"Found 30 tokens with 2 experts each, and a record of shape \(29, 2\)"):
        router(tokens, replay=first.record[1:])


def test_forced_balance() -> None:
    routing = build(3, forced_balance=True)(tokens_of(16))
    assert routing.tokens_per_expert.tolist() == [6] * NUM_EXPERTS
    assert all(len({*row}) == 3 for row in routing.chosen.tolist())
    assert routing.weights.requires_grad


# ------------------------------------------------------------------------------------------ noise


@pytest.mark.parametrize("noise", [GaussianNoise(1.0), UniformNoise(0.5)])
def test_noise_is_for_training_only(noise: Any) -> None:
    router, tokens = build(noise=noise), tokens_of(40)
    torch.manual_seed(0)
    first, second = router(tokens), router(tokens)
    assert not torch.equal(first.weights, second.weights)
    assert not torch.equal(first.chosen, second.chosen)
    assert torch.equal(router.eval()(tokens).weights, build()(tokens).weights)


def draw_on_ranks() -> list[Any]:
    with ParallelMesh(dp=2, tp=2) as mesh:
        torch.manual_seed(mesh.global_rank)
        router = build(noise=GaussianNoise(1.0), capacity=Capacity(train=0.5, minimum=2, keep="random"))
        return [mesh.rank("dp"), router(tokens_of(40)).record.tolist()]


def test_ranks_with_the_same_tokens_draw_alike() -> None:
    found: dict[int, list[Any]] = {0: [], 1: []}
    for place, record in run_processes(draw_on_ranks, 4):
        found[place].append(record)
    assert found[0][0] == found[0][1] != found[1][0] == found[1][1]


# ------------------------------------------------------------------------------------------ losses


def aux_loss(routing: Any, scores: torch.Tensor) -> torch.Tensor:
    parts = torch.bincount(routing.chosen.flatten(), minlength=NUM_EXPERTS) / routing.chosen.numel()
    of_experts = [parts[expert] * scores[:, expert].mean() for expert in range(NUM_EXPERTS)]
    return NUM_EXPERTS * torch.stack(of_experts).sum()


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_losses(kind: Any) -> None:
    tokens = tokens_of(24)
    router = build(scores=kind, losses=RouterLosses(aux_weight=0.5, z_weight=0.25))
    routing, logits = router(tokens), tokens @ router.weight.T
    scores = logits.softmax(1) if kind == "softmax" else logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True)
    assert_equal(routing.aux_loss.detach(), aux_loss(routing, scores).detach(), "aux")
    assert_equal(routing.z_loss.detach(), logits.exp().sum(1).log().pow(2).mean().detach(), "z")
    assert_equal(routing.loss.detach(), (0.5 * routing.aux_loss + 0.25 * routing.z_loss).detach(), "both")
    router.losses = RouterLosses(aux_weight=0.5, aux_over="sequence")
    found = router(tokens.view(3, 8, WIDTH)).aux_loss
    of_sequences = [aux_loss(router(part), score) for part, score in zip(tokens.chunk(3), scores.chunk(3), strict=True)]
    assert_equal(found.detach(), torch.stack(of_sequences).mean().detach(), "of sequences")


def test_losses_of_no_tokens_are_zero() -> None:
    router = build(losses=RouterLosses(aux_weight=0.5, z_weight=0.25), capacity=Capacity())
    routing = router(tokens_of(0))
    assert float(routing.loss.detach()) == 0
    routing.loss.backward()


NUM_TOKENS = (9, 0, 4, 7)


def global_loss() -> tuple[torch.Tensor, torch.Tensor, int]:
    with ParallelMesh(dp=4) as mesh, CommCounter() as counter:
        router = build(losses=RouterLosses(aux_weight=1.0, aux_over="global"))
        tokens = tokens_of(sum(NUM_TOKENS)).split(NUM_TOKENS)[mesh.rank("dp")]
        loss = router(tokens).loss
        loss.backward()
        assert router.weight.grad is not None
        return loss.detach(), router.weight.grad, counter.calls["all_reduce", "dp"]


def test_global_loss_is_that_of_all_tokens() -> None:
    router = build(losses=RouterLosses(aux_weight=1.0))
    expected = router(tokens_of(sum(NUM_TOKENS))).loss
    expected.backward()
    found = run_processes(global_loss, 4)
    for loss, _, calls in found:
        assert_equal(loss, expected.detach(), "loss")
        assert calls == 1
    assert router.weight.grad is not None
    assert_equal(torch.stack([grad for _, grad, _ in found]).mean(0), router.weight.grad, "mean gradient")


SHARDINGS: dict[str, dict[str, int]] = {"dp2-sp2": {"dp": 2, "sp": 2}, "dp2-tp2": {"dp": 2, "tp": 2}}
NUM_SEQUENCES, LENGTH = 2, 6


def train_on(batch: torch.Tensor, losses: RouterLosses, mesh: ParallelMesh | None = None) -> Any:
    """The loss of some sequences, and the gradient of the router's weights."""
    router = build(losses=losses, mesh=mesh)
    if mesh is not None:
        router.use_sharded_tokens()
    loss = router(batch).loss
    loss.backward()
    assert router.weight.grad is not None
    return loss.detach(), router.weight.grad


def train_on_sharded_sequences(axes: dict[str, Any], losses: RouterLosses) -> Any:
    with ParallelMesh(**axes) as mesh:
        sharded = "tp" if mesh.size("tp") > 1 else "sp"
        batch = batches_of(mesh.size("dp"))[mesh.rank("dp")]
        loss, grad = train_on(batch.chunk(mesh.size(sharded), 1)[mesh.rank(sharded)], losses, mesh)
        # what is there besides averages over dp and sp: the ranks of tp add up what their tokens give
        return mesh.rank("dp"), loss, grad * mesh.size("tp")


def batches_of(number: int) -> torch.Tensor:
    return tokens_of(number * NUM_SEQUENCES * LENGTH).view(number, NUM_SEQUENCES, LENGTH, WIDTH)


@pytest.mark.parametrize("over", ["batch", "sequence", "global"])
@pytest.mark.parametrize("axes", SHARDINGS.values(), ids=SHARDINGS)
def test_losses_of_sharded_sequences_are_those_of_full_ones(axes: dict[str, int], over: Any) -> None:
    number, losses = axes.get("dp", 1), RouterLosses(aux_weight=1.0, aux_over=over)
    batches = batches_of(number)
    if over == "global":
        expected = [train_on(batches.flatten(0, 1), losses)] * number
    else:
        expected = [train_on(batch, losses) for batch in batches]
    found = run_processes(train_on_sharded_sequences, 2 * number, axes, losses)
    for place, loss, _ in found:
        assert_equal(loss, expected[place][0], "loss")
    mean = torch.stack([grad for _, _, grad in found]).mean(0)
    assert_equal(mean, torch.stack([grad for _, grad in expected]).mean(0), "mean gradient")


def test_small_scores_of_sharded_sequences() -> None:
    losses = RouterLosses(z_weight=0.25)
    loss, grad = train_on(batches_of(1)[0], losses)
    found = run_processes(train_on_sharded_sequences, 2, {"tp": 2}, losses)
    assert_equal(torch.stack([each[1] for each in found]), loss.expand(2), "loss")
    assert_equal(torch.stack([each[2] for each in found]).mean(0), grad, "sum of gradients")


# ------------------------------------------------------------------------------------------ biases


@pytest.mark.parametrize("recomputes", [None, True, False], ids=["no recomputation", "reentrant", "not reentrant"])
def test_biases_count_each_token_once(recomputes: bool | None) -> None:
    router = build(bias_rate=0.1)
    numbers = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    for seed in (1, 2):  # gradients are accumulated over two backward passes
        tokens = tokens_of(30, seed).requires_grad_()
        numbers += router(tokens.detach()).tokens_per_expert  # no backward pass of this one
        with torch.no_grad():
            router(tokens)
        if recomputes is None:
            weights = router(tokens).weights
        else:
            weights = checkpoint(lambda x: router(x).weights, tokens, use_reentrant=recomputes)
        weights.square().sum().backward()
    assert torch.equal(replace(router(tokens_of(1)), tokens_per_expert=router.take_counts()).tokens_per_expert, numbers)
    assert not router.take_counts().any()


def update_on_ranks() -> Any:
    with ParallelMesh(dp=2, tp=2) as mesh:
        built = [build(bias_rate=0.1), build(1, bias_rate=0.1), build()]
        routers = torch.nn.ModuleList(built)
        for router in built:
            router(tokens_of(*((30, 1), (5, 2))[mesh.rank("dp")])).weights.sum().backward()
        with CommCounter() as counter:
            update_expert_biases(routers)
        return [each.tolist() for each in routers.buffers()], dict(counter.calls)


def test_biases_are_updated_by_the_tokens_of_all_ranks() -> None:
    expected: list[Any] = []
    for top_k in (2, 1):
        numbers = build(top_k)(torch.cat([tokens_of(30), tokens_of(5, 2)])).tokens_per_expert
        expected.append(torch.sign(numbers.double().mean() - numbers).long().tolist())
    for found, calls in run_processes(update_on_ranks, 4):
        assert found == expected
        assert calls == {("all_reduce", "dp"): 1, ("all_reduce", "tp"): 1}


def test_biases_are_not_rounded_by_casts() -> None:
    router = build(bias_rate=0.001).bfloat16()
    assert router.bias_steps is not None
    router.bias_steps += 1001
    other = build(bias_rate=0.001)
    other.load_state_dict(router.state_dict())
    assert other.bias_steps is not None
    assert other.bias_steps.tolist() == [1001] * NUM_EXPERTS


# ------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 9}, "Found top_k=9, num_experts=8"),
        ({"top_k": 0}, "Found top_k=0"),
        ({"top_k": 5, "group_limit": LIMIT}, "Found top_k=5, .*num_groups=4, num_chosen=2"),
        ({"group_limit": GroupLimit(3, 1)}, "num_groups=3"),
        ({"group_limit": GroupLimit(2, 3)}, "num_chosen=3"),
        ({"scores": "linear"}, "Found 'linear'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**options)


@pytest.mark.parametrize("options", [{"train": 0}, {"eval": -1.0}, {"minimum": -1}, {"keep": "last"}])
def test_capacities_that_make_no_sense_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match="Found Capacity"):
        Capacity(**options)


def test_losses_over_something_else_are_refused() -> None:
    with pytest.raises(ConfigError, match="Found 'world'"):
        RouterLosses(aux_over="world")  # pyright: ignore[reportArgumentType]
