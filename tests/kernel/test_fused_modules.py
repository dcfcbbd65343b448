"""Norms, rotary embeddings and gates in one pass equal the operations of models one by one, within their roundings."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm, rotate_half
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate

from colossal._src.kernel import FUSED_DTYPES, has_fused_modules, rms_norm, rotate_heads, silu_product

pytestmark = pytest.mark.skipif(not has_fused_modules(), reason="no compiler")

LEVELS, DTYPES = [0, 1, 2], sorted(FUSED_DTYPES, key=str)
UNIT, BFLOAT16 = 2.0**-24, 2.0**-8
"""The largest relative error of rounding to float32, and to bfloat16."""


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 3).to(dtype)


def on_threads(compute: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """What it returns on one thread, and on three."""
    before, found = torch.get_num_threads(), list[torch.Tensor]()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append(compute())
    finally:
        torch.set_num_threads(before)
    return found


# -------------------------------------------------------------------------------------------------------------- norm


def norm_of(width: int, dtype: torch.dtype) -> Any:
    norm = LlamaRMSNorm(width, eps=1e-5).to(dtype).requires_grad_(False)
    norm.weight.copy_(draw(width, dtype=dtype, seed=1))
    return norm


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (16, 1, 256), (2, 3, 37), (5, 100), (3, 1), (0, 64)], ids=str)
def test_norm(shape: tuple[int, ...], dtype: torch.dtype, level: int) -> None:
    norm, x = norm_of(shape[-1], dtype), draw(*shape, dtype=dtype)
    found, own, wide = rms_norm(x, norm.weight, 1e-5, level), norm(x), x.double()
    assert (found.shape, found.dtype, found.is_contiguous()) == (own.shape, dtype, True)
    exact = norm.weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    # a sum of positive squares is off by at most a unit for each term, its root by half of that; then five operations
    units = (shape[-1] / 2 + 6) * UNIT + (2 * BFLOAT16 if dtype == torch.bfloat16 else 0)
    assert ((found.double() - exact).abs() <= 1.01 * units * exact.abs()).all()
    if dtype == torch.bfloat16:  # what is rounded, and where, is the same
        assert ((found != own).double().mean() <= 0.01) if found.numel() else True


def test_norm_of_rows_that_are_not_contiguous() -> None:
    norm, wide = norm_of(32, torch.float32), draw(6, 5, 64, dtype=torch.float32)
    for x in (wide[..., ::2], wide[..., 16:48], wide.transpose(0, 1)[..., :32], wide[::2, 1:3, :32]):
        assert torch.equal(rms_norm(x, norm.weight, 1e-5), rms_norm(x.clone(), norm.weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_row_is_its_own(dtype: torch.dtype) -> None:
    x, weight = draw(331, 1024, dtype=dtype), draw(1024, dtype=dtype, seed=1)
    one, three = on_threads(lambda: rms_norm(x, weight, 1e-5))
    assert torch.equal(one, three)
    assert torch.equal(rms_norm(x[7], weight, 1e-5), one[7])
    x[3, 5], x[4, 0] = float("inf"), float("nan")
    others = [row for row in range(331) if row not in {3, 4}]
    spoiled = rms_norm(x, weight, 1e-5)
    assert torch.equal(spoiled[others], one[others])
    assert spoiled[3, 5].isnan()
    assert spoiled[4].isnan().all()


# ------------------------------------------------------------------------------------------------------------ rotary


def heads_of(dtype: torch.dtype, width: int, length: int, rows: int = 3) -> list[torch.Tensor]:
    """Queries, keys, cosines and sines, as an attention layer has them."""
    query, key = (draw(rows, length, heads, width, dtype=dtype, seed=heads).transpose(1, 2) for heads in (4, 2))
    return [query, key, *(draw(rows, length, width, dtype=dtype, seed=each) / 3 for each in (5, 6))]


def check_rotated(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, level: int = 2) -> None:
    found, own = (function(query, key, cos, sin) for function in (partial(rotate_heads, level=level), rotate))
    for rotated, by_model, x in zip(found, own, (query, key), strict=True):
        assert (rotated.shape, rotated.dtype) == (by_model.shape, by_model.dtype)
        if x.dtype == torch.bfloat16:  # what is rounded, and where, is the same
            assert torch.equal(rotated, by_model)
            continue
        wide, cosines, sines = x.double(), cos.double()[:, None], sin.double()[:, None]
        sizes = (wide * cosines).abs() + (rotate_half(wide) * sines).abs()
        exact = wide * cosines + rotate_half(wide) * sines
        # each product and their sum are rounded
        assert ((rotated.double() - exact).abs() <= 2.01 * UNIT * sizes).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(64, 1), (128, 3), (80, 2), (6, 5), (2, 1), (64, 0)], ids=str)
def test_rotary(sizes: tuple[int, int], dtype: torch.dtype, level: int) -> None:
    check_rotated(*heads_of(dtype, *sizes), level=level)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_of_parts_of_heads_and_of_positions_that_rows_share(dtype: torch.dtype) -> None:
    query, key, cos, sin = heads_of(dtype, 32, 5)
    check_rotated(query, key, cos[:1], sin[:1])
    check_rotated(query[..., :8], key[..., :8], cos[..., :8], sin[..., :8])
    check_rotated(query.contiguous(), key[:, :1], cos[:, :], sin[:, :])
    check_rotated(query[:, :, 1:4], key[:, :, 1:4], cos[:, 1:4], sin[:, 1:4])


def test_rotary_on_threads() -> None:
    query, key, cos, sin = heads_of(torch.float32, 128, 40, rows=16)
    one, three = on_threads(lambda: torch.cat(rotate_heads(query, key, cos, sin), 1))
    assert torch.equal(one, three)
    assert torch.equal(rotate_heads(query[3:4], key[3:4], cos[3:4], sin[3:4])[1], one[3:4, 4:])


# -------------------------------------------------------------------------------------------------------------- gate


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("shape", [(16, 1, 64), (3, 37), (2, 2, 5), (0, 8)], ids=str)
def test_gate(shape: tuple[int, ...], dtype: torch.dtype, level: int) -> None:
    gate, up = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    found, exact = silu_product(gate, up, level), functional.silu(gate.double()) * up.double()
    assert (found.shape, found.dtype) == (exact.shape, dtype)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float64: 4e-15}[dtype]  # those of `gated_silu`
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
    wide = torch.stack([gate, up], -1)
    assert torch.equal(silu_product(*wide.unbind(-1), level=level), found)
