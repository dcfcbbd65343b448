"""GPT and vision transformers of the older documentation equal one process, in every mode of tensor parallelism."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallel_layers import GRIDS, draw, on_grid
from torch.nn import functional

from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError
from colossal.legacy.model_zoo import gpt, vit
from colossal.nn import CrossEntropyLoss, ParallelLayer
from colossal.tensor import shard
from colossal.testing import assert_close, fake_world, run_threads

NAME_OF = {"1d": "1d-2", "2d": "2d", "2.5d": "2.5d", "3d": "3d"}
EXACT = torch.float64


def small_gpt(**options: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 22,
        "max_position_embeddings": 8,
        "dim": 16,
        "num_heads": 4,
        "depth": 2,
        "dtype": EXACT,
    }
    rates: dict[str, Any] = {"dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0}
    return gpt.GPT(**sizes | rates | options)


def small_vit(**options: Any) -> Any:
    sizes: dict[str, Any] = {
        "img_size": 8,
        "patch_size": 4,
        "num_classes": 5,
        "dim": 16,
        "num_heads": 4,
        "depth": 2,
        "dtype": EXACT,
    }
    sizes["dropout"] = 0.0
    return vit.VisionTransformer(**sizes | options)


TOKENS = torch.randint(22, (8, 6), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones(8, 6).tril(2).flip(0)
IMAGES, CLASSES = draw(8, 3, 8, 8), torch.arange(8) % 5


def gpt_loss(model: torch.nn.Module) -> torch.Tensor:
    return gpt.GPTLMLoss()(model(TOKENS, PADDED), TOKENS)


def vit_loss(model: torch.nn.Module) -> torch.Tensor:
    return CrossEntropyLoss()(model(IMAGES), CLASSES)


def redraw(model: Any) -> Any:
    """Give all parameters values that follow from their order, none of them zero or one."""
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=seed) * 0.2)
    return model


Parameters = dict[str, torch.Tensor]


def train(model: torch.nn.Module, loss_of: Callable[..., torch.Tensor]) -> tuple[list[torch.Tensor], Parameters]:
    """The losses of three steps, and the gradients of the first."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, gradients = [], {}
    for _ in range(3):
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.detach())
        gradients = gradients or {name: each.grad.clone() for name, each in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def local_shards(model: torch.nn.Module, full: Parameters) -> Parameters:
    """This rank's shards of full tensors, by the names of parameters."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, ParallelLayer):
            for key, layout in layer.layouts.items():
                if f"{name}.{key}" in full:
                    found[f"{name}.{key}"] = shard(full[f"{name}.{key}"], layout, layer.mesh.global_rank)
    return found


def check_model(mode: str, build: Callable[..., torch.nn.Module], loss_of: Any, serial: Any) -> None:
    first, losses, gradients, last = serial
    with on_grid(NAME_OF[mode]):
        model = build(checkpoint=mode == "2d")
        own = dict(model.named_parameters())
        for name, values in local_shards(model, first).items():
            own[name].data = values.clone()
        found, grads = train(model, loss_of)
        for loss, expected in zip(found, losses, strict=True):
            assert_close(loss, expected, "loss", rtol=1e-6)
        for name, expected in local_shards(model, gradients).items():
            assert_close(grads[name], expected, f"gradient of {name}", rtol=1e-5, atol=1e-8)
        for name, expected in local_shards(model, last).items():
            assert_close(own[name].detach(), expected, f"{name} after three steps", rtol=1e-5, atol=1e-6)


def parameters_of(model: torch.nn.Module) -> Parameters:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


CASES = {
    "gpt": (small_gpt, gpt_loss),
    "gpt after norms": (lambda **options: small_gpt(apply_post_layernorm=True, **options), gpt_loss),
    "vit": (small_vit, vit_loss),
    "vit with a representation": (lambda **options: small_vit(representation_size=24, **options), vit_loss),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", ["1d", "2d", *(pytest.param(each, marks=pytest.mark.slow) for each in ("2.5d", "3d"))])
def test_models_equal_one_process(mode, case) -> None:
    build, loss_of = CASES[case]
    serial = redraw(build())
    first = parameters_of(serial)
    losses, gradients = train(serial, loss_of)
    run_threads(
        check_model, GRIDS[NAME_OF[mode]]["tp"], mode, build, loss_of, (first, losses, gradients, parameters_of(serial))
    )


def test_a_stage_of_parts_computes_what_the_model_does() -> None:
    model = redraw(small_gpt())
    embedding = gpt.GPTEmbedding(16, 22, 8, dtype=EXACT)
    blocks = [gpt.GPTBlock(16, 4, 4.0, functional.gelu, dtype=EXACT) for _ in range(2)]
    head = gpt.GPTLMHead(vocab_size=22, dim=16, dtype=EXACT, bias=False)
    embedding.load_state_dict(model.embed.state_dict())
    head.load_state_dict(model.head.state_dict())
    assert [name for name, _ in head.named_parameters()] == ["dense.weight"]
    assert head.weight.shape == embedding.word_embedding_weight.shape
    hidden = embedding(input_ids=TOKENS)
    mask = (1.0 - PADDED.view(8, -1)[:, None, None, :].to(hidden.dtype)) * -10000.0
    for block, other in zip(blocks, model.blocks, strict=True):
        block.load_state_dict(other.state_dict())
        hidden, mask = block(hidden, mask)
    assert_close(head(model.norm(hidden)).detach(), model(TOKENS, PADDED).detach(), "logits")


def test_attention_is_causal_and_ignores_padding() -> None:
    model = redraw(small_gpt())
    changed = TOKENS.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 22
    before, after = model(TOKENS).detach(), model(changed).detach()
    assert_close(after[:, :-1], before[:, :-1], "logits of earlier tokens")
    assert not torch.equal(after[:, -1], before[:, -1])
    hidden = torch.ones(8, 6)
    hidden[:, 0] = 0
    changed = TOKENS.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 22
    assert_close(model(TOKENS, hidden).detach()[:, 1:], model(changed, hidden).detach()[:, 1:], "logits after padding")


def test_dropout_and_recomputation_draw_the_same() -> None:
    grads = []
    for recompute in (False, True):
        rates = {"dropout": 0.3, "attention_dropout": 0.3, "embedding_dropout": 0.3}
        model = redraw(small_gpt(**rates, checkpoint=recompute, activation_offload=recompute))
        torch.manual_seed(5)
        gpt_loss(model).backward()
        grads.append(torch.cat([each.grad.flatten() for each in model.parameters()]))
        assert not torch.equal(model(TOKENS), model(TOKENS))
    assert_close(grads[1], grads[0], "gradients")
    model = redraw(small_vit(dropout=0.3, attention_dropout=0.3, drop_path=0.5, checkpoint=True))
    assert not torch.equal(model(IMAGES), model(IMAGES))
    assert [block.drop_path.drop_prob for block in model.blocks] == [0.0, 0.5]
    assert torch.equal(model.eval()(IMAGES), model(IMAGES))


def test_initial_values_follow_the_method() -> None:
    model = small_vit(init_method="jax")
    assert model.head.dense.weight.abs().max() == 0
    assert 0 < model.blocks[0].attn.dense.bias.abs().max() < 1e-5
    with pytest.raises(ConfigError, match="Parameters are initialized as by one of torch, jax"):
        small_vit(init_method="tensorflow")
    with pytest.raises(ConfigError, match="divide the heads"), fake_world(8), ParallelMesh(tp=8):
        small_gpt()
    with pytest.raises(ConfigError, match="Heads divide the features"):
        small_gpt(num_heads=3)


SIZES = {
    "gpt2_small": (768, 12, 12),
    "gpt2_medium": (1024, 24, 16),
    "gpt2_xl": (1600, 48, 32),
    "gpt3": (12288, 96, 96),
    "vit_tiny_patch4_32": (192, 12, 3),
    "vit_base_patch16_224": (768, 12, 12),
    "vit_large_patch32_384": (1024, 24, 16),
    "vit_giant_patch14_224": (1408, 40, 16),
}


@pytest.mark.parametrize("name", SIZES)
def test_models_of_named_sizes(name, monkeypatch) -> None:
    module = gpt if name.startswith("gpt") else vit
    made = {}
    build = getattr(module, name)
    model = "GPT" if module is gpt else "VisionTransformer"
    monkeypatch.setitem(build.__globals__, model, lambda **sizes: made.update(sizes))
    build(dropout=0.2)
    assert (made["dim"], made["depth"], made["num_heads"], made["dropout"]) == (*SIZES[name], 0.2)


def test_the_older_modules_have_the_names() -> None:
    block = importlib.import_module("colossal.legacy.model_zoo.gpt.gpt").GPTBlock
    assert block is gpt.GPTBlock
    create = importlib.import_module("colossal.legacy.model_zoo.vit.vit")._create_vit_model
    model = create(img_size=8, patch_size=4, num_classes=3, depth=1, num_heads=2, dim=8, checkpoint=True)
    assert model(torch.ones(2, 3, 8, 8)).shape == (2, 3)
    older: Any = vit
    assert older._create_vit_model is create
    older = gpt
    assert older.gpt2_8B is gpt.gpt2_8b
