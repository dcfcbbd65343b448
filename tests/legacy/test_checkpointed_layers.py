"""Layers that are computed again in the backward pass, by the older API: gradients and random numbers."""

import pytest
import torch
from torch import nn

from colossal.cluster import ParallelMesh
from colossal.legacy import utils
from colossal.legacy.context import ParallelMode
from colossal.legacy.context.random import add_seed, seed
from colossal.testing import fake_world


@pytest.mark.parametrize(("offload", "reentrant"), [(False, False), (False, True), (True, True)])
def test_checkpointed_layers_have_the_same_gradients(
    offload: bool, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
    inputs = torch.randn(3, 4, requires_grad=True)
    moved: list[int] = []
    pack = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: moved.append(tensor.numel()) or pack(tensor))
    grads = []
    for function in (lambda: layer(inputs), lambda: utils.checkpoint(layer, offload, inputs, use_reentrant=reentrant)):
        torch.manual_seed(1)
        layer.zero_grad()
        inputs.grad = None
        function().sum().backward()
        grads.append([inputs.grad, *(parameter.grad for parameter in layer.parameters())])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)
    assert bool(moved) == offload


def test_the_backward_pass_draws_again_from_the_generator_of_a_mode() -> None:
    masks: list[torch.Tensor] = []

    def drop(values: torch.Tensor) -> torch.Tensor:
        with seed(ParallelMode.TENSOR):
            masks.append(torch.rand(values.shape))
        return values * masks[-1]

    with fake_world(2), ParallelMesh(tp=2):
        add_seed(ParallelMode.TENSOR, 3, overwrite=True)
        inputs = torch.ones(8, requires_grad=True)
        outputs = [utils.checkpoint(drop, False, inputs) for _ in range(2)]
        torch.stack(outputs).sum().backward()
        with seed(ParallelMode.TENSOR):
            after = torch.rand(8)
    first, second = masks[:2]
    assert inputs.grad is not None
    torch.testing.assert_close(inputs.grad, first + second)
    assert sorted(mask.tolist() for mask in masks[2:]) == sorted(mask.tolist() for mask in (first, second))
    # the passes that are computed again leave the generator as they found it
    assert not any(torch.equal(after, mask) for mask in masks)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("offload", [True, False])
def test_offloaded_inputs_give_the_same_gradients(offload: bool, use_reentrant: bool) -> None:
    x, weight = (torch.arange(4.0, requires_grad=True) for _ in range(2))
    utils.checkpoint(
        lambda a, b, power: (a * b) ** power, offload, x, weight, 2, use_reentrant=use_reentrant
    ).sum().backward()
    expected = 2 * torch.arange(4.0) ** 3
    assert x.grad is not None and torch.equal(x.grad, expected)  # noqa: PT018
    assert weight.grad is not None and torch.equal(weight.grad, expected)  # noqa: PT018


@pytest.mark.parametrize("offload", [True, False])
def test_first_layers_whose_inputs_require_no_gradient_are_trained(offload: bool) -> None:
    layer, inputs = nn.Linear(4, 4), torch.randn(3, 4)
    after = nn.Linear(4, 1)
    after(utils.checkpoint(layer, offload, inputs)).sum().backward()
    found = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    after(layer(inputs)).sum().backward()
    for one, parameter in zip(found, layer.parameters(), strict=True):
        assert one is not None
        torch.testing.assert_close(one, parameter.grad)
