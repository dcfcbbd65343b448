"""What the loss scaler costs over torch.amp.GradScaler.

Both scale a loss, unscale and check the gradients of 400 tensors, and step SGD. There is no forward pass, and the
gradients stay as they are, so that the scaler is as much of the time as it can be.

    torchrun --standalone --nproc_per_node=1 benchmarks/precision_overhead.py
"""

import torch
from pairs import Step, arguments, race

import colossal
from colossal._src.amp import DynamicScaler, ScalerConfig
from colossal.accelerator import get_accelerator
from colossal.interface import OptimizerWrapper

TENSORS = 400
NEVER = 10**9


def build_optimizer(size: int) -> torch.optim.Optimizer:
    """SGD over parameters that have gradients."""
    device = get_accelerator().get_current_device()
    parameters = [torch.nn.Parameter(torch.ones(size, device=device)) for _ in range(TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD(parameters, lr=1e-6)


def by_hand(size: int) -> Step:
    """Return a step of torch's scaler; a scale of 1 leaves the gradients as they are."""
    optimizer, device = build_optimizer(size), get_accelerator().get_current_device()
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0, growth_interval=NEVER)
    loss = torch.ones((), device=device)

    def step() -> torch.Tensor:
        scaled = scaler.scale(loss)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return scaled

    return step


def by_wrapper(size: int) -> Step:
    """Return the same step through an optimizer wrapper."""
    device = get_accelerator().get_current_device()
    scaler = DynamicScaler(ScalerConfig(init_scale=1.0, growth_interval=NEVER), device.type)
    optimizer = OptimizerWrapper(build_optimizer(size), scaler)
    loss = torch.ones((), device=device)

    def step() -> torch.Tensor:
        scaled = optimizer.scale_loss(loss)
        optimizer.unscale_grad()
        optimizer.step()
        return scaled

    return step


def main() -> None:
    """Print the medians and the ratio."""
    args = arguments(pairs=400, steps=10, batch=20_000)
    colossal.launch_from_torch(verbose=False)
    what = f"{TENSORS} gradients of {args.batch} elements"
    race(by_hand(args.batch), by_wrapper(args.batch), args.pairs, args.steps, what)


if __name__ == "__main__":
    main()
