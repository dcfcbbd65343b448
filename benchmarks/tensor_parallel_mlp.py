"""A column- and a row-parallel layer, forward and backward: colossal's, by hand with raw collectives, and DTensor's.

By hand is what one would write for this one model: two autograd functions around `torch.distributed`. The bars: at most
1.05 of the time by hand at both sizes, and of DTensor's 0.6 at the small one and 0.93 at the large one.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=2 benchmarks/tensor_parallel_mlp.py --backend gloo
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import colossal
from colossal.cluster import ParallelMesh
from colossal.nn import Linear1D_Col, Linear1D_Row

SIZES = {"small": (32, 256), "large": (512, 512)}  # tokens, hidden


class SumGradients(torch.autograd.Function):
    """Use one tensor on all ranks."""

    @staticmethod
    def forward(ctx, x):  # noqa: ANN001, ANN205, ARG004, D102
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):  # noqa: ANN001, ANN002, ANN205, ARG004, D102
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad


class Sum(torch.autograd.Function):
    """Add up the ranks' tensors."""

    @staticmethod
    def forward(ctx, x):  # noqa: ANN001, ANN205, ARG004, D102
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, *grads):  # noqa: ANN001, ANN002, ANN205, ARG004, D102
        return grads[0]


class ByHand(torch.nn.Module):
    """The same arithmetic, for this model only."""

    def __init__(self, hidden: int, ranks: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(hidden, 4 * hidden // ranks)
        self.down = torch.nn.Linear(4 * hidden // ranks, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply twice."""
        middle = functional.gelu(self.up(SumGradients.apply(x)))
        return Sum.apply(functional.linear(middle, self.down.weight)) + self.down.bias


def models(hidden: int, mesh: ParallelMesh) -> dict[str, torch.nn.Module]:
    """The three with the same weights."""
    torch.manual_seed(0)
    native = torch.nn.Sequential(
        torch.nn.Linear(hidden, 4 * hidden), torch.nn.GELU(), torch.nn.Linear(4 * hidden, hidden)
    )
    ours = torch.nn.Sequential(
        Linear1D_Col.from_native(native[0], mesh), torch.nn.GELU(), Linear1D_Row.from_native(native[2], mesh)
    )
    by_hand = ByHand(hidden, mesh.size("tp"))
    by_hand.load_state_dict(
        {
            f"{ahead}.{name}": value
            for ahead, at in (("up", 0), ("down", 2))
            for name, value in ours[at].state_dict().items()
        }
    )
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    dtensor = parallelize_module(native, mesh.device_mesh["tp"], plan)
    return {"colossal": ours, "by hand": by_hand, "DTensor": dtensor}


def step_of(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Forward and backward."""

    def step() -> torch.Tensor:
        model.zero_grad()
        x.grad = None
        y = model(x)
        y.backward(torch.ones_like(y))
        return y

    return step


def check(models: dict[str, torch.nn.Module], x: torch.Tensor) -> None:
    """All of them compute the same."""
    found = []
    for model in models.values():
        y = step_of(model, x)()
        assert x.grad is not None
        grads = [parameter.grad for parameter in model.parameters()]
        grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        found.append([y.detach(), x.grad.clone(), *grads])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def seconds(step: Callable[[], torch.Tensor], repeats: int) -> float:
    """The time of a step, all ranks beginning together."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - started) / repeats


def measure(name: str, mesh: ParallelMesh, turns: int, repeats: int) -> None:
    """Print a line for each of the three."""
    tokens, hidden = SIZES[name]
    made = models(hidden, mesh)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1)).requires_grad_()
    check(made, x)
    steps = {key: step_of(model, x) for key, model in made.items()}
    times: dict[str, list[float]] = {key: [] for key in steps}
    order = random.Random(0)  # noqa: S311 (the same on all ranks)
    for turn in range(turns + 2):
        for key in order.sample(sorted(steps), len(steps)):
            taken = seconds(steps[key], repeats)
            if turn > 1:
                times[key].append(taken)
    slowest = torch.tensor([times[key] for key in steps])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    ours = slowest[0]
    if mesh.global_rank == 0:
        for key, row in zip(steps, slowest, strict=True):
            ratios = (ours / row).tolist()
            low, _, high = statistics.quantiles(ratios, n=4)
            microseconds = 1e6 * statistics.median(row.tolist())
            print(
                f"{name:<7}{tokens:>5} x {hidden:<5}{key:<10}{microseconds:>9.0f} us   colossal takes "
                f"{statistics.median(ratios):.3f} of it ({low:.3f} to {high:.3f})"
            )


def main() -> None:
    """Measure both sizes."""
    parser = argparse.ArgumentParser(description="A tensor-parallel MLP beside its peers.")
    parser.add_argument("--turns", type=int, default=60, help="turns in which each of the three is timed once")
    parser.add_argument("--repeats", type=int, default=8, help="steps timed together")
    parser.add_argument("--backend", default=None, help="of the collectives; the fastest one by default")
    options = parser.parse_args()
    colossal.launch_from_torch(backend=options.backend, verbose=False)
    mesh = ParallelMesh(tp=int(os.environ["WORLD_SIZE"]))
    if mesh.global_rank == 0:
        print(f"{mesh.size('tp')} ranks, {dist.get_backend()}, forward and backward")
    for name in SIZES:
        measure(name, mesh, options.turns, options.repeats)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
