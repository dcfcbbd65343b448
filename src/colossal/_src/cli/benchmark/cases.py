"""What ``colossal benchmark`` measures: a table to which every kind of parallelism adds its cases."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

from colossal._src.cli.benchmark.settings import Settings

if TYPE_CHECKING:
    import torch

Step = Callable[[], object]
Prepare = Callable[[Settings, int], Step]
"""Builds what is measured on this rank for so many samples; returns one step of it."""

_GROWTH = 4
"""How much wider the middle of a block is, as in a transformer."""


@final
@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str  # what is computed
    parallelism: str  # how it is parallelized: ``"none"``, ``"data"`` or ``"tensor"`` and the mode
    size: int  # number of ranks
    # samples that a rank works on: its own ones with data parallelism, all with tensor parallelism
    batch_per_rank: int
    flops: float  # floating-point operations of a step, on all ranks together
    prepare: Prepare  # builds what is measured on this rank

    @property
    def batch_size(self) -> int:
        """Samples of all ranks together."""
        return (self.size if self.parallelism == "data" else 1) * self.batch_per_rank


def _products(settings: Settings) -> Iterator[Case]:
    flops = 2.0 * settings.batch_size * settings.seq_len * _GROWTH * settings.hidden_dim**2
    yield Case("matrix product", "none", 1, settings.batch_size, flops, _prepare_product)


def _single_steps(settings: Settings) -> Iterator[Case]:
    yield Case(
        "training step", "none", 1, settings.batch_size, _step_flops(settings, settings.batch_size), _prepare_step
    )


def _data_parallel_steps(settings: Settings) -> Iterator[Case]:
    """The same global batch at each number of ranks, then the same batch on each rank."""
    for size in _sizes(settings):
        split = [settings.batch_size // size] if settings.batch_size % size == 0 else []
        for batch_per_rank in [*split, settings.batch_size]:
            flops = _step_flops(settings, size * batch_per_rank)
            yield Case("training step", "data", size, batch_per_rank, flops, _prepare_step)


def _tensor_parallel_steps(settings: Settings) -> Iterator[Case]:
    """The same batch on every arrangement of the tp axis that the ranks make."""
    flops = _step_flops(settings, settings.batch_size)
    for size in _sizes(settings):
        for name, axes in _arrangements(size):
            prepare = partial(_prepare_tensor_step, axes={"tp": size, **axes})
            yield Case("training step", f"tensor {name}", size, settings.batch_size, flops, prepare)


def _arrangements(size: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The modes that so many ranks fit, without the grids that are another mode's."""
    yield "1d", {}
    side, edge = math.isqrt(size), round(size ** (1 / 3))
    if side > 1 and side**2 == size:
        yield "2d", {"tp_mode": "2d"}
    for depth in range(2, size):
        across = math.isqrt(size // depth)
        if across > 1 and depth * across**2 == size:
            yield f"2.5d x{depth}", {"tp_mode": "2.5d", "tp_depth": depth}
    if edge > 1 and edge**3 == size:
        yield "3d", {"tp_mode": "3d"}


FAMILIES: tuple[Callable[[Settings], Iterator[Case]], ...] = (
    _products,
    _single_steps,
    _data_parallel_steps,
    _tensor_parallel_steps,
)
"""Each makes the cases of one kind."""


def cases_of(settings: Settings) -> list[Case]:
    """List the cases of a benchmark, in the order of the table."""
    return [case for family in FAMILIES for case in family(settings)]


def _sizes(settings: Settings) -> list[int]:
    """The numbers of ranks that divide the largest one, from 2."""
    return [size for size in range(2, settings.ranks + 1) if settings.ranks % size == 0]


def _step_flops(settings: Settings, batch_size: int) -> float:
    """Forward, and twice as much backward: the gradients of the input and of the weight."""
    block = 2 * 2 * _GROWTH * settings.hidden_dim**2
    return 3.0 * batch_size * settings.seq_len * settings.layers * block


def _prepare_product(settings: Settings, batch_size: int) -> Step:
    import torch

    left = _random(settings, batch_size * settings.seq_len, settings.hidden_dim)
    right = _random(settings, settings.hidden_dim, _GROWTH * settings.hidden_dim)
    return lambda: torch.mm(left, right)


def _prepare_step(settings: Settings, batch_size: int) -> Step:
    """A training step through the Booster; with one rank no plugin, with more data parallelism."""
    import torch

    from colossal._src.booster import Booster
    from colossal._src.booster.plugin import TorchDDPPlugin
    from colossal._src.cluster import current_mesh

    booster = Booster(plugin=TorchDDPPlugin() if current_mesh().world_size > 1 else None)
    net = _mlp(settings)
    sgd = torch.optim.SGD(net.parameters(), lr=1e-6)
    model, optimizer, criterion, _, _ = booster.boost(net, sgd, torch.nn.MSELoss())
    assert optimizer
    assert criterion
    inputs, targets = (_random(settings, batch_size, settings.seq_len, settings.hidden_dim) for _ in range(2))

    def step() -> None:
        booster.backward(criterion(model(inputs), targets), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _prepare_tensor_step(settings: Settings, batch_size: int, axes: dict[str, Any]) -> Step:
    """A training step of the same network, of colossal's layers, on a mesh of its own."""
    import torch

    from colossal._src.cluster import ParallelMesh
    from colossal._src.nn.layer import Linear, split_input

    with ParallelMesh(**axes) as mesh:
        net = _mlp(settings, Linear)
        full = [_random(settings, batch_size, settings.seq_len, settings.hidden_dim) for _ in range(2)]
        inputs, targets = (split_input(tensor, mesh) for tensor in full)
    sgd = torch.optim.SGD(net.parameters(), lr=1e-6)

    def step() -> None:
        ((net(inputs) - targets).square().sum() / full[0].numel()).backward()
        sgd.step()
        sgd.zero_grad()

    return step


def _mlp(settings: Settings, linear: "type[torch.nn.Module] | None" = None) -> "torch.nn.Module":
    import torch

    from colossal.accelerator import get_current_device

    linear = linear or torch.nn.Linear
    width, middle = settings.hidden_dim, _GROWTH * settings.hidden_dim
    blocks = [
        torch.nn.Sequential(linear(width, middle), torch.nn.GELU(), linear(middle, width))
        for _ in range(settings.layers)
    ]
    return torch.nn.Sequential(*blocks).to(get_current_device(), getattr(torch, settings.dtype))


def _random(settings: Settings, *shape: int) -> "torch.Tensor":
    import torch

    from colossal.accelerator import get_current_device

    return torch.randn(*shape, device=get_current_device(), dtype=getattr(torch, settings.dtype))
