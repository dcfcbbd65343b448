# pyright: reportArgumentType=false, reportPrivateUsage=false
"""A program's own plan whose code between the layers does not fit it is refused in the first training pass."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import MODELS, build, inputs_of, results_of
from plugins import HYBRID
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from colossal._src.shardformer import own_plan
from colossal.booster import Booster
from colossal.cluster import ParallelMesh
from colossal.errors import ColossalError
from colossal.shardformer import ShardConfig, ShardFormer, plan_of
from colossal.tensor import ParallelPlan, Stages, full_tensor_of
from colossal.testing import fake_world, run_processes

VOCAB, WIDTH, HEADS = 12, 8, 4
IDS = torch.arange(4 * 6).view(4, 6) * 5 % VOCAB
ROWS = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    """An MLP: what varies is what its activation does."""

    num_packed = 1

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH // self.num_packed, WIDTH)
        self.num_calls = 0

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return x + 0.01 * self.down(self.activate(self.up(x)))  # beside x nobody would see what it computes


class Gated(Block):
    num_packed = 2

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        return functional.glu(x)


class Normalized(Block):
    def activate(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (4 * WIDTH,))


class SoftMax(Block):
    def activate(self, x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1)


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gain = Gain()

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(self.gain(x))


class Bare(Block):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(0.5))

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x + self.shift)


class Noisy(Block):
    def activate(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.5)  # in evaluation too: a block that is not comparable


class Checkpointed(Block):
    is_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.is_reentrant)


class Reentrant(Checkpointed):
    is_reentrant = True


class Cached(Block):
    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        if cache is not None:
            cache.append(None)
        return super().forward(x)


class Attention(nn.Module):
    def __init__(self, *, is_normalized: bool = False) -> None:
        super().__init__()
        self.n_head = HEADS
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH // HEADS) if is_normalized else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, _ = x.shape
        q, k, v = (each.view(size, length, self.n_head, -1).transpose(1, 2) for each in self.up(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(self.norm(q), k, v, is_causal=True)
        return x + self.down(mixed.transpose(1, 2).reshape(size, length, -1))


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], *, head: str = "layer") -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(make() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.is_functional, self.caches = head == "functional", [] if make is Cached else None
        if head != "layer":
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x) if self.caches is None else block(x, self.caches)
        return functional.linear(x, self.table.weight) if self.is_functional else self.head(x)


PACKED = {"blocks.*.up": "packed_colwise(3)", "blocks.*.down": "rowwise"}
HEADS_DIVIDED = {"divide_by_tp": ("blocks.*.n_head",)}
TIED = {**ROWS, "table": "vocab", "head": "colwise_gather_output"}
NORMALIZED = partial(Attention, is_normalized=True)
RIGHT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (Block, {"styles": ROWS}),
    "gated": (Gated, {"styles": ROWS | {"blocks.*.up": "packed_colwise(2)"}}),
    "all features": (
        SoftMax,
        {"styles": {"blocks.*.up": "colwise_gather_output", "blocks.*.down": "rowwise_split_input"}},
    ),
    "gain": (Scaled, {"styles": ROWS | {"blocks.*.gain": "replicated_with_grad_allreduce"}}),
    "attention": (Attention, {"styles": PACKED, **HEADS_DIVIDED}),
    "normalized heads": (
        NORMALIZED,
        {"styles": PACKED | {"blocks.*.norm": "replicated_with_grad_allreduce"}, **HEADS_DIVIDED},
    ),
    "bare": (Bare, {"styles": ROWS | {"blocks.*": "replicated_with_grad_allreduce"}}),
    "checkpointed": (Checkpointed, {"styles": ROWS}),
    "reentrant": (Reentrant, {"styles": ROWS}),
    "cached": (Cached, {"styles": ROWS}),
    "tied": (Block, {"styles": TIED}),
}
WRONG: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "gated": (Gated, {"styles": ROWS}, r"blocks.0 returns other values from down, .*'packed_colwise\(2\)'"),
    "normalized": (Normalized, {"styles": ROWS}, r"blocks.0 raises RuntimeError: .*\[32\].*colwise_gather_output"),
    "all features": (SoftMax, {"styles": ROWS}, "returns other values from down.*softmax"),
    "gain": (Scaled, {"styles": ROWS}, "has a part of that of blocks.0.gain.weight.*replicated_with_grad_allreduce"),
    "bare": (Bare, {"styles": ROWS}, "has a part of that of blocks.0.shift, .*into a module of its own"),
    "input": (
        Block,
        {"styles": ROWS | {"blocks.*.up": "colwise_no_reduce"}},
        "has a part of that of blocks.0.input 0.*the style 'colwise'",
    ),
    "fused": (
        Attention,
        {"styles": PACKED | {"blocks.*.up": "colwise"}, **HEADS_DIVIDED},
        r"blocks.0 returns other values from down, .*'packed_colwise\(3\)'",
    ),
    "heads": (Attention, {"styles": PACKED}, "returns other values from down.*divide_by_tp"),
    "normalized heads": (NORMALIZED, {"styles": PACKED, **HEADS_DIVIDED}, "has a part of that of blocks.0.norm.weight"),
    "head": (Block, {"styles": ROWS | {"head": "colwise"}}, r"Model returns the output of head, .*\(4, 6, 6\)"),
    "functional": (Block, {"styles": TIED}, r"uses table.weight itself, by linear.*\(6, 8\).*'colwise_gather_output'"),
}


def make(name: str, kind: Callable[[], nn.Module]) -> Model:
    torch.manual_seed(0)
    return Model(kind, head=name if name in ("tied", "functional") else "layer").double()


def loss_of(logits: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["ids"][:, 1:].flatten())


def step(
    name: str, kind: Callable[[], nn.Module], plan: ParallelPlan, pp_size: int, *, compiles: str | None = None
) -> Any:
    plugin = HYBRID(2, pp_size, num_microbatches=2 if pp_size > 1 else None, custom_policy=plan)
    booster: Any = Booster(device="cpu", plugin=plugin)
    model: Any = make(name, kind)
    own = model
    model = torch.compile(model, backend="eager") if compiles == "before" else model
    try:
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    except ColossalError as error:
        return str(error)
    model = torch.compile(model, backend="eager") if compiles == "after" else model
    state = torch.get_rng_state()
    try:
        booster.execute_pipeline(iter([{"ids": IDS}]), model, loss_of, optimizer)
    except ColossalError as error:
        return str(error)
    if kind is not Noisy:
        assert torch.equal(torch.get_rng_state(), state)
    optimizer.step()
    calls = [getattr(block, "num_calls", None) for block in own.blocks]
    params = {re.split(r"module\.|_orig_mod\.", name)[-1]: each for name, each in model.named_parameters()}
    return {name: full_tensor_of(each).detach() for name, each in params.items()}, calls, own.caches


def tensor_parallel() -> dict[str, Any]:
    found = {f"right {name}": step(name, kind, ParallelPlan(**plan), 1) for name, (kind, plan) in RIGHT.items()}
    found |= {f"wrong {name}": step(name, kind, ParallelPlan(**plan), 1) for name, (kind, plan, _) in WRONG.items()}
    found["copied"] = copied(Block, ParallelPlan(ROWS)), copied(Gated, ParallelPlan(ROWS))
    found["noisy"] = step("", Noisy, ParallelPlan(ROWS), 1)
    found["not compared"] = step("", Gated, ParallelPlan(ROWS, compare_blocks=False), 1)
    return found


def copied(kind: Callable[[], nn.Module], plan: ParallelPlan) -> tuple[list[int], str]:
    """Train a copy, as of a momentum encoder, and then the model: how many hooks are left, and what is refused."""
    booster: Any = Booster(device="cpu", plugin=HYBRID(2, 1, custom_policy=plan))
    model: Any = booster.boost(make("", kind))[0]
    twin = copy.deepcopy(model)
    counts, refused = [], ""
    for each in (twin, model):
        try:
            each.train()(IDS).sum().backward()
        except ColossalError as error:
            refused += str(error)
        hooks = [
            hook
            for one in each.modules()
            for kind in (one._forward_pre_hooks, one._forward_hooks)
            for hook in kind.values()
        ]
        counts.append(
            sum(getattr(hook, "__module__", "").endswith(("loose_shards", "compared_blocks")) for hook in hooks)
        )
    return counts, refused


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_processes(tensor_parallel, 2)


@pytest.mark.parametrize("name", RIGHT)
def test_a_plan_that_fits_equals_one_process(results: list[dict[str, Any]], name: str) -> None:
    kind, _ = RIGHT[name]
    reference = make(name, kind)
    loss_of(reference(IDS), {"ids": IDS}).backward()
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    for values, calls, caches in (each[f"right {name}"] for each in results):
        assert values.keys() == dict(reference.named_parameters()).keys()
        for each, value in reference.named_parameters():
            torch.testing.assert_close(values[each], value.detach(), rtol=0, atol=1e-12)
        assert calls == [getattr(block, "num_calls", None) for block in reference.blocks]  # nothing ran twice
        assert caches == reference.caches


@pytest.mark.parametrize("name", WRONG)
def test_a_plan_that_does_not_fit_is_refused_on_all_ranks(results: list[dict[str, Any]], name: str) -> None:
    for found in results:
        refused = found[f"wrong {name}"]
        assert isinstance(refused, str), "it trained"
        assert re.search(WRONG[name][2], refused, re.DOTALL), refused


def test_what_draws_random_numbers_and_what_is_not_to_be_compared_trains(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert not isinstance(found["noisy"], str)
        assert not isinstance(found["not compared"], str)


def test_copies_are_looked_at_once_by_themselves(results: list[dict[str, Any]]) -> None:
    for (counts, nothing), (_, refused) in (found["copied"] for found in results):
        assert not nothing
        assert counts == [0, 0], counts
        assert refused.count("returns other values from down") == 2


def on_stages() -> tuple[Any, Any]:
    stages = Stages("blocks", pre_layers=("table",))
    right, wrong = (
        ParallelPlan(ROWS | {"blocks.*.up": style}, stages=stages) for style in ("packed_colwise(2)", "colwise")
    )
    return step("", Gated, right, 2), step("", Gated, wrong, 2)


def test_stages_of_a_pipeline_compare_their_own_blocks() -> None:
    found = run_processes(on_stages, 4)
    assert not any(isinstance(right, str) for right, _ in found)
    assert all("blocks." in wrong and "returns other values from down" in wrong for _, wrong in found)


def families() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in MODELS:
        model: Any = build(name)
        table = plan_of(model)
        plan = replace(table, styles={**table.styles, "?of.the.program": "colwise"})  # or it would not be compared
        booster: Any = Booster(device="cpu", plugin=HYBRID(2, 1, custom_policy=plan))
        try:
            model, *_ = booster.boost(model)
            results_of(model, inputs_of(name))[0].backward()
            found[name] = None
        except ColossalError as error:
            found[name] = str(error)
    return found


@pytest.mark.slow
def test_the_plans_of_all_families_pass_as_if_they_were_of_the_program() -> None:
    for found in run_processes(families, 2):
        assert not {name: error for name, error in found.items() if error}


def make_compiled(kind: Callable[[], nn.Module]) -> nn.Module:
    block = kind()
    block.compile(backend="eager")
    return block


def compiled() -> list[tuple[Any, Any]]:
    """Train with a plan that fits and with one that does not: blocks compiled in place, then a model after boost."""
    right, wrong = ParallelPlan(PACKED, **HEADS_DIVIDED), ParallelPlan(ROWS)
    in_place = [partial(make_compiled, kind) for kind in (Attention, Gated)]
    assert "Call model.compile() instead" in step("", Block, wrong, 1, compiles="before")
    return [
        (step("", in_place[0], right, 1), step("", in_place[1], wrong, 1)),
        (step("", Attention, right, 1, compiles="after"), step("", Gated, wrong, 1, compiles="after")),
    ]


@pytest.mark.slow
def test_compiled_blocks_are_compared() -> None:
    reference = make("", Attention)
    loss_of(reference(IDS), {"ids": IDS}).backward()
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    for right, refused in (each for found in run_processes(compiled, 2) for each in found):
        for name, value in reference.named_parameters():
            torch.testing.assert_close(right[0][name], value.detach(), rtol=0, atol=1e-12)
        assert "returns other values from down" in refused


def test_a_plan_that_is_not_compared_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    logger = SimpleNamespace(warning=lambda message, **_: said.append(message))
    monkeypatch.setattr(own_plan, "get_dist_logger", lambda: logger)
    table = plan_of(build("llama"))
    for compares in (True, False):
        plan = replace(table, styles={**table.styles, "?of.the.program": "colwise"}, compare_blocks=compares)
        with fake_world(4), ParallelMesh(tp=2, sp=2) as mesh:
            config = ShardConfig(mesh=mesh, enable_sequence_parallelism=True, sequence_parallelism_mode="all_to_all")
            ShardFormer(config).shard(build("llama"), plan)
    (message,) = said
    assert "for LlamaForCausalLM are not compared. Train one step without it" in message
