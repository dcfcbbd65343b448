"""The loss of language models whose logits are sharded over the vocabulary or over tokens."""

import sys
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional

from colossal._src import comm
from colossal._src.cluster import ParallelMesh
from colossal._src.nn.attention import SequenceSharding
from colossal._src.nn.loss import VocabParallelCrossEntropyLoss
from colossal.errors import UnsupportedError

_IGNORED = -100
_CAUSAL = ("ForCausalLM", "LMHeadModel")


def has_causal_loss(model: nn.Module) -> bool:
    """Whether a model computes the loss of causal language models, by its `loss_function`.

    Such classes are recognized by their names. A loss that the program has put there takes the logits of all.
    """
    is_causal = any(kind.__name__.endswith(_CAUSAL) for kind in type(model).__mro__)
    if not is_causal or not hasattr(type(model), "loss_function"):
        return False
    losses: Any = sys.modules.get("transformers.loss.loss_utils")
    found: Any = getattr(model, "loss_function", None)
    return isinstance(found, ParallelCausalLoss) or found is getattr(losses, "ForCausalLMLoss", None)


def set_causal_loss(model: nn.Module, loss: "ParallelCausalLoss") -> None:
    """Let a model compute its loss from sharded logits, and reject another loss, which would take them for all."""
    causal: Any = model
    causal.loss_function = loss
    model.register_forward_pre_hook(_check_loss)


def _check_loss(model: Any, _args: Any) -> None:
    if not isinstance(model.loss_function, ParallelCausalLoss):
        raise UnsupportedError(
            "Ranks shard the logits, of which the model computes its loss by a loss_function of its own. Found another "
            f"one, {getattr(model.loss_function, '__name__', type(model.loss_function).__name__)}, set after boost. "
            "Set model.loss_function before boost, which then gathers the logits, or pass parallel_output=False."
        )


@final
class ParallelCausalLoss:
    """Replaces the loss function of a causal language model, for sharded logits.

    Gradients are scaled for averaging over ranks: with tokens sharded over n ranks, the gradient on a rank is n times
    that of its local tokens.

    Communication: see `colossal.nn.VocabParallelCrossEntropyLoss`; with sharded tokens all_reduce, sp, 4 bytes forward
    and backward.
    """

    def __init__(
        self, mesh: ParallelMesh, sharding: SequenceSharding | None = None, is_vocab_parallel: bool = True
    ) -> None:
        self._mesh, self._sharding, self._is_vocab_parallel = mesh, sharding, is_vocab_parallel

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = _IGNORED,
        shift_labels: torch.Tensor | None = None,
        **_others: Any,
    ) -> torch.Tensor:
        """Compute the loss."""
        logits = logits.as_subclass(torch.Tensor)  # which a program may have from the outputs, where they are marked
        if shift_labels is None:
            # Shifted before they are sharded: the label of the last token of a shard is in the next one.
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shift_labels = shift_labels.to(logits.device)
        # Counted over all tokens: a mean of means would weigh tokens by how many labels their rank ignores.
        number = (shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        own = shift_labels if self._sharding is None else self._sharding.split(shift_labels)
        total = self._sum(logits.flatten(0, -2).float(), own.flatten(), vocab_size, ignore_index)
        if self._sharding is not None:
            total = comm.reduce(total, self._sharding.axis, self._mesh)
            total = comm.replicate(total, self._sharding.axis, self._mesh)  # each rank has the gradient of all
        return total / number

    def _sum(self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, ignore_index: int) -> torch.Tensor:
        if not self._is_vocab_parallel:
            return functional.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
        return VocabParallelCrossEntropyLoss(ignore_index, "sum", num_classes=vocab_size, mesh=self._mesh)(
            logits, labels
        )
