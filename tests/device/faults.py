"""Faults of device handling, planted one by one: each must raise, or show as a wrong value.

A program of its own, as the device is there from the beginning of a process or not at all: prints what came of each, as
JSON.
"""

import json
import sys
import weakref
from collections.abc import Callable

import pretend_device
import torch
from torch import distributed as dist
from torch.nn import functional

DEVICE = torch.device(pretend_device.NAME)
FAULTS: dict[str, Callable[[], object]] = {}


def fault(function: Callable[[], object]) -> Callable[[], object]:
    FAULTS[function.__name__] = function
    return function


def model() -> torch.nn.Module:
    return torch.nn.Linear(4, 3).to(DEVICE)


def filled(value: float) -> torch.Tensor:
    return torch.full((1000,), value, device=DEVICE)


@fault
def a_host_tensor_in_a_loss() -> object:
    return functional.mse_loss(model()(torch.ones(2, 4, device=DEVICE)), torch.zeros(2, 3))


@fault
def a_host_tensor_in_a_collective() -> object:
    return dist.all_reduce(torch.ones(3))


@fault
def a_batch_that_was_not_moved() -> object:
    return model()(torch.ones(2, 4))


@fault
def a_read_of_what_a_side_stream_still_copies() -> object:
    source, side = filled(1.0), torch.Stream(DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        copied = source.clone()
    return copied + 1


@fault
def a_read_on_the_host_before_the_copy_is_over() -> object:
    target = torch.zeros(1000, pin_memory=True)
    target.copy_(filled(2.0), non_blocking=True)
    if target[0] != 2.0:
        raise ValueError(f"the host reads {target[0].item()} in place of 2.0")
    return target


@fault
def a_copy_into_pageable_memory_that_is_not_to_block() -> object:
    return torch.zeros(1000).copy_(filled(2.0), non_blocking=True)


@fault
def a_tensor_made_on_the_default_device() -> object:
    return filled(1.0) + torch.arange(1000)


@fault
def a_hard_wired_cuda() -> object:
    return torch.ones(3).to("cuda")


@fault
def a_generator_of_the_host() -> object:
    return torch.rand(3, device=DEVICE, generator=torch.Generator().manual_seed(1))


@fault
def a_wait_of_the_host_in_a_loop() -> object:
    total = torch.zeros((), device=DEVICE)
    with pretend_device.refused_waits():
        for _ in range(3):
            total += 1
            if total.item() < 0:
                break
    return total


@fault
def a_stale_event() -> object:
    source, side, done = filled(1.0), torch.Stream(DEVICE), torch.Event(DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    done.record(side)  # before the work that it is to tell the end of
    with side:
        source.mul_(2)
    torch.accelerator.current_stream().wait_event(done)
    return source + 1


@fault
def a_result_of_a_collective_that_was_not_waited_for() -> object:
    values = filled(1.0)
    work = dist.all_reduce(values, async_op=True)
    try:
        return values + 1
    finally:
        work.wait()


@fault
def memory_that_is_freed_while_a_side_stream_reads_it() -> object:
    side = torch.Stream(DEVICE)
    source = filled(1.0)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        kept = source * 2
    del source
    return torch.empty(1000, device=DEVICE), kept


@fault
def a_side_stream_that_does_not_wait_for_the_first() -> object:
    source, side = filled(1.0), torch.Stream(DEVICE)
    with side:
        return source.clone()


def in_order() -> object:
    """The same without a fault: nothing may raise."""
    source, side = filled(1.0), torch.Stream(DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    target = torch.zeros(1000, pin_memory=True)
    with side:
        doubled = source * 2
        target.copy_(doubled, non_blocking=True)
        done = side.record_event()
    torch.accelerator.current_stream().wait_event(done)
    again = doubled + 1
    done.synchronize()
    if target[0] != 2.0:
        raise ValueError(f"the host reads {target[0].item()}")
    target.fill_(5)
    back = torch.empty(1000, device=DEVICE).copy_(target, non_blocking=True)
    dist.all_reduce(back)
    return again.sum().item(), back.sum().item()


def in_place() -> None:
    """A move, and what is loaded after it, leave parameters the objects that they are, with what they carry."""
    net = model().cpu()
    weight, tied = net.weight, weakref.ref(net.weight)
    vars(weight)["mark"] = 7
    net.to(DEVICE).load_state_dict(torch.nn.Linear(4, 3).state_dict())
    net(torch.ones(2, 4, device=DEVICE)).sum().backward()
    assert net.weight is weight is tied()
    assert vars(weight)["mark"] == 7
    assert weight.grad is not None
    assert weight.device.type == weight.grad.device.type == pretend_device.NAME
    net.cpu()
    assert net.weight is weight
    assert weight.device.type == weight.grad.device.type == "cpu"


def rounded_once() -> None:
    """A small logarithm in 16 bits survives: as on a GPU, it is rounded at the end."""
    logits = torch.tensor([[9.0, 1.0]], dtype=torch.bfloat16, device=DEVICE)
    exact = functional.log_softmax(logits.float(), 1)
    assert torch.equal(functional.log_softmax(logits, 1), exact.bfloat16())
    assert exact[0, 0].item() < 0


def main() -> None:
    dist.init_process_group(pretend_device.NAME, store=dist.HashStore(), rank=0, world_size=1)
    found = {}
    for name, function in FAULTS.items():
        found[name] = ""
        try:
            function()
        except (RuntimeError, ValueError, AssertionError) as error:
            found[name] = str(error).splitlines()[0]
        torch.accelerator.synchronize()
    in_order()
    in_place()
    rounded_once()
    dist.destroy_process_group()
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
