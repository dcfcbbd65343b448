# pyright: reportCallIssue=false, reportReturnType=false
"""Attention over a ring of ranks equals attention in one process: outputs and every gradient."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from colossal._src.nn.attention.partial_attention import PartialAttention, attend, attend_backward
from colossal.cluster import ParallelMesh
from colossal.comm import CommCounter
from colossal.errors import ConfigError, ShapeError
from colossal.nn.attention import SequenceSharding, ring_attention
from colossal.testing import fake_world, run_processes, run_threads

BATCH, HEADS, LENGTH, WINDOW = 2, 4, 16, 5
PADDING = torch.arange(LENGTH) < torch.tensor([LENGTH - 3, LENGTH])[:, None]


def only_known(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return PADDING[:, None, keys[0]][:, None].expand(-1, 1, len(queries), -1)


def near(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return (queries - keys < WINDOW)[None, None]


CASES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "full": {},
    "padded": {"mask": only_known},
    "padded-causal": {"mask": only_known, "is_causal": True},
    "window": {"mask": near, "is_causal": True},
    "scaled": {"is_causal": True, "scale": 0.3},
}
KINDS = {"equal": (4, 8, 8), "groups": (2, 8, 8), "narrow-values": (2, 8, 4), "wide-values": (1, 4, 6)}


def tensors(kind: str, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    key_heads, features, of_values = KINDS[kind]
    draw = torch.Generator().manual_seed(0)
    shapes = (HEADS, features), (key_heads, features), (key_heads, of_values), (HEADS, of_values)
    return [torch.randn(BATCH, heads, LENGTH, last, generator=draw).to(dtype) for heads, last in shapes]


def alone(kind: str, case: str) -> list[torch.Tensor]:
    options: dict[str, Any] = CASES[case]
    query, key, value, grad = tensors(kind)
    inputs = [each.requires_grad_() for each in (query, key, value)]
    positions = torch.arange(LENGTH)
    seen = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    if "mask" in options:
        seen = seen & options["mask"](positions[:, None], positions[None, :])
    if options.get("is_causal"):
        seen = seen & seen.tril().new_ones(LENGTH, LENGTH).tril()
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, enable_gqa=True, scale=options.get("scale")
    )
    out.backward(grad)
    return [out.detach(), *(each.grad for each in inputs)]


def on_ring(is_zigzag: bool, inner: int | None) -> dict[tuple[str, str], list[torch.Tensor]]:
    mesh = ParallelMesh(sp=torch.distributed.get_world_size())
    cut = SequenceSharding(mesh, "sp", is_zigzag)
    found = {}
    for kind in KINDS:
        for case, options in CASES.items():
            *inputs, grad = (cut.split(each, 2) for each in tensors(kind))
            inputs = [each.clone().requires_grad_() for each in inputs]
            out = ring_attention(*inputs, cut, **options, inner_ring_size=inner)
            out.backward(grad)
            whole = [cut.gather(each.detach(), 2) for each in (out, *(each.grad for each in inputs))]
            found[kind, case] = whole
    return found


@pytest.mark.parametrize(("size", "is_zigzag", "inner"), [(2, True, None), (4, True, 2), (4, False, None)])
def test_equals_one_process(size, is_zigzag, inner) -> None:
    for rank in run_processes(on_ring, size, is_zigzag, inner):
        for (kind, case), found in rank.items():
            for name, expected, value in zip(["o", "q", "k", "v"], alone(kind, case), found, strict=True):
                torch.testing.assert_close(value, expected, msg=lambda text, at=(kind, case, name): f"{at}: {text}")


def count(inner: int | None) -> list[int]:
    mesh = ParallelMesh(sp=4)
    cut = SequenceSharding(mesh, "sp", is_zigzag=True)
    query, key, value, grad = (cut.split(each, 2) for each in tensors("equal"))
    with CommCounter() as counter:
        out = ring_attention(query.requires_grad_(), key.requires_grad_(), value, cut, inner_ring_size=inner)
    forward = counter.bytes["send", "sp"]
    out.backward(grad)
    return [forward, counter.bytes["send", "sp"], key.nbytes + value.nbytes]


@pytest.mark.parametrize("inner", [None, 2])
def test_keys_go_round_once_forward_and_with_their_gradients_backward(inner) -> None:
    for forward, total, both in run_processes(count, 4, inner):
        assert forward == 3 * both
        assert total == 3 * both + 3 * both + 4 * both


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_as_torch_is(dtype) -> None:
    with fake_world(1):
        cut = SequenceSharding(ParallelMesh(sp=1))
        query, key, value, _ = tensors("groups", dtype)
        found = ring_attention(query, key, value, cut, is_causal=True)
        exact = functional.scaled_dot_product_attention(
            query.double(), key.double(), value.double(), is_causal=True, enable_gqa=True
        )
        peer = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert found.dtype == dtype
    assert (found.double() - exact).norm() <= 1.5 * (peer.double() - exact).norm() + 1e-6


def test_blocks_with_a_mask_equal_those_without() -> None:
    query, key, value, grad = tensors("equal")
    everything = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    for is_causal in (False, True):
        mask = everything.tril() if is_causal else everything
        out, lse = attend(query, key, value, 0.5, is_causal)
        torch.testing.assert_close((out, lse), attend(query, key, value, 0.5, mask=mask))
        grads = attend_backward(grad, query, key, value, out, lse, 0.5, is_causal)
        torch.testing.assert_close(grads, attend_backward(grad, query, key, value, out, lse, 0.5, mask=mask))


def test_queries_that_see_nothing_get_zero_and_no_gradient() -> None:
    query, key, value, grad = tensors("equal")
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    mask[..., 0, :] = False
    partial = PartialAttention.empty(query)
    for half in (slice(0, 8), slice(8, 16)):
        partial.add(slice(0, LENGTH), *attend(query, key[:, :, half], value[:, :, half], 0.5, mask=mask[..., half]))
    assert not partial.out[:, :, 0].any()
    assert partial.lse[:, :, 0].isneginf().all()
    grads = attend_backward(grad, query, key, value, partial.out, partial.lse, 0.5, mask=mask)
    assert not grads[0][:, :, 0].any()
    assert all(each.isfinite().all() for each in grads)


@pytest.mark.parametrize("is_zigzag", [False, True])
def test_a_cut_sequence_is_put_together_again(is_zigzag) -> None:
    def program() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cut = SequenceSharding(ParallelMesh(sp=2), "sp", is_zigzag)
        x = torch.arange(12.0).reshape(1, 12).requires_grad_()
        own = cut.split(x)
        whole = cut.gather(own)
        (whole * torch.arange(12.0)).sum().backward()
        return own.detach()[0], whole.detach()[0], x.grad[0]

    ranks = run_threads(program, 2)
    assert sorted(torch.cat([own for own, _, _ in ranks]).tolist()) == list(range(12))
    assert all(torch.equal(whole, torch.arange(12.0)) for _, whole, _ in ranks)
    torch.testing.assert_close(ranks[0][2] + ranks[1][2], 2 * torch.arange(12.0))


def test_a_sequence_that_does_not_divide_is_an_error_that_says_how_long_it_may_be() -> None:
    with fake_world(2), pytest.raises(ShapeError, match="multiple of 4, such as 12"):
        SequenceSharding(ParallelMesh(sp=2), "sp", is_zigzag=True).split(torch.zeros(1, 10))


def test_wrong_heads_and_rings_are_errors() -> None:
    x = torch.zeros(1, 4, 4, 8)
    with fake_world(4):
        cut = SequenceSharding(ParallelMesh(sp=4))
        with pytest.raises(ShapeError, match="4 and 3"):
            ring_attention(x, x[:, :3], x[:, :3], cut)
        with pytest.raises(ConfigError, match="inner_ring_size=3 for 4"):
            ring_attention(x, x, x, cut, inner_ring_size=3)
