# pyright: reportUnknownMemberType=false, reportMissingImports=false
"""Hooks are called around the operations that take parameters, and change neither values nor gradients."""

from typing import Any

import pytest
import torch
from torch import nn

from colossal.legacy.tensor import ColoInitContext, ProcessGroup, ShardSpec
from colossal.tensor.param_op_hook import ColoParamOpHook, ColoParamOpHookManager
from colossal.testing import run_threads


class Recorder(ColoParamOpHook):
    """Notes the calls and the shapes of the parameters."""

    def __init__(self, calls: list[tuple[str, list[int]]]) -> None:
        self.calls = calls

    def note(self, name: str, params: list[torch.Tensor]) -> None:
        assert all(isinstance(each, nn.Parameter) for each in params)
        self.calls.append((name, [each.dim() for each in params]))

    def pre_forward(self, params: list[torch.Tensor]) -> None:
        self.note("pre_forward", params)

    def post_forward(self, params: list[torch.Tensor]) -> None:
        self.note("post_forward", params)

    def pre_backward(self, params: list[torch.Tensor]) -> None:
        self.note("pre_backward", params)

    def post_backward(self, params: list[torch.Tensor]) -> None:
        self.note("post_backward", params)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight  # tied, so that a parameter is taken by two operations
        with torch.no_grad():
            for number, each in enumerate(self.parameters()):
                each.copy_(torch.linspace(-1, 1 + number, each.numel()).view_as(each).sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.embed(tokens))))


def train(tp: int, calls: list[Any] | None) -> list[torch.Tensor]:
    """The loss and the gradients of this rank."""
    group = ProcessGroup(tp_degree=tp)
    with ColoInitContext(device="cpu", dtype=torch.float64, default_pg=group):
        model: Any = Model()
    if tp > 1:
        model.embed.weight.set_dist_spec(ShardSpec([-1], [tp]))
    tokens = torch.arange(6).view(2, 3)
    if calls is None:
        loss = (model(tokens) ** 2).sum()
    else:
        with ColoParamOpHookManager.use_hooks(Recorder(calls)):
            assert ColoParamOpHookManager.has_hook()
            loss = (model(tokens) ** 2).sum()
    assert not ColoParamOpHookManager.has_hook()
    loss.backward()
    grads = [each.grad for each in model.parameters()]
    return [torch.as_tensor(loss.item(), dtype=torch.float64), *(each.detach().clone() for each in grads)]


@pytest.mark.parametrize("tp", [1, 2])
def test_hooks_see_every_operation_and_change_nothing(tp: int) -> None:
    def program() -> tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]:
        calls: list[Any] = []
        return train(tp, None), train(tp, calls), calls

    for without, found, calls in run_threads(program, tp):
        for each, other in zip(found, without, strict=True):
            assert each.tolist() == other.tolist()
        forward = [("pre_forward", dims) for dims in ([2], [1, 1], [2])]
        assert [each for each in calls if each[0] == "pre_forward"] == forward
        around = [(name, dims) for _, dims in forward for name in ("pre_forward", "post_forward")]
        back = [(name, dims) for _, dims in reversed(forward) for name in ("pre_backward", "post_backward")]
        assert calls == around + back


def test_without_gradients_only_forward_methods_are_called_and_contexts_nest() -> None:
    def program() -> tuple[list[Any], list[Any]]:
        with ColoInitContext(device="cpu"):
            model: Any = Model()
        outer: list[Any] = []
        inner: list[Any] = []
        with torch.no_grad(), ColoParamOpHookManager.use_hooks(Recorder(outer)):
            with ColoParamOpHookManager.use_hooks(Recorder(inner)):
                model.norm(torch.ones(4))
            model.embed(torch.tensor([1]))
            model.embed.weight.add_(1.0)
            assert model.embed.weight.numel() == 32
            torch.zeros_like(model.embed.weight)
        return outer, inner

    ((outer, inner),) = run_threads(program, 1)
    assert inner == [("pre_forward", [1, 1]), ("post_forward", [1, 1])]
    assert outer == [("pre_forward", [2]), ("post_forward", [2])]
