"""The loss that balances experts of models of Hugging Face, over the tokens of all ranks.

With f the share of tokens that an expert gets, and p its mean score, the loss is the number of experts times the sum of
f p over experts. A mean over ranks of products is not the product of means: what ranks average are f and p.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from colossal._src import comm
from colossal._src.cluster import ParallelMesh
from colossal._src.comm import end_graphs_in
from colossal._src.nn.attention import SequenceSharding
from colossal._src.tensor import DATA
from colossal.errors import UnsupportedError

end_graphs_in(__name__)  # a compiled model returns its outputs before they are changed
_ASKED = "output_router_logits"
_COEFFICIENT = "router_aux_loss_coef"
_CHOICES = "num_experts_per_tok"


def balances_experts(model: nn.Module) -> bool:
    """Whether a model adds such a loss to its own, if it is asked for the logits of its routers."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)
    needed = head(), *(_option(model, name) for name in (_COEFFICIENT, _CHOICES, "num_experts"))
    return not any(each is None for each in needed)


def balance_over_ranks(model: nn.Module, mesh: ParallelMesh, sharding: SequenceSharding | None = None) -> None:
    """Let a model balance the tokens of all ranks, instead of each rank its own."""
    if balances_experts(model) and (mesh.size(DATA) > 1 or sharding is not None):
        loss = _BalanceLoss(mesh, sharding)
        model.register_forward_pre_hook(loss.check, with_kwargs=True)
        model.register_forward_hook(loss.replace, with_kwargs=True)


@final
class _BalanceLoss:
    """Hooks of a model.

    Communication: all_reduce, dp, 8 bytes for each expert and 4 more, and backward the same; where sequences are
    sharded, over sp or tp as well. Over dp only where gradients are computed: in evaluation, ranks may have different
    numbers of batches.
    """

    def __init__(self, mesh: ParallelMesh, sharding: SequenceSharding | None) -> None:
        self._mesh, self._sharding = mesh, sharding

    def check(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse what a model could not compute from the tokens of a rank."""
        asked = kwargs.get(_ASKED)
        is_asked = getattr(getattr(model, "config", None), _ASKED, False) if asked is None else asked
        if is_asked and self._sharding is not None and _mask_of(args, kwargs) is not None:
            raise UnsupportedError(
                f"{_ASKED} balances experts over all tokens of a sequence where ranks shard it. Found an "
                "attention_mask, which leaves some out. Leave it out of the batch, as without padding, or use a plugin "
                "without sequence parallelism."
            )

    def replace(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> None:
        """Put the loss of all ranks in the place of that of this rank's tokens."""
        logits, local = getattr(outputs, "router_logits", None), getattr(outputs, "aux_loss", None)
        number = _option(model, "num_experts")
        if not isinstance(local, torch.Tensor) or not logits or any(each.shape[-1] != number for each in logits):
            return
        if self._sharding is None and not torch.is_grad_enabled():
            return
        sums = self._over_ranks(_sums(logits, _option(model, _CHOICES), _mask_of(args, kwargs)))
        balance = _balance_of(sums, number).to(local)
        if outputs.loss is not None:
            outputs.loss = outputs.loss + _option(model, _COEFFICIENT) * (balance - local).to(outputs.loss)
        outputs.aux_loss = balance

    def _over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        mesh, sharding = self._mesh, self._sharding
        if sharding is not None:
            sums = comm.reduce(sums, sharding.axis, mesh)
            if sharding.axis == "sp":  # whose ranks average gradients, while those of tp add up what their tokens give
                sums = comm.replicate(sums, sharding.axis, mesh)
        if mesh.size(DATA) > 1 and torch.is_grad_enabled():
            sums = comm.replicate(comm.reduce(sums, DATA, mesh), DATA, mesh)
        return sums


def _mask_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    return args[1] if len(args) > 1 else kwargs.get("attention_mask")


def _sums(logits: Sequence[torch.Tensor], num_choices: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Add up choices and scores of each expert, and tokens, over layers; of shape (2 E + 1,)."""
    number, device = logits[0].shape[-1], logits[0].device
    dtype = torch.promote_types(logits[0].dtype, torch.float32)
    choices, scores, num_tokens = (torch.zeros(length, dtype=dtype, device=device) for length in (number, number, 1))
    for layer in logits:
        probabilities = layer.to(device).softmax(-1)
        chosen = probabilities.topk(num_choices, dim=-1).indices.flatten()
        counted = probabilities.new_ones(len(layer)) if mask is None else mask.reshape(-1)
        counted = counted.to(device, dtype)
        choices = choices.index_add(0, chosen, counted.repeat_interleave(num_choices))
        scores = scores + (probabilities.to(dtype) * counted[:, None]).sum(0)
        num_tokens = num_tokens + counted.sum()
    return torch.cat([choices, scores, num_tokens])


def _balance_of(sums: torch.Tensor, number: int) -> torch.Tensor:
    choices, scores, num_tokens = sums.split([number, number, 1])
    return number * (choices / num_tokens * (scores / num_tokens)).sum()


def _option(model: nn.Module, name: str) -> Any:
    """An option of a model, which has it as an attribute or in the configuration of its language model."""
    config: Any = getattr(model, "config", None)
    find: Any = getattr(config, "get_text_config", lambda: config)
    return getattr(model, name, getattr(find(), name, None))
