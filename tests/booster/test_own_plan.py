"""A model of a program's own under tensor and pipeline parallelism together, by a plan of its own."""

from typing import Any

import torch
from plugins import HYBRID
from torch import nn
from torch.nn import functional

from colossal.booster import Booster
from colossal.errors import PlanError
from colossal.tensor import ParallelPlan, Stages, full_tensor_of
from colossal.testing import run_processes

VOCAB, WIDTH, LENGTH = 13, 16, 5
IDS = torch.arange(4 * LENGTH).view(4, LENGTH) * 7 % VOCAB


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_head = 4
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, _ = x.shape
        q, k, v = (each.view(size, length, self.n_head, -1).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(size, length, -1))


class Model(nn.Module):
    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = ParallelPlan(
    {"table": "vocab", "blocks.*.qkv": "packed_colwise(3)", "blocks.*.out": "rowwise"},
    divide_by_tp=("blocks.*.n_head",),  # of the blocks themselves, in whose place other stages have placeholders
    stages=Stages("blocks", pre_layers=("table",)),
)


def make(*, is_tied: bool) -> Model:
    torch.manual_seed(0)
    return Model(is_tied=is_tied).double()


def loss_of(logits: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["ids"][:, 1:].flatten())


def train() -> tuple[dict[str, torch.Tensor], str]:
    booster: Any = Booster(device="cpu", plugin=HYBRID(2, 2, num_microbatches=2, custom_policy=PLAN))
    model: Any = make(is_tied=False)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    booster.execute_pipeline(iter([{"ids": IDS}]), model, loss_of, optimizer)
    optimizer.step()
    params = {name.rpartition("module.")[2]: each for name, each in model.named_parameters()}
    found = {name: full_tensor_of(each).detach() for name, each in params.items()}
    try:
        booster.boost(make(is_tied=True))
    except PlanError as error:
        return found, str(error)
    return found, ""


def test_a_plan_shards_numbers_of_layers_in_stages_and_ties_over_stages() -> None:
    reference = make(is_tied=False)
    loss_of(reference(IDS), {"ids": IDS}).backward()
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    expected = {name: each.detach() for name, each in reference.named_parameters()}
    results = run_processes(train, 4)
    names: set[str] = set()
    for found, refused in results:
        assert "Found table.weight by 'vocab', head.weight by 'replicate'. Give all of them a style" in refused
        names |= {*found}
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)
    assert names == {*expected}
