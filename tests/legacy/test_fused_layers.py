# pyright: reportMissingImports=false
"""Normalization, the softmax of scores and attention by the names of older kernels compute what torch computes."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from colossal.errors import ConfigError, ShapeError, UnsupportedError
from colossal.kernel.kernel_loader import FlashAttentionLoader, LayerNormLoader
from colossal.nn.layer import MixedFusedLayerNorm
from colossal.nn.layer.scaled_softmax import AttnMaskType, FusedScaleMaskSoftmax

HALVES = (torch.float16, torch.bfloat16)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_a_norm_takes_an_input_of_another_dtype(dtype: torch.dtype) -> None:
    norm, peer = MixedFusedLayerNorm(6, eps=1e-3), nn.LayerNorm(6, eps=1e-3)
    for each in (norm, peer):
        with torch.no_grad():
            each.weight.copy_(draw(6, seed=1))
            each.bias.copy_(draw(6, seed=2))
    x = draw(4, 6).to(dtype)
    found, expected = norm(x), peer(x.float())
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    found.sum().backward()
    expected.sum().backward()
    assert norm.weight.grad is not None
    assert peer.weight.grad is not None
    assert torch.equal(norm.weight.grad, peer.weight.grad)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("kind", AttnMaskType)
@pytest.mark.parametrize("dtype", HALVES)
def test_scores_are_scaled_masked_and_normalized(dtype: torch.dtype, kind: AttnMaskType, is_fused: bool) -> None:
    masked: list[torch.Tensor] = []

    def mask_func(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        masked.append(mask)
        return scores.masked_fill(mask, -10000.0)

    flags = dtype == torch.float16, dtype == torch.bfloat16
    softmax = FusedScaleMaskSoftmax(*flags, kind, is_fused, mask_func, True, 0.5)
    scores, padding = draw(2, 3, 4, 4).to(dtype), torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]).bool()[:, None, None]
    hidden = padding.expand(2, 1, 4, 4)
    if kind is AttnMaskType.causal:
        hidden = hidden | torch.ones(4, 4).bool().triu(1)
    expected = (scores.double() * 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    found = softmax(scores, padding)
    assert found.dtype == dtype
    assert not found[hidden.expand_as(found)].any()
    torch.testing.assert_close(found, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=0.0)
    assert len(masked) == 1


def test_a_softmax_in_its_own_dtype_without_a_mask() -> None:
    softmax = FusedScaleMaskSoftmax(False, False, AttnMaskType.padding, True, None, False, None)
    scores = draw(1, 1, 2, 3)
    assert torch.equal(softmax(scores, None), scores.softmax(-1))


def test_what_a_softmax_of_scores_refuses() -> None:
    with pytest.raises(ConfigError, match="one dtype"):
        FusedScaleMaskSoftmax(True, True, AttnMaskType.padding, True, None, True, None)
    with pytest.raises(ConfigError, match="softmax_in_fp32=True"):
        FusedScaleMaskSoftmax(False, False, AttnMaskType.padding, True, None, False, 2.0)
    softmax = FusedScaleMaskSoftmax(False, False, AttnMaskType.causal, True, None, False, None)
    with pytest.raises(ShapeError, match="Found 2 and 3"):
        softmax(draw(1, 1, 2, 3), None)


def test_the_kernel_of_a_norm_has_its_gradients() -> None:
    kernel = LayerNormLoader().load()
    x, weight, bias = (each.requires_grad_() for each in (draw(4, 6), draw(6, seed=1), draw(6, seed=2)))
    expected = functional.layer_norm(x, (6,), weight, bias, 1e-3)
    grad = draw(4, 6, seed=3)
    grads = torch.autograd.grad(expected, [x, weight, bias], grad)
    with torch.no_grad():
        found, mean, invvar = kernel.forward_affine(x, (6,), weight, bias, 1e-3)
        made = kernel.backward_affine(grad, mean, invvar, x, (6,), weight, bias, 1e-3)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(made, grads)


def test_the_kernel_of_attention() -> None:
    attention: Any = FlashAttentionLoader().load()
    q, k, v = (draw(2, 3, 4, 5, seed=seed) for seed in range(3))
    causal = torch.zeros(4, 4, dtype=torch.float64).masked_fill(torch.ones(4, 4).bool().triu(1), -torch.inf)
    expected = ((q @ k.mT) * 0.25 + causal).softmax(-1) @ v
    torch.testing.assert_close(attention(q, k, v, scale=0.25, is_causal=True), expected)
    torch.testing.assert_close(attention(q, k, v, scale=0.25, attention_mask=causal), expected)
    with pytest.raises(UnsupportedError, match="padded samples"):
        attention(q, k, v, max_seqlen_q=4)
