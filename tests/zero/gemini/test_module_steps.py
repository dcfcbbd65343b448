# pyright: reportAttributeAccessIssue=false
"""Steps of other passes than one forward and one backward train in chunks as in one process."""

from typing import Any

import pytest
import torch
from chosen import crossed
from chunked import (
    BATCHES,
    EXACT,
    PLACEMENTS,
    Branches,
    assert_equal,
    loss_of,
    model_of,
    own_rows,
    sgd,
    train_alone,
    train_chunked,
    wrap,
)
from torch import nn

from colossal.testing import run_threads


def by_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Two forward passes before one backward pass."""
    return loss_of(model, rows) + (model(rows.flip(1)) * model(rows)).mean()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_several_forward_passes_before_a_backward_pass(placement: str) -> None:
    model = model_of(Branches)
    ranks = run_threads(train_chunked, 2, model, loss=by_loss, **PLACEMENTS[placement])
    assert_equal(ranks, train_alone(model, loss=by_loss))


def plain_backward(model: nn.Module, _optimizer: Any, rows: torch.Tensor) -> None:
    loss_of(model, rows).backward()


def twice(model: nn.Module, optimizer: Any, rows: torch.Tensor) -> None:
    loss = loss_of(model, rows)
    optimizer.backward(loss, retain_graph=True)
    optimizer.backward(loss * 0.5)


def look_between(model: nn.Module, optimizer: Any, rows: torch.Tensor) -> None:
    """Evaluate before, between and after the passes."""
    for part in rows.chunk(2):
        model.eval()
        with torch.no_grad():
            model(rows)
        with torch.inference_mode():
            model(rows)
        model.train()
        loss = loss_of(model, part) / 2
        with torch.no_grad():
            model(rows)
        optimizer.backward(loss)
        with torch.no_grad():
            model(rows)


def wasted_forward(model: nn.Module, optimizer: Any, rows: torch.Tensor) -> None:
    """A forward pass that no backward pass follows."""
    model(rows)
    optimizer.backward(loss_of(model, rows))
    kept = model(rows)
    del kept


def stepwise(model: nn.Module, optimizer: Any, rows: torch.Tensor) -> None:
    output = model(rows)
    optimizer.backward_by_grad(output, 2 * output.detach() / output.numel())


def failed_forward(model: nn.Module, optimizer: Any, rows: torch.Tensor) -> None:
    inner = getattr(model, "module", model)

    def fail(*_args: Any) -> None:
        raise ValueError("on purpose")

    for hook in (inner.twice[2].register_forward_pre_hook, inner.norm.register_forward_hook):
        handle = hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            model(rows)
        handle.remove()
        optimizer.zero_grad()
    optimizer.backward(loss_of(model, rows))


def failed_backward(model: nn.Module, optimizer: Any, rows: torch.Tensor) -> None:
    def fail(_grad: torch.Tensor) -> None:
        raise ValueError("on purpose")

    for name in ("norm", "embed"):
        inner = getattr(model, "module", model).get_submodule(name)
        handle = inner.register_forward_hook(lambda _m, _i, output: output.register_hook(fail) and None)
        loss = loss_of(model, rows)
        with pytest.raises(ValueError, match="on purpose"):
            optimizer.backward(loss)
        handle.remove()
        optimizer.zero_grad()
        del loss
    optimizer.backward(loss_of(model, rows))


def failed_plain_backward(model: nn.Module, optimizer: Any, rows: torch.Tensor) -> None:
    loss = loss_of(model, rows)
    loss.register_hook(lambda grad: grad)
    inner = getattr(model, "module", model)

    def fail(_grad: torch.Tensor) -> None:
        raise ValueError("on purpose")

    handle = inner.embed.register_forward_hook(lambda _m, _i, output: output.register_hook(fail) and None)
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(model, rows).backward()
    handle.remove()
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, rows))


STEPS = {
    "plain backward": (plain_backward, 1.0),
    "twice through one graph": (twice, 1.5),
    "evaluation between passes": (look_between, 1.0),
    "forward passes for nothing": (wasted_forward, 1.0),
    "backward from a gradient": (stepwise, 1.0),
    "after failed forward passes": (failed_forward, 1.0),
    "after failed backward passes": (failed_backward, 1.0),
    "after a failed plain backward pass": (failed_plain_backward, 1.0),
}


def train_by(step: Any, model: nn.Module, **options: Any) -> dict[str, Any]:
    wrapped, optimizer = wrap(model, sgd, **options)
    for batch in BATCHES:
        step(wrapped, optimizer, own_rows(batch))
        optimizer.step()
        optimizer.zero_grad()
    return wrapped.state_dict(only_rank_0=False)


@pytest.mark.chosen
@pytest.mark.parametrize(("name", "placement"), crossed(STEPS, PLACEMENTS, one_in=2))
def test_unusual_steps(name: str, placement: str) -> None:
    step, factor = STEPS[name]
    model = model_of(Branches)
    expected = train_alone(model, make=sgd, loss=lambda m, rows: loss_of(m, rows) * factor)["state"]
    for size in (1, 2):
        for state in run_threads(train_by, size, step, model, **PLACEMENTS[placement]):
            for key, value in expected.items():
                torch.testing.assert_close(state[key], value, **EXACT, msg=lambda text, n=key: f"{n}: {text}")
