# pyright: reportMissingImports=false
"""Sequences that are sharded in zigzag, and causal attention over them, equal one process."""

import pytest
import torch
from torch import distributed as dist
from torch.nn import functional

from colossal.errors import ShapeError, UnsupportedError
from colossal.legacy.cluster import ProcessGroupMesh
from colossal.shardformer.layer import AttnMaskType, RingAttention
from colossal.shardformer.layer.utils import split_batch_zigzag
from colossal.testing import run_processes, run_threads

CAUSAL = AttnMaskType.CAUSAL


def draw(seed: int) -> torch.Tensor:
    return torch.randn(2, 2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attend_on_a_ring(inner: int | None) -> list[torch.Tensor]:
    """The output of this rank, and the gradients of its queries, keys and values."""
    mesh = ProcessGroupMesh(1, 4)
    group = mesh.get_group_along_axis(1)
    own = [split_batch_zigzag(draw(seed), group, seq_dim=2).requires_grad_() for seed in range(3)]
    options = {"softmax_scale": 0.3, "inner_ring_size": inner, "pg_mesh": mesh}
    found = RingAttention.attention(*own, 1, CAUSAL, **options)
    (found**2).sum().backward()
    return [found.detach(), *(each.grad for each in own)]


@pytest.mark.parametrize("inner", [None, 2])
def test_attention_of_a_ring_is_that_of_one_process(inner: int | None) -> None:
    full = [draw(seed).requires_grad_() for seed in range(3)]
    query, key, value = full
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)
    (out**2).sum().backward()
    for rank, found in enumerate(run_processes(attend_on_a_ring, 4, inner)):
        for each, whole in zip(found, [out.detach(), *(each.grad for each in full)], strict=True):
            chunks = whole.chunk(8, 2)
            torch.testing.assert_close(each, torch.cat([chunks[rank], chunks[7 - rank]], 2))


def test_a_batch_is_split_with_labels_of_the_next_tokens() -> None:
    tokens = torch.arange(16).reshape(2, 8)

    def program() -> tuple[list[int], list[int], int]:
        several = split_batch_zigzag([tokens, tokens.float()], None)
        labels = split_batch_zigzag(tokens, dist.group.WORLD, is_label=True)
        with pytest.raises(ShapeError, match="samples, tokens"):
            split_batch_zigzag(tokens[0], None, 0, is_label=True)
        with pytest.raises(ShapeError, match="split into 4 equal chunks"):
            split_batch_zigzag(tokens[:, :6], None)
        return several[0][0].tolist(), labels[0].tolist(), len(several)

    assert run_threads(program, 2) == [([0, 1, 6, 7], [1, 2, 7, -100], 2), ([2, 3, 4, 5], [3, 4, 5, 6], 2)]


def test_what_a_ring_does_not_compute_is_refused() -> None:
    def program() -> None:
        q = draw(0)
        options = [{"dropout_p": 0.1}, {"return_softmax": True}, {"max_seqlen": 4}]
        for each in options:
            with pytest.raises(UnsupportedError, match="causal attention of samples that are not packed"):
                RingAttention.attention(q, q, q, 0, CAUSAL, **each)
        with pytest.raises(UnsupportedError, match="PADDED"):
            RingAttention.attention(q, q, q, 0, AttnMaskType.PADDED_CAUSAL)

    run_threads(program, 1)
