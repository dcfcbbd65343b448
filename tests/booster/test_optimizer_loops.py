"""What programs do with a boosted optimizer besides steps: as in one process, or refused with what to do."""

import pytest
import torch
from loops import PLUGINS, SHARDED, SLOW, Loop, Refused, Values, check_loops, run_loops
from small_models import BATCHES
from torch import distributed as dist


def reduce_rate_by_own_loss(loop: Loop) -> Values:
    """A schedule of the loss of each rank's own samples."""
    model, optimizer = loop.start()
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.01)
    for number in range(6):
        schedule.step(float(loop.train(model, optimizer, BATCHES[number % len(BATCHES)])))
    return loop.values(model)


def reduce_rate_by_common_loss(loop: Loop) -> Values:
    model, optimizer = loop.start()
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.01)
    for number in range(6):
        loss = loop.train(model, optimizer, BATCHES[number % len(BATCHES)])
        if loop.booster is not None:
            dist.all_reduce(loss)
        schedule.step(float(loss / loop.size))
    return loop.values(model)


def set_rate_by_rank(loop: Loop) -> Values:
    model, optimizer = loop.start()
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * (1 + loop.rank)
    for batch in BATCHES:
        loop.train(model, optimizer, batch)
    return loop.values(model)


def step_another_optimizer(loop: Loop) -> Values:
    """Two optimizers of one model, of which the first has stepped when the second one does."""
    model, _ = loop.start(lr=0.0)
    other = torch.optim.SGD(list(model.parameters())[2:], lr=0.3)
    with loop.no_sync(model):
        loop.backward(model(loop.own(BATCHES[0])).square().mean(), _)
    for parameter in list(model.parameters())[:2] if loop.booster is not None else ():
        dist.all_reduce(parameter.grad)
    other.step()
    return loop.values(model)


def discard_on_one_rank(loop: Loop) -> Values:
    model, optimizer = loop.start()
    loop.backward(model(loop.own(BATCHES[0])).square().mean(), optimizer)
    optimizer.step()
    for group in optimizer.param_groups if loop.rank == 0 else ():
        for parameter in group["params"]:
            parameter.grad = None
    loop.backward(model(loop.own(BATCHES[1])).square().mean(), optimizer)
    optimizer.step()
    return loop.values(model)


OTHERS = ("FSDP", *SHARDED)
REFUSED: Refused = {
    reduce_rate_by_own_loss: dict.fromkeys(PLUGINS, "Reduce what a schedule is given"),
    reduce_rate_by_common_loss: {},
    set_rate_by_rank: dict.fromkeys(PLUGINS, "lr of the optimizer's group 0 differs between ranks"),
    step_another_optimizer: {"DDP": "outside of no_sync", "Hybrid": "outside of no_sync"} | dict.fromkeys(OTHERS, ""),
    discard_on_one_rank: {
        **dict.fromkeys(SHARDED, "Discard gradients by zero_grad"),
        **dict.fromkeys(("DDP", "Hybrid", "FSDP"), ""),
    },
}


def train_all(plugin: str) -> list[Values | str]:
    return run_loops(REFUSED, plugin)


@pytest.mark.parametrize(
    "plugin", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in PLUGINS]
)
def test_loops_train_as_in_one_process_or_are_refused(plugin: str) -> None:
    check_loops(REFUSED, plugin, train_all)
