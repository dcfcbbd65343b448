# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
"""Attention in the mode ``sequence`` equals one process: outputs, and the gradients of inputs and parameters."""

import pytest
import torch
from parallel_layers import draw
from torch import distributed as dist
from torch.nn import functional

import colossal
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError, ShapeError
from colossal.legacy.nn import AttnMaskType, RingAV, RingQK, TransformerSelfAttentionRing
from colossal.testing import assert_close, run_threads

BATCH, HEADS, SIZE, TOKENS = 2, 3, 4, 8
HIDDEN = HEADS * SIZE


def own_tokens(full: torch.Tensor, dim: int, mesh: ParallelMesh) -> torch.Tensor:
    return full.chunk(mesh.size("sp"), dim)[mesh.rank("sp")].detach().clone().requires_grad_()


def check_products(size: int) -> None:
    query, key, value = (draw(BATCH * HEADS, TOKENS, SIZE, seed=seed).requires_grad_() for seed in range(3))
    weight = draw(BATCH * HEADS, TOKENS, SIZE, seed=3)
    scores = query @ key.transpose(1, 2)
    output = scores.softmax(-1) @ value
    (output * weight).sum().backward()
    with ParallelMesh(sp=size) as mesh:
        own = [own_tokens(full, 1, mesh) for full in (query, key, value)]
        length = TOKENS // size
        found = RingQK.apply(own[0], own[1], BATCH, HEADS, length)
        assert_close(found, scores.detach().chunk(size, 1)[mesh.rank("sp")], "scores")
        result = RingAV.apply(found.softmax(-1), own[2], BATCH, HEADS, SIZE, length)
        assert_close(result, output.detach().chunk(size, 1)[mesh.rank("sp")], "output")
        (result * weight.chunk(size, 1)[mesh.rank("sp")]).sum().backward()
        for local, full in zip(own, (query, key, value), strict=True):
            assert_close(local.grad, full.grad.chunk(size, 1)[mesh.rank("sp")], "gradient")
        with pytest.raises(ShapeError, match="A rank has tensors of the shape"):
            RingQK.apply(own[0], own[1], BATCH, HEADS, length + 1)
        with pytest.raises(ShapeError, match="A rank has tensors of the shape"):
            RingAV.apply(found[..., :1], own[2], BATCH, HEADS, SIZE, length)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_products_over_a_ring(size) -> None:
    run_threads(check_products, size, size)


def mask_scores(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(mask, -10000.0)


def attend_alone(
    layer: TransformerSelfAttentionRing, x: torch.Tensor, mask: torch.Tensor, causal: bool
) -> torch.Tensor:
    """The same attention by torch's own function."""
    mixed = layer.query_key_value(x).view(TOKENS, BATCH, HEADS, 3, SIZE).permute(3, 1, 2, 0, 4)
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1) | mask if causal else mask
    out = functional.scaled_dot_product_attention(*mixed, attn_mask=~hidden)
    return layer.dense(out.permute(2, 0, 1, 3).reshape(TOKENS, BATCH, HIDDEN))


def check_attention(size: int, causal: bool, layer_number: int) -> None:
    kind = AttnMaskType.causal if causal else "padding"
    scaled = {"apply_query_key_layer_scaling": layer_number > 1}
    layers = [
        TransformerSelfAttentionRing(HIDDEN, HEADS, 0.0, mask_scores, layer_number, attn_mask_type=kind, **scaled)
        for _ in range(2)
    ]
    for layer in layers:
        for seed, parameter in enumerate(layer.double().parameters()):
            parameter.data = draw(*parameter.shape, seed=seed)
    x, weight = draw(TOKENS, BATCH, HIDDEN, seed=9).requires_grad_(), draw(TOKENS, BATCH, HIDDEN, seed=10)
    mask = torch.zeros(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool)
    mask[1, :, :, -3:] = True
    expected = attend_alone(layers[0], x, mask, causal)
    (expected * weight).sum().backward()
    with ParallelMesh(sp=size) as mesh:
        rank = mesh.rank("sp")
        own = own_tokens(x, 0, mesh)
        output, bias = layers[1](own, mask.chunk(size, 2)[rank])
        assert_close(output + bias, expected.detach().chunk(size)[rank], "output")
        ((output + bias) * weight.chunk(size)[rank]).sum().backward()
        assert_close(own.grad, x.grad.chunk(size)[rank], "gradient of the tokens")
        for (name, parameter), other in zip(layers[1].named_parameters(), layers[0].parameters(), strict=True):
            dist.all_reduce(parameter.grad, group=mesh.group("sp"))
            assert_close(parameter.grad, other.grad, f"gradient of {name}", rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("size", "causal", "layer_number"), [(1, True, 1), (2, False, 1), (2, True, 3), (4, True, 1)])
def test_attention_equals_one_process(size, causal, layer_number) -> None:
    run_threads(check_attention, size, size, causal, layer_number)


def check_half() -> None:
    layer = TransformerSelfAttentionRing(HIDDEN, HEADS, 0.0, mask_scores, 1, convert_fp16_to_fp32_in_softmax=True)
    output, _ = layer.bfloat16()(torch.ones(TOKENS, BATCH, HIDDEN, dtype=torch.bfloat16))
    assert output.dtype == torch.bfloat16
    assert output.isfinite().all()


def test_half_precision_and_options() -> None:
    run_threads(check_half, 1)
    with pytest.raises(ConfigError, match="Heads divide the features"):
        TransformerSelfAttentionRing(10, 3, 0.0, mask_scores, 1)
    with pytest.raises(ConfigError, match="Heads divide the features, and inputs have one dtype"):
        TransformerSelfAttentionRing(12, 3, 0.0, mask_scores, 1, fp16=True, bf16=True)
    with pytest.raises(ConfigError, match="A mask type is one of padding, causal"):
        TransformerSelfAttentionRing(12, 3, 0.0, mask_scores, 1, attn_mask_type="nothing")


def test_the_mode_of_a_config_is_the_axis_of_sequences() -> None:
    def program() -> int:
        from colossal._src.cluster import Config, mesh_options

        options = mesh_options(Config(parallel={"tensor": {"size": 4, "mode": "sequence"}}), 4)
        with ParallelMesh(**options) as mesh:
            return mesh.size("sp")

    assert run_threads(program, 4) == [4] * 4
    assert colossal.nn.layer.RingQK is RingQK
