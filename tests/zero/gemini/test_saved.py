"""What autograd saves: places of chunks instead of their values, whoever else has hooks, and bytes of all else."""

import gc
from typing import Any

import pytest
import torch
from chunked import BATCHES, EXACT, WIDTH, Branches, Deep, loss_of, model_of, own_rows, train_alone, wrap
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from colossal._src.zero.gemini import SavedTensors
from colossal.errors import UnsupportedError
from colossal.testing import fake_world, run_threads
from colossal.zero.gemini import DeviceMemory


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_a_backward_pass_after_the_step_is_refused() -> None:
    with fake_world(1):
        for options in ({}, {"placement_policy": "auto", "device_budget": 40_000}):
            model, optimizer = wrap(model_of(Deep), **options)
            stale = loss_of(model, BATCHES[0])
            optimizer.backward(loss_of(model, BATCHES[1]))
            optimizer.step()
            with pytest.raises(UnsupportedError, match=r"updated in between. Run the backward pass before the step"):
                optimizer.backward(stale)
            optimizer.zero_grad()
            optimizer.backward(loss_of(model, BATCHES[1]))
            optimizer.step()


def test_a_backward_pass_after_loading_is_refused() -> None:
    with fake_world(2):
        model, optimizer = wrap(model_of(Deep))
        stale = loss_of(model, BATCHES[0])
        model.load_state_dict({name: torch.ones_like(value) for name, value in model_of(Deep).state_dict().items()})
        model(BATCHES[0])
        with pytest.raises(UnsupportedError, match="updated in between"):
            optimizer.backward(stale)


class Norms(nn.Module):
    """Operations that save a parameter itself, not a view of it."""

    def __init__(self, context: Any, depth: int = 4) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(WIDTH) + 0.5 for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.frozen = nn.LayerNorm(WIDTH).requires_grad_(False)
        self._context = context

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._context():
            for scale, norm in zip(self.scales, self.norms, strict=True):
                x = torch.sin(self.frozen(norm(x * scale)))
        return x


def identity_hooks() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def train(model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    wrapped, optimizer = wrap(model, sgd, chunk_numel=WIDTH, **options)
    for batch in BATCHES:
        optimizer.backward(loss_of(wrapped, own_rows(batch)))
        optimizer.step()
        optimizer.zero_grad()
    return wrapped.state_dict(only_rank_0=False)


@pytest.mark.parametrize("context", [identity_hooks, save_on_cpu])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("offloaded", [0.0, 1.0])
def test_hooks_of_others_keep_values(context: Any, size: int, offloaded: float) -> None:
    model = model_of(lambda: Norms(context))
    expected = train_alone(model, make=sgd)["state"]
    for state in run_threads(train, size, model, offload_optim_frac=offloaded, offload_param_frac=offloaded):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, **EXACT, msg=name)


def double(model: nn.Module) -> list[torch.Tensor]:
    """The gradient of a gradient's norm with respect to the inputs."""
    wrapped, _ = wrap(model, None)
    rows = own_rows(BATCHES[0]).clone().requires_grad_()
    with wrapped.chunks.forward_pass():
        (grad,) = torch.autograd.grad(loss_of(wrapped.unwrap(), rows), rows, create_graph=True)
        return list(torch.autograd.grad((grad**2).sum(), rows))


def test_gradients_of_gradients() -> None:
    model = model_of(Branches)
    rows = BATCHES[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(model, rows), rows, create_graph=True)
    (expected,) = torch.autograd.grad((grad**2).sum(), rows)
    for size in (1, 2):
        found = torch.cat([each[0] for each in run_threads(double, size, model)])
        torch.testing.assert_close(found / size**2, expected, **EXACT)  # each rank takes the mean of its rows


def test_weights_are_not_kept_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a forward pass only those chunks are there that have room; the graph holds none of the others."""
    made: list[StorageWeakRef] = []
    allocate = DeviceMemory._allocate

    def note(self: DeviceMemory, num_bytes: int) -> torch.UntypedStorage:
        storage = allocate(self, num_bytes)
        made.append(StorageWeakRef(storage))
        return storage

    with fake_world(2):
        model, optimizer = wrap(model_of(lambda: Deep(8, 16)), chunk_numel=16 * 16 + 16)
        chunks, memory = model.chunks.chunks, model.chunks.memory
        monkeypatch.setattr(DeviceMemory, "_allocate", note)
        loss = loss_of(model, BATCHES[0])
        assert [chunk.full is not None for chunk in chunks] == [False] * 7 + [True] * 2
        assert memory.used["parameters"] == sum(chunk.shard.nbytes for chunk in chunks) + 2 * chunks[1].num_bytes
        assert sum(not each.expired() for each in made) <= 3, "two chunks_by_storage, and what is kept for the next one"
        optimizer.backward(loss)


def test_bytes_are_counted_once_for_each_memory() -> None:
    seen: list[int] = []
    saved = SavedTensors(count=seen.append)
    x = torch.ones(4, 4, requires_grad=True)
    with saved.hooks(lambda *_: None):
        y = x * 2
        loss = (y * y.t() * y[0]).sum()
    assert sum(seen) == 4 * 16 * 2  # y, and y * y.t()
    loss.backward(retain_graph=True)
    assert sum(seen) == 4 * 16 * 2
    loss.backward()
    assert sum(seen) == 0
    with saved.hooks(lambda *_: None):
        dropped = (x * x).sum()
    assert sum(seen) == 64
    del dropped
    assert sum(seen) == 0


def test_nothing_is_counted_if_nobody_wants_to_know() -> None:
    saved = SavedTensors(count=None)
    x = torch.ones(3, requires_grad=True)
    with saved.hooks(lambda *_: None):
        loss = (x * x).sum()
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]


def count_activations(model: nn.Module) -> list[int]:
    wrapped, optimizer = wrap(model, placement_policy="auto", device_budget=10**6)
    used = wrapped.chunks.memory.used
    seen = []
    for _ in range(2):
        loss = loss_of(wrapped, own_rows(BATCHES[0]))
        seen.append(used["activations"])
        optimizer.backward(loss)
        del loss
        gc.collect()
        seen.append(used["activations"])
        optimizer.step()
    return [*seen, max(wrapped.chunks.trace.activations)]


def test_activations_are_counted_and_gone_after_the_pass() -> None:
    model = model_of(Deep)
    held: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(BATCHES[0])
    first, empty, second, gone, most = run_threads(count_activations, 1, model)[0]
    assert output is not None
    assert first == second == sum(held.values())
    assert most >= first
    assert empty == gone == 0
