# pyright: reportUnknownMemberType=false
"""``torch.ops.colossal.adam_step``, and the function that calls it."""

from collections.abc import Iterable
from functools import cache

import torch

from colossal._src.kernel.adam.step import AdamStep, AdamTensors, Columns, Runner, check_columns
from colossal.errors import UnsupportedError
from colossal.logging import get_dist_logger

_LIBRARY = torch.library.Library("colossal", "FRAGMENT")
_LIBRARY.define(
    "adam_step(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] copies, *, SymInt step, float lr, float beta1, float beta2, float eps, float weight_decay, "
    "bool is_decoupled, bool bias_correction, float grad_scale, int num_threads=0) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)


def adam_step(tensors: Iterable[AdamTensors], step: AdamStep, num_threads: int | None = None) -> None:
    """Update parameters and their means, in place.

    It computes in float32 whatever the parameters and gradients are, and reads and writes each of them once: unscaling,
    clipping, weight decay, the update and the copy in another precision take no passes of their own. Where the kernel
    cannot be built, torch's operations do the same, in several passes. It is an operation of torch,
    ``torch.ops.colossal.adam_step``, which `torch.compile` and `FakeTensorMode` know.

    Args:
        tensors: The parameters, with all that belongs to them.
        step: The numbers of the step.
        num_threads: How many threads run the update on the CPU; as many as torch uses by default.

    Raises:
        ShapeError: Tensors that belong together differ in size, or one has the wrong device, dtype or layout.

    Source: Kingma, Ba, "Adam", 2014, https://arxiv.org/abs/1412.6980; Loshchilov, Hutter, "Decoupled Weight Decay
    Regularization", 2017, https://arxiv.org/abs/1711.05101.

    Example:
        >>> import torch
        >>> from colossal.kernel import AdamStep, AdamTensors, adam_step
        >>> param, grad, exp_avg, exp_avg_sq = torch.ones(2), torch.ones(2), torch.zeros(2), torch.zeros(2)
        >>> adam_step([AdamTensors(param, grad, exp_avg, exp_avg_sq)], AdamStep(step=1, lr=0.5))
        >>> param
        tensor([0.5000, 0.5000])
    """
    groups: dict[tuple[torch.device, bool], list[AdamTensors]] = {}
    for one in tensors:
        groups.setdefault((one.param.device, one.copy is not None), []).append(one)
    with torch.no_grad():
        for group in groups.values():
            torch.ops.colossal.adam_step(
                [one.param for one in group],
                [one.grad for one in group],
                [one.exp_avg for one in group],
                [one.exp_avg_sq for one in group],
                [one.copy for one in group if one.copy is not None],
                step=step.step,
                lr=step.lr,
                beta1=step.betas[0],
                beta2=step.betas[1],
                eps=step.eps,
                weight_decay=step.weight_decay,
                is_decoupled=step.is_decoupled,
                bias_correction=step.bias_correction,
                grad_scale=step.grad_scale,
                num_threads=num_threads or 0,
            )


@cache
def runner_of(device: str) -> Runner:
    """Return what computes a step on a type of device: own code, or torch's where that cannot be built.

    It stays so for the life of the process; the logger ``colossal`` says once why it is torch's.
    """
    from colossal._src.kernel.adam import (
        native,
        reference,  # what only checkpoints do needs neither
    )

    makers = {"cpu": native.on_cpu, "cuda": native.on_cuda}
    if device not in makers:
        return reference.run_reference
    if device == "cuda" and torch.version.hip is not None:  # AMD's GPUs have this name too, but no such compiler
        return reference.run_fused
    try:
        return makers[device]()
    except UnsupportedError as error:
        get_dist_logger().warning(f"A step of Adam on {device!r} takes torch's own operations. {error}")
        return reference.run_fused


def _run(*columns: list[torch.Tensor], beta1: float, beta2: float, num_threads: int = 0, **numbers: float) -> None:
    check_columns(columns)
    step = AdamStep(betas=(beta1, beta2), **numbers)  # type: ignore[arg-type]
    runner_of(columns[0][0].device.type)(columns, step, num_threads)
    _count_change(columns)


def _count_change(columns: Columns) -> None:
    """Let autograd know of what was written, as it does of torch's own operations in place."""
    # tensors of inference mode have no version
    written = [tensor for index in (0, 2, 3, 4) for tensor in columns[index] if not tensor.is_inference()]
    torch.autograd.graph.increment_version(written)


def _fake(*columns: list[torch.Tensor], **_: float) -> None:
    check_columns(columns)


_LIBRARY.impl("adam_step", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("adam_step", _fake, "Meta")
