"""Comparisons whose tolerance depends on the dtype and has a reason: of tensors, and of models with one process."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import distributed as dist
from torch import nn

from colossal._src.interface import full_spec_of, unwrap_model
from colossal._src.tensor import backing_shard, copy_placement, full_tensor_of, strip_compile_prefix


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
    torch.float64: Tolerance(1e-11, 1e-12, "sums in another order, over a few thousand terms"),
    torch.float32: Tolerance(2e-5, 2e-6, "sums in another order, over a few thousand terms"),
    torch.bfloat16: Tolerance(2e-2, 2e-2, "8 bits of mantissa, rounded at each operation"),
    torch.float16: Tolerance(2e-3, 2e-3, "11 bits of mantissa, rounded at each operation"),
}
"""The tolerance of each dtype."""


def assert_close(
    actual: torch.Tensor | float | Sequence[float],
    expected: torch.Tensor | float | Sequence[float],
    name: str = "tensor",
    *,
    rtol: float | None = None,
    atol: float | None = None,
    **options: Any,
) -> None:
    """Compare two tensors within the tolerance of their dtype; other dtypes must be equal.

    Args:
        actual: What was computed. Numbers, such as the losses of a training, are compared as float32 is.
        expected: What it should be; same shape and dtype.
        name: Named in the error.
        rtol: Relative tolerance in place of that of the dtype.
        atol: Absolute tolerance; 0 where only `rtol` is given.
        **options: Passed to `torch.testing.assert_close`, such as ``check_dtype=False``.

    Raises:
        AssertionError: They differ.

    Example:
        >>> import torch
        >>> from colossal.testing import assert_close
        >>> assert_close(torch.tensor([1.0, 2.000001]), torch.tensor([1.0, 2.0]))
        >>> assert_close([0.5, 0.25], [0.5, 0.2500001])
        >>> try:
        ...     assert_close(torch.tensor([1.1]), torch.tensor([1.0]), name="loss")
        ... except AssertionError as error:
        ...     print(str(error).splitlines()[0])
        loss: Tensor-likes are not close!
    """
    dtype = expected.dtype if isinstance(expected, torch.Tensor) else torch.float32
    limits = _limits(dtype, rtol, atol)
    options = {"msg": lambda text: f"{name}: {text}", **options}
    torch.testing.assert_close(actual, expected, rtol=limits.rtol, atol=limits.atol, **options)


_GPU_FACTOR, _ELEMENTS_PER_STRAY = 10, 100
"""How much wider limits are on a GPU, and of how many elements one may be further apart all the same."""

# [Note: comparisons after Adam]
# Adam divides each gradient by its size. Where a gradient is nearly zero, as that of the bias of an attention's keys,
# which is zero but for rounding, its sign is what the order of the sums made of it, and the element makes a full step
# of the learning rate in either direction. Which elements these are is decided by the processor: by the width of its
# vectors and the kernels that torch chooses for it. So no tolerance for single elements holds everywhere. What holds:
# two runs are apart by at most twice the path that each has made, and few elements have a gradient that small, so that
# the average is far below that path. A gradient that is not averaged moves most elements apart by a good part of it.
# Gradients, and optimizers that are linear in them, have no such amplification: compare those closely. In float64 what
# rounding leaves of a gradient of zero is 1e-18, and Adam, whose eps is 1e-8, makes 1e-10 of a step of that.
_MEAN_SHARE = 0.01

# [Note: comparisons on a GPU]
# A GPU computes products of other shapes by other kernels, which sum in another order. A CPU sums in nearly the same
# order, and there no element may be further apart.


def assert_equal_to_one_process(
    model: nn.Module,
    reference: nn.Module | Mapping[str, torch.Tensor],
    *,
    gradients: bool = False,
    moved: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Compare the full parameters of a distributed model with those that one process has. All ranks call it.

    The limits of the dtype hold on any processor for gradients, and after steps that are linear in the gradient, as
    those of SGD are. After steps of Adam, which makes steps out of rounding, train both in float64 where you can and
    give ``atol=1e-9``; in less than 64 bits give `moved`.

    Args:
        model: The model, boosted or not: replicated, sharded by any plugin or layer, or partitioned into pipeline
            stages.
        reference: The same model, trained in one process, or its tensors by the names of its parameters.
        gradients: Whether gradients are compared too, as the model and `reference` have them after a backward pass.
            Plugins that keep gradients in shards leave none in the model.
        moved: After steps of Adam, or of another optimizer whose steps do not get shorter with the gradient, in less
            than 64 bits: the sum of the learning rates of all steps. No element may then differ by more than twice as
            much, and on average over all parameters that a rank holds by a hundredth of it. An error in a few
            parameters hides in that average: compare the `gradients` of a first step as well.
        rtol: Relative tolerance in place of that of the dtype.
        atol: Absolute tolerance; 0 where only `rtol` is given. On a GPU of CUDA, tensors in less than 64 bits may
            differ by ten times as much, and 1 in 100 of their elements by more: sums are in another order, and Adam
            makes a full step of a gradient that is as small as rounding.

    Raises:
        AssertionError: A parameter or a gradient differs, one of them is missing, or is on no rank.

    Communication: all_gather, the ranks that shard a tensor, its bytes; all_gather_object, all ranks, the names.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.nn import Linear
        >>> from colossal.testing import assert_equal_to_one_process, run_threads
        >>> reference = torch.nn.Linear(4, 6)
        >>> def compare():
        ...     with ParallelMesh(tp=2):
        ...         model = Linear.from_native(reference)
        ...     assert_equal_to_one_process(model, reference)
        ...     return tuple(model.weight.shape)
        >>> run_threads(compare, 2)
        [(3, 4), (3, 4)]
    """
    wanted = dict(reference.named_parameters()) if isinstance(reference, nn.Module) else reference
    held = dict(_held_parameters(model))
    names = [*held]
    if dist.is_initialized():
        names_by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names_by_rank, names)
        names = [name for names in names_by_rank for name in names]
    if different := sorted(set(names) ^ set(wanted)):
        raise AssertionError(f"The ranks must hold the parameters that one process has. Found apart: {different}.")
    limits = {"rtol": rtol, "atol": atol}
    if moved is not None:
        _compare_paths(held, wanted, moved)
    for name, parameter in held.items():
        if moved is None:
            _compare_full(backing_shard(parameter), wanted[name].detach(), name, **limits)
        if gradients:
            grads = parameter.grad, wanted[name].grad
            if (grads[0] is None) != (grads[1] is None):
                missing = "the model" if grads[0] is None else "the reference"
                raise AssertionError(f"Both models must have the same gradients. Found none of {name} in {missing}.")
            if grads[0] is not None and grads[1] is not None:
                _compare_full(copy_placement(grads[0], parameter), grads[1], f"gradient of {name}", **limits)


def _held_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of which this rank has a part, by their names in the full model."""
    model = unwrap_model(model)
    full_spec = full_spec_of(model)
    for root in (model,) if full_spec is None else full_spec.roots:
        root.state_dict(keep_vars=True)  # waits for what is still being gathered
        for name, parameter in root.named_parameters():
            known = strip_compile_prefix(name)
            yield known if full_spec is None else full_spec.names.get(known, known), parameter


def _compare_paths(held: Mapping[str, nn.Parameter], wanted: Mapping[str, torch.Tensor], moved: float) -> None:
    """Compare after steps of Adam: each element, and all of them on average. See [Note: comparisons after Adam]."""
    total, count = 0.0, 0
    for name, parameter in held.items():
        full, expected = full_tensor_of(backing_shard(parameter)).detach(), wanted[name].detach()
        assert_close(full, expected.to(full.device), name, rtol=0.0, atol=2 * moved)
        apart = (full.double() - expected.to(full.device).double()).abs()
        total, count = total + float(apart.sum()), count + apart.numel()
    if total > _MEAN_SHARE * moved * count:
        raise AssertionError(
            f"After a path of {moved:g}, parameters must be apart by at most {_MEAN_SHARE * moved:g} on average. "
            f"Found {total / count:g} over {count} elements: compare the gradients of the first step."
        )


def _compare_full(held: torch.Tensor, expected: torch.Tensor, name: str, **limits: float | None) -> None:
    full = full_tensor_of(held).detach().to(expected.device)
    if not held.is_cuda or full.dtype == torch.float64 or not _are_strays_few(full, expected, **limits):
        assert_close(full, expected, name, **limits)


def _are_strays_few(found: torch.Tensor, expected: torch.Tensor, **limits: float | None) -> bool:
    """Whether all but 1 in 100 elements are within ten times the limits, and none is infinite or NaN."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype) or not bool(found.isfinite().all()):
        return False
    limit = _limits(found.dtype, **limits)
    rtol, atol = _GPU_FACTOR * limit.rtol, _GPU_FACTOR * limit.atol
    is_near = torch.isclose(found, expected, rtol=rtol, atol=atol)
    return int((~is_near).sum()) * _ELEMENTS_PER_STRAY <= found.numel()


def _limits(dtype: torch.dtype, rtol: float | None, atol: float | None) -> Tolerance:
    if rtol is not None or atol is not None:
        return Tolerance(rtol or 0.0, atol or 0.0, "given")
    return TOLERANCES.get(dtype, Tolerance(0.0, 0.0, "exact"))


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
