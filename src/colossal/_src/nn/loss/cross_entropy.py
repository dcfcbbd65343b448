"""Cross-entropy of logits whose tokens, and possibly classes, are sharded along the tp axis.

The loss is that of the full batch, on all ranks; so are its gradients.
"""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from colossal._src import comm
from colossal._src._dtypes import HALF_DTYPES
from colossal._src.cluster import Axis, ParallelMesh
from colossal._src.comm import Channel, chunk_bounds
from colossal._src.nn.layer.tp.sharding import find_mesh, local_length, tp_sharding_of
from colossal._src.nn.layer.tp.split_activation import split_input
from colossal.errors import ConfigError, ShapeError

Reduction = Literal["mean", "sum", "none"]
_IGNORED = -100


class _TokenLoss(torch.nn.Module):
    """Implements what both losses have in common: the options, and the sum over the tokens of all ranks."""

    def __init__(
        self, ignore_index: int, reduction: Reduction | bool, label_smoothing: float, mesh: ParallelMesh | None
    ) -> None:
        super().__init__()
        if isinstance(reduction, bool):  # as programs of the older documentation say it
            reduction = "mean" if reduction else "none"
        if reduction not in ("mean", "sum", "none"):
            raise ConfigError(f"A reduction is mean, sum or none. Found {reduction!r}. Pass one of them.")
        if isinstance(ignore_index, bool):
            raise ConfigError(
                f"ignore_index is a target that does not count. Found {ignore_index}, which is a bool. Pass a "
                "reduction by its name: reduction='mean', 'sum' or 'none'."
            )
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.reduction: Reduction = reduction
        self.mesh = find_mesh(mesh)

    def _mask_invalid_targets(self, targets: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The targets without those that are no class, and how many these are.

        Other ranks may have none, and would wait for one that raised; so all learn of them with the sum of the losses.
        """
        is_wrong = ((targets < 0) | (targets >= number)) & (targets != self.ignore_index)
        if self.reduction == "none":
            self._refuse(is_wrong.sum(), number)
        return targets.masked_fill(is_wrong, self.ignore_index), is_wrong.sum()

    def _reduce_over_tokens(
        self, summed: torch.Tensor, count: torch.Tensor, num_wrong: torch.Tensor, number: int
    ) -> torch.Tensor:
        """The sum or the mean over the tokens of all ranks."""
        totals = torch.stack([summed, count.to(summed.dtype), num_wrong.to(summed.dtype)])
        for axis in tp_sharding_of(self.mesh).tokens:
            totals = comm.reduce(totals, axis, self.mesh)
        self._refuse(totals[2], number)
        return totals[0] / totals[1] if self.reduction == "mean" else totals[0]

    def _refuse(self, num_wrong: torch.Tensor, number: int) -> None:
        rule = f"Targets are classes, from 0 to {number - 1}, or {self.ignore_index} for those that do not count."
        if num_wrong.is_meta:
            return
        if _supports_async_assert(num_wrong.device):
            torch._assert_async(num_wrong == 0, f"{rule} Found others. Check the labels.")  # noqa: SLF001 (no public name)
        elif num_wrong.item():
            raise IndexError(f"{rule} Found {int(num_wrong)} others. Check the labels.")


class CrossEntropyLoss(_TokenLoss):
    """Cross-entropy of logits with all classes, for this rank's tokens, on the ambient mesh.

    Logits of half precision are computed with in float32.

    Args:
        weight: A weight for each class.
        ignore_index: A target that does not count.
        reduction: ``"mean"`` or ``"sum"`` over the tokens of all ranks, or ``"none"``: each of this rank's own. True
            is the mean, and False none.
        label_smoothing: Fraction of the target probability that is spread over all classes.
        mesh: The mesh; the ambient one by default.

    Raises:
        ConfigError: There is no such reduction, or `weight` or `ignore_index` is True or False.

    Communication: none in 1D. On a grid all_reduce, its token axes, 12 bytes; none backward.

    Example:
        >>> import torch
        >>> from colossal.nn import CrossEntropyLoss
        >>> CrossEntropyLoss()(torch.zeros(2, 4), torch.tensor([0, 3])).exp().round().item()
        4.0
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = _IGNORED,
        reduction: Reduction | bool = "mean",
        label_smoothing: float = 0.0,
        *,
        mesh: ParallelMesh | None = None,
    ) -> None:
        super().__init__(ignore_index, reduction, label_smoothing, mesh)
        if isinstance(weight, bool):
            raise ConfigError(
                f"weight has a value for each class. Found {weight}. Pass a reduction by its name: reduction={weight}."
            )
        self.weight: torch.Tensor | None
        self.register_buffer("weight", weight)

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the loss.

        Args:
            logits: This rank's tokens, (tokens, ..., classes); classes come last.
            targets: Their classes, (tokens, ...), split as by `colossal.nn.split_input`; or those of all ranks' tokens,
                which are split here.

        Returns:
            The loss of all ranks' tokens, a scalar; without reduction, that of this rank's, in the targets' shape.

        Raises:
            ShapeError: The targets do not fit the logits.
            IndexError: A target is no class; on all ranks, whichever has it, but for a loss that is not reduced. An
                accelerator that can stop by itself, as CUDA can, is not waited for: its next operation that is raises.
        """
        targets = local_targets(logits, targets, self.mesh)
        flat = _upcast(logits).flatten(0, -2)
        wanted, num_wrong = self._mask_invalid_targets(targets.flatten(), flat.shape[1])
        losses = functional.cross_entropy(
            flat,
            wanted,
            self.weight,
            ignore_index=self.ignore_index,
            reduction="none" if self.reduction == "none" else "sum",
            label_smoothing=self.label_smoothing,
        )
        if self.reduction == "none":
            return losses.view(targets.shape)
        counted = wanted != self.ignore_index
        counts = counted.float() if self.weight is None else self.weight[wanted.where(counted, 0)] * counted
        return self._reduce_over_tokens(losses, counts.sum(), num_wrong, flat.shape[1])


class VocabParallelCrossEntropyLoss(_TokenLoss):
    """Cross-entropy of logits with sharded classes, as `VocabParallelClassifier` returns, on the ambient mesh.

    No rank ever has the logits of all classes. The loss is computed in float32.

    Args:
        ignore_index: A target that does not count.
        reduction: ``"mean"`` or ``"sum"`` over the tokens of all ranks, or ``"none"``: each of this rank's own. True
            is the mean, and False none.
        label_smoothing: Fraction of the target probability that is spread over all classes.
        num_classes: The number of classes; by default as many as the ranks have, which is asked for each time.
        mesh: The mesh; the ambient one by default.

    Raises:
        ConfigError: There is no such reduction, or `ignore_index` is True or False.

    Communication: two all_reduces along tp or the feature axis, of 4 and of 12 bytes for each token, and without
    `num_classes` all_gather of 8 bytes for each rank; on a grid all_reduce, its token axes, 12 bytes. None backward.

    Source: Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053.

    Example:
        >>> import torch
        >>> from colossal.nn import VocabParallelCrossEntropyLoss
        >>> VocabParallelCrossEntropyLoss()(torch.zeros(2, 4), torch.tensor([0, 3])).exp().round().item()
        4.0
    """

    def __init__(
        self,
        ignore_index: int = _IGNORED,
        reduction: Reduction | bool = "mean",
        label_smoothing: float = 0.0,
        *,
        num_classes: int | None = None,
        mesh: ParallelMesh | None = None,
    ) -> None:
        super().__init__(ignore_index, reduction, label_smoothing, mesh)
        self.num_classes = num_classes

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the loss.

        Args:
            logits: This rank's tokens and classes, (tokens, ..., classes).
            targets: The classes of its tokens among all, (tokens, ...), split as by `colossal.nn.split_input`; or those
                of all ranks' tokens, which are split here.

        Returns:
            The loss of all ranks' tokens, a scalar; without reduction, that of this rank's, in the targets' shape.

        Raises:
            ShapeError: The targets do not fit the logits, or those have not this rank's classes.
            IndexError: A target is no class; on all ranks, whichever has it, but for a loss that is not reduced. An
                accelerator that can stop by itself, as CUDA can, is not waited for: its next operation that is raises.
        """
        if type(logits) is not torch.Tensor:  # those of a sharded model are marked, and refuse sums over their classes
            logits = logits.as_subclass(torch.Tensor)
        targets = local_targets(logits, targets, self.mesh)
        classes = self._find_class_shard(logits.shape[-1])
        wanted, num_wrong = self._mask_invalid_targets(targets.flatten(), classes.number)
        losses = cast(
            torch.Tensor, _VocabParallelCrossEntropy.apply(logits.flatten(0, -2), wanted, classes, self.label_smoothing)
        )
        counted = wanted != self.ignore_index
        losses = losses.masked_fill(~counted, 0.0)  # no product: if none counts, the mean's gradient is infinite
        if self.reduction == "none":
            return losses.view(targets.shape)
        return self._reduce_over_tokens(losses.sum(), counted.float().sum(), num_wrong, classes.number)

    def _find_class_shard(self, here: int) -> "_ClassShard":
        axes: tuple[Axis, ...] = tp_sharding_of(self.mesh).features or tp_sharding_of(self.mesh).vocabulary
        if self.mesh is None:
            return _ClassShard(None, here, 0)
        channel = Channel(axes[0], self.mesh)
        number = self.num_classes or sum(channel.lengths(here))
        if here != local_length(number, axes, self.mesh):
            raise ShapeError(
                f"Of {number} classes this rank has {local_length(number, axes, self.mesh)}. Found logits of {here}. "
                "Make them with a VocabParallelClassifier on the same mesh, without gathering."
            )
        return _ClassShard(channel, number, chunk_bounds(number, channel.size, channel.rank)[0])


@dataclass(frozen=True)
class _ClassShard:
    """How the classes are sharded, how many there are, and the first one of this rank."""

    channel: Channel | None
    number: int
    first: int

    def all_reduce(self, tensor: torch.Tensor, op: Literal["sum", "max"] = "sum") -> torch.Tensor:
        return tensor if self.channel is None else self.channel.all_reduce(tensor, op)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NC: torch.Tensor, targets_N: torch.Tensor, classes: _ClassShard, smoothing: float
    ) -> torch.Tensor:
        exact_NC = _upcast(logits_NC)
        num_here = exact_NC.shape[1]
        lowest_N = exact_NC.new_full((len(exact_NC),), -torch.inf)
        largest_N = classes.all_reduce(exact_NC.amax(1) if num_here else lowest_N, "max")
        shifted_NC = exact_NC - largest_N[:, None]
        at_N = targets_N - classes.first
        is_here_N = (at_N >= 0) & (at_N < num_here)
        at_N = at_N.where(is_here_N, 0)
        wanted_N = shifted_NC.gather(1, at_N[:, None])[:, 0] * is_here_N if num_here else torch.zeros_like(largest_N)
        all_sum_N = shifted_NC.sum(1)
        weights_NC = shifted_NC.exp_()
        total_N, wanted_N, all_sum_N = classes.all_reduce(torch.stack([weights_NC.sum(1), wanted_N, all_sum_N]))
        ctx.save_for_backward(weights_NC.div_(total_N[:, None]), at_N, is_here_N)
        ctx.smoothing, ctx.number, ctx.dtype = smoothing, classes.number, logits_NC.dtype
        log_total_N = total_N.log()
        losses_N = (1 - smoothing) * (log_total_N - wanted_N)
        return losses_N + smoothing * (log_total_N - all_sum_N / classes.number) if smoothing else losses_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        probs_NC, at_N, is_here_N = ctx.saved_tensors
        grad_NC = probs_NC - ctx.smoothing / ctx.number
        if grad_NC.shape[1]:
            grad_NC.scatter_add_(1, at_N[:, None], (-(1 - ctx.smoothing) * is_here_N.to(grad_NC.dtype))[:, None])
        return (grad_NC * grads[0][:, None]).to(ctx.dtype), None, None, None


def _upcast(logits: torch.Tensor) -> torch.Tensor:
    """Widen half precision, in which even a count of tokens would be rounded."""
    return logits.float() if logits.dtype in HALF_DTYPES else logits


def local_targets(logits: torch.Tensor, targets: torch.Tensor, mesh: ParallelMesh | None) -> torch.Tensor:
    """This rank's targets, split if they are those of all ranks; any others are rejected."""
    if tp_sharding_of(mesh).tokens and targets.dim() and targets.shape != logits.shape[:-1]:
        local = split_input(targets, mesh, features=False)
        targets = local if local.shape == logits.shape[:-1] else targets
    if logits.dim() < 2 or tuple(logits.shape[:-1]) != tuple(targets.shape):  # noqa: PLR2004 (tokens and classes)
        raise ShapeError(
            f"There is a target for each token: logits are (tokens, ..., classes), targets (tokens, ...). Found "
            f"{tuple(logits.shape)} and {tuple(targets.shape)}. Split both with colossal.nn.split_input."
        )
    return targets


def _supports_async_assert(device: torch.device) -> bool:
    """Whether a device can check and stop by itself, so that the host need not wait in each forward pass."""
    known: Any = torch._C  # noqa: SLF001 (no public name for the operators of a device)
    if device.type == "cpu":
        return False
    key = known._dispatch_key_for_device(device.type)  # noqa: SLF001 (as above)
    return known._dispatch_has_kernel_for_dispatch_key("aten::_assert_async.msg", key)  # noqa: SLF001 (as above)
