"""The step of Adam in torch's operations: what the kernels are compared with, and what takes their place."""

from collections.abc import Iterator, Sequence

import torch

from colossal._src.kernel.adam.step import AdamStep, AdamTensors, Columns

_TEMPORARY_ELEMENTS = 1 << 24


def reference_adam_step(tensors: Sequence[AdamTensors], step: AdamStep) -> None:
    """Do what `adam_step` does, an operation after the other."""
    beta1, beta2 = step.betas
    for one in tensors:
        param, grad = one.param.detach().float(), one.grad.float() * step.grad_scale
        if not step.is_decoupled:
            grad = grad.add(param, alpha=step.weight_decay)
        else:
            param = param * (1 - step.lr * step.weight_decay)
        one.exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
        one.exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = one.exp_avg_sq.sqrt().div_(step.root_of_correction).add_(step.eps)
        param = param.addcdiv(one.exp_avg, root, value=-step.step_size)
        one.param.detach().copy_(param)
        if one.copy is not None:
            one.copy.detach().copy_(param)


def run_reference(columns: Columns, step: AdamStep, _num_threads: int) -> None:
    """Run the reference on lists of tensors, on any device."""
    reference_adam_step(rows_of(columns), step)


def run_fused(columns: Columns, step: AdamStep, num_threads: int) -> None:
    """Run torch's fused update, with passes before and after it for what it does not do."""
    if not step.bias_correction:  # torch's always corrects
        run_reference(columns, step, num_threads)
        return
    for bucket in _buckets(rows_of(columns)):
        _run_fused(bucket, step)


def _run_fused(tensors: Sequence[AdamTensors], step: AdamStep) -> None:
    params = [one.param.detach() for one in tensors]
    grads = [one.grad.float() for one in tensors]
    if step.grad_scale != 1:
        grads = torch._foreach_mul(grads, step.grad_scale)  # noqa: SLF001 (torch's own optimizers are made of it)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    wide = [param.float() for param in params]
    count = torch.full((), float(step.step), device=params[0].device)
    update = torch._fused_adamw_ if step.is_decoupled else torch._fused_adam_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    update(
        wide,
        grads,
        [one.exp_avg for one in tensors],
        [one.exp_avg_sq for one in tensors],
        [],
        [count] * len(params),
        lr=step.lr,
        beta1=step.betas[0],
        beta2=step.betas[1],
        weight_decay=step.weight_decay,
        eps=step.eps,
        amsgrad=False,
        maximize=False,
    )
    for one, param, updated in zip(tensors, params, wide, strict=True):
        if updated is not param:  # a parameter in float32 was updated in place
            param.copy_(updated)
        if one.copy is not None:
            one.copy.detach().copy_(updated)


def rows_of(columns: Columns) -> list[AdamTensors]:
    """Return what belongs to each parameter."""
    return [AdamTensors(*row) for row in zip(*filter(len, columns), strict=True)]


def _buckets(tensors: Sequence[AdamTensors]) -> Iterator[list[AdamTensors]]:
    """Divide tensors so that the float32 copies of a bucket take no more memory than they must."""
    bucket: list[AdamTensors] = []
    numel = 0
    for one in tensors:
        if bucket and numel + one.param.numel() > _TEMPORARY_ELEMENTS:
            yield bucket
            bucket, numel = [], 0
        bucket.append(one)
        numel += one.param.numel()
    if bucket:
        yield bucket
