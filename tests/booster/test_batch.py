# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
"""`execute_pipeline` is the same line under every plugin: what it runs, returns and leaves out."""

from typing import Any

import pytest
import torch
from torch import nn

from colossal.booster import Booster
from colossal.errors import ConfigError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"y": self.linear(x) * scale}


def loss_of(outputs: Any, batch: Any) -> torch.Tensor:
    target = batch["target"] if isinstance(batch, dict) else batch[1]
    return (outputs["y"] - target).square().mean()


X, TARGET = torch.ones(4, 2), torch.zeros(4, 1)
BATCHES: list[Any] = [{"x": X, "target": TARGET, "ids": [1, 2]}, (X, TARGET), [X, TARGET]]


def boost() -> tuple[Booster, Any, Any]:
    booster, model = Booster(device="cpu"), Net()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, model, optimizer


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_a_batch_is_what_a_forward_and_a_backward_pass_are(batch: Any) -> None:
    booster, model, optimizer = boost()
    done = booster.execute_pipeline(iter([batch]), model, loss_of, optimizer, return_outputs=True)
    found = model.unwrap().linear.weight.grad.clone()
    optimizer.zero_grad()
    loss = loss_of(model(X), batch)
    booster.backward(loss, optimizer)
    assert torch.equal(found, model.unwrap().linear.weight.grad)
    assert torch.equal(done["loss"], loss)
    assert torch.equal(done["outputs"]["y"], model(X)["y"])
    assert not done["loss"].requires_grad
    assert not done["outputs"]["y"].requires_grad


def test_a_mapping_gives_the_model_what_it_takes() -> None:
    booster, model, _ = boost()
    batch = {"x": X, "scale": 2.0, "target": TARGET}
    done = booster.execute_pipeline(iter([batch]), model, loss_of, return_outputs=True)
    torch.testing.assert_close(done["outputs"]["y"], 2 * model(X)["y"].detach())


def test_without_an_optimizer_or_gradients_nothing_runs_backward() -> None:
    booster, model, optimizer = boost()
    assert booster.execute_pipeline(iter(BATCHES[:1]), model, loss_of)["loss"] is not None
    with torch.no_grad():
        booster.execute_pipeline(iter(BATCHES[:1]), model, loss_of, optimizer)
    assert model.unwrap().linear.weight.grad is None


def test_what_is_not_asked_for_is_not_computed() -> None:
    booster, model, _ = boost()
    refuse = pytest.fail
    done = booster.execute_pipeline(
        iter(BATCHES[:1]), model, lambda _outputs, _batch: refuse("no loss is wanted"), return_loss=False
    )
    assert done == {"loss": None, "outputs": None}


def test_one_batch_is_taken() -> None:
    booster, model, optimizer = boost()
    batches = iter(BATCHES)
    booster.execute_pipeline(batches, model, loss_of, optimizer)
    assert len(list(batches)) == len(BATCHES) - 1


@pytest.mark.parametrize(
    ("data_iter", "criterion", "message"),
    [
        ({"x": X, "target": TARGET}, loss_of, r"Found dict. Pass iter\(\[batch\]\)"),
        ([(X, TARGET)], loss_of, "Found list"),
        (iter([(X, TARGET)]), None, "Found NoneType. Pass lambda outputs, batch: outputs.loss"),
    ],
)
def test_what_is_no_iterator_or_criterion_is_refused(data_iter: Any, criterion: Any, message: str) -> None:
    booster, model, optimizer = boost()
    with pytest.raises(ConfigError, match=message):
        booster.execute_pipeline(data_iter, model, criterion, optimizer)


def test_outputs_alone_need_no_criterion() -> None:
    booster, model, _ = boost()
    batches = iter([(X, TARGET)])
    done = booster.execute_pipeline(batches, model, None, return_loss=False, return_outputs=True)
    assert done["loss"] is None
    assert torch.equal(done["outputs"]["y"], model(X)["y"])
