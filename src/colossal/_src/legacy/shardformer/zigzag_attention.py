"""Causal attention over sequences that are sharded in zigzag over a process group, by the older names."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import distributed as dist
from torch.nn import functional

from colossal._src.legacy.mesh import ProcessGroupMesh
from colossal._src.legacy.notice import superseded
from colossal._src.legacy.shardformer.colo_attention import AttnMaskType
from colossal._src.legacy.shardformer.group_layer import mesh_of
from colossal._src.nn.attention import SequenceSharding, ring_attention
from colossal.errors import ShapeError, UnsupportedError

_IGNORED_LABEL = -100


@final
class RingAttention:
    """Attention over the tokens of all ranks: keys and values travel from rank to rank."""

    @staticmethod
    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sp_axis: int,
        attention_mask_type: AttnMaskType,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        valid_indices: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        deterministic: bool = False,
        return_softmax: bool = False,
        inner_ring_size: int | None = None,
        pg_mesh: ProcessGroupMesh | None = None,
    ) -> torch.Tensor:
        """Compute causal attention.

        Args:
            q: The queries of this rank's tokens as `split_batch_zigzag` gives them, (batch, heads, tokens, features).
            k: Their keys.
            v: Their values.
            sp_axis: The axis of `pg_mesh` over which sequences are sharded.
            attention_mask_type: Only CAUSAL.
            cu_seqlens: Only None, as the next two: samples are not packed.
            max_seqlen: Only None.
            valid_indices: Only None.
            dropout_p: Only 0.
            softmax_scale: By what scores are multiplied; by default the root of 1 / features.
            deterministic: Accepted as documented: it always is.
            return_softmax: Only False.
            inner_ring_size: Ranks that form an inner ring.
            pg_mesh: The mesh; by default all ranks shard the sequence.

        Returns:
            The output for this rank's tokens, of the shape of `q`.

        Raises:
            UnsupportedError: An argument is something else.
            ConfigError: `inner_ring_size` does not divide the number of ranks.

        Communication: send, the axis, the bytes of key and value, once for each other rank; backward the same, and in
        addition the gradients of both, once for each rank.
        """
        del deterministic
        superseded("colossal.shardformer.layer.RingAttention", "colossal.nn.attention.ring_attention")
        packed = any(each is not None for each in (cu_seqlens, max_seqlen, valid_indices))
        if attention_mask_type is not AttnMaskType.CAUSAL or packed or dropout_p or return_softmax:
            raise UnsupportedError(
                "A ring computes causal attention of samples that are not packed, without dropout. Found "
                f"attention_mask_type={attention_mask_type}, dropout_p={dropout_p}, return_softmax={return_softmax}"
                f"{', and lengths of packed samples' if packed else ''}. Pass AttnMaskType.CAUSAL alone and leave "
                "padding out of the loss, or call colossal.nn.attention.ring_attention, which takes a mask."
            )
        group = dist.group.WORLD if pg_mesh is None else pg_mesh.get_group_along_axis(sp_axis)
        sharding = SequenceSharding(mesh_of(group), "tp", is_zigzag=True)
        return ring_attention(q, k, v, sharding, is_causal=True, scale=softmax_scale, inner_ring_size=inner_ring_size)


def split_batch_zigzag(
    batch: torch.Tensor | Sequence[torch.Tensor],
    sp_group: dist.ProcessGroup | None,
    seq_dim: int = 1,
    is_label: bool = False,
) -> Any:
    """Keep this rank's tokens: one chunk from the start of sequences, and as long a one from the end.

    Args:
        batch: A tensor, or several; the same on all ranks.
        sp_group: The ranks that shard sequences; None are all.
        seq_dim: The dimension of tokens.
        is_label: The tensors are labels, (samples, tokens): each token gets the label of the next one, the last one
            -100.

    Returns:
        A tensor; a list of several.

    Raises:
        ShapeError: The tokens do not divide evenly, or labels have another shape.
    """
    superseded("colossal.shardformer.layer.utils.split_batch_zigzag", "colossal.nn.attention.SequenceSharding")
    sharding = SequenceSharding(mesh_of(sp_group or dist.group.WORLD), "tp", is_zigzag=True)
    tensors = [batch] if isinstance(batch, torch.Tensor) else list(batch)
    if sharding.size == 1:  # as documented, one rank shifts no labels: its loss does
        return batch
    if is_label:
        tensors = [_next_labels(each) for each in tensors]
    made = [sharding.split(each, seq_dim) for each in tensors]
    return made[0] if len(made) == 1 else made


def _next_labels(labels: torch.Tensor) -> torch.Tensor:
    if labels.dim() != 2:  # noqa: PLR2004
        raise ShapeError(f"Labels have the shape (samples, tokens). Found {tuple(labels.shape)}. Pass one such tensor.")
    return functional.pad(labels[:, 1:], (0, 1), value=_IGNORED_LABEL)
