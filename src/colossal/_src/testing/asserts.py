"""Comparisons of tensors whose tolerance depends on the dtype and has a reason."""

from dataclasses import dataclass
from typing import final

import torch
from torch import distributed as dist


@final
@dataclass(frozen=True)
class Tolerance:
    """How far two results of the same mathematics may differ.

    Args:
        rtol: Relative to the expected value.
        atol: Absolute.
        reason: Why they differ at all.

    Example:
        >>> from colossal.testing import Tolerance
        >>> Tolerance(rtol=1e-5, atol=0.0, reason="sums in another order").rtol
        1e-05
    """

    rtol: float
    atol: float
    reason: str


TOLERANCES = {
    torch.float64: Tolerance(1e-12, 1e-14, "sums in another order"),
    torch.float32: Tolerance(2e-5, 2e-6, "sums in another order, over a few thousand terms"),
    torch.bfloat16: Tolerance(2e-2, 2e-2, "8 bits of mantissa, rounded at each operation"),
    torch.float16: Tolerance(2e-3, 2e-3, "11 bits of mantissa, rounded at each operation"),
}
"""The tolerance of each dtype."""


def assert_close(actual: torch.Tensor, expected: torch.Tensor, name: str = "tensor") -> None:
    """Compare two tensors within the tolerance of their dtype; other dtypes must be equal.

    Args:
        actual: What was computed.
        expected: What it should be; same shape and dtype.
        name: Named in the error.

    Raises:
        AssertionError: They differ.

    Example:
        >>> import torch
        >>> from colossal.testing import assert_close
        >>> assert_close(torch.tensor([1.0, 2.000001]), torch.tensor([1.0, 2.0]))
        >>> try:
        ...     assert_close(torch.tensor([1.1]), torch.tensor([1.0]), name="loss")
        ... except AssertionError as error:
        ...     print(str(error).splitlines()[0])
        loss: Tensor-likes are not close!
    """
    tolerance = TOLERANCES.get(expected.dtype, Tolerance(0.0, 0.0, "exact"))
    torch.testing.assert_close(
        actual, expected, rtol=tolerance.rtol, atol=tolerance.atol, msg=lambda text: f"{name}: {text}"
    )


def assert_same_on_all_ranks(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Compare a tensor bit for bit with that of every other rank.

    Args:
        tensor: Any shape, the same on all ranks.
        group: The ranks; all of them by default.

    Raises:
        AssertionError: A rank holds other values.

    Communication: all_gather, the group, the tensor's bytes from each rank.

    Example:
        >>> import torch
        >>> from colossal.testing import assert_same_on_all_ranks, run_threads
        >>> def differ():
        ...     try:
        ...         assert_same_on_all_ranks(torch.tensor([torch.distributed.get_rank()]))
        ...     except AssertionError as error:
        ...         return str(error)
        >>> run_threads(differ, 2)[0]
        'All ranks must hold the same values. Found rank 1 apart by up to 1.'
    """
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, tensor.detach().contiguous(), group=group)
    for rank, other in enumerate(others):
        if not torch.equal(tensor, other):
            worst = (tensor - other).abs().max()
            raise AssertionError(f"All ranks must hold the same values. Found rank {rank} apart by up to {worst}.")
