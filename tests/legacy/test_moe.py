# pyright: reportUnknownMemberType=false
"""Mixtures of experts by their older names train as one process does, from a config and an engine."""

import importlib
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from equality import assert_equal
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from colossal._src.cluster import set_current_config
from colossal.errors import ConfigError, MeshError, UnsupportedError
from colossal.legacy import initialize
from colossal.legacy.context import ParallelMode, global_context
from colossal.legacy.context.random import moe_set_seed
from colossal.legacy.model_zoo.moe import VanillaFFN, ViTMoE, Widenet
from colossal.legacy.moe import (
    MOE_CONTEXT,
    Experts,
    FFNExperts,
    MLPExperts,
    MoeCrossEntropyLoss,
    MoeLayer,
    MoeLoss,
    MoeModule,
    NormalNoiseGenerator,
    SparseMLP,
    Top1Router,
    Top2Router,
    UniformNoiseGenerator,
)
from colossal.legacy.utils import checkpoint
from colossal.nn.moe import GaussianNoise, MixtureOfExperts, Router, UniformNoise
from colossal.testing import assert_equal_to_one_process, fake_world, run_processes

STEPS, BATCH, NUM_EXPERTS = 3, 4, 4
SIZES: dict[str, Any] = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 10, "d_model": 8, "depth": 2}
MODELS = {"Widenet": Widenet, "ViTMoE": ViTMoE}


def build(name: str) -> nn.Module:
    """A model without noise and dropout, in float64."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        moe_set_seed(42)
        model = MODELS[name](NUM_EXPERTS, 0.75, num_heads=2, d_ff=12, drop_rate=0.0, **SIZES)
    finally:
        torch.set_default_dtype(default)
    for module in model.modules():
        if isinstance(module, Router):
            assert module.noise == GaussianNoise(0.25)
            module.noise = None
    return model


def batch_of(step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(10 * step + part)
    images = torch.randn(BATCH, 1, 8, 8, generator=draw, dtype=torch.float64)
    return images, torch.randint(10, (BATCH,), generator=draw)


def criterion() -> MoeLoss:
    return MoeLoss(aux_weight=0.1, loss_fn=nn.CrossEntropyLoss, label_smoothing=0.1)


def train_one(name: str, parts: int, clip: float) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model, loss_of = build(name), criterion()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[torch.Tensor] = []
    for step in range(STEPS):
        of_parts: list[torch.Tensor] = []
        for part in range(parts):
            images, labels = batch_of(step, part)
            of_parts.append(loss_of(model(images), labels))
        torch.stack(of_parts).mean().backward()
        if clip:
            assert nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(of_parts).detach())
    return losses, {key: each.detach() for key, each in model.named_parameters()}


def train(name: str, config: dict[str, Any], losses: list[torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    try:
        global_context.load_config(config)
        global_context.init_parallel_groups()
        model: Any = build(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = initialize(model, optimizer, criterion(), verbose=False)
        part = global_context.get_local_rank(ParallelMode.DATA)
        assert MOE_CONTEXT.model_parallel_size == 2
        for step in range(STEPS):
            images, labels = batch_of(step, part)
            engine.zero_grad()
            loss = engine.criterion(engine(images), labels)
            assert_equal(loss.detach(), losses[step][part], f"loss of step {step}")
            engine.backward(loss)
            engine.step()
        assert_equal_to_one_process(engine.model, expected, rtol=1e-8, atol=1e-10)
    finally:
        set_current_config(None)


HANDLER = {"gradient_handler": [{"type": "MoeGradientHandler"}]}
SETTINGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Widenet": ("Widenet", 2, {}),
    "ViTMoE, clipping": ("ViTMoE", 2, {"clip_grad_norm": 0.1}),
    "Widenet, handler, copies of experts": ("Widenet", 4, {**HANDLER, "clip_grad_norm": 0.1}),
    "ViTMoE, copies of experts": ("ViTMoE", 4, {}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_engine_equals_one_process(setting: str) -> None:
    name, size, config = SETTINGS[setting]
    expected = train_one(name, size, config.get("clip_grad_norm", 0.0))
    run_processes(train, size, name, {"parallel": {"moe": {"size": 2}}, **config}, *expected)


# ------------------------------------------------------------------------------------------ layers and losses


@pytest.fixture(autouse=True)
def _no_losses() -> None:
    MOE_CONTEXT.reset_loss()


def current_loss() -> float:
    return float(torch.as_tensor(MOE_CONTEXT.get_loss()).detach())


TOKENS = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_layers_may_share_experts() -> None:
    experts = Experts(VanillaFFN, NUM_EXPERTS, d_model=8, d_ff=16)
    router = Top2Router(1.2, noisy_func=NormalNoiseGenerator(NUM_EXPERTS))
    layers = [MoeLayer(dim_model=8, num_experts=NUM_EXPERTS, router=router, experts=experts) for _ in range(2)]
    gates = [layer.moe.router.weight for layer in layers]
    assert gates[0] is not gates[1]
    assert layers[0].moe.experts is layers[1].moe.experts
    first = layers[1](layers[0](TOKENS))
    assert first.shape == TOKENS.shape
    assert 1.5 < MOE_CONTEXT.get_loss() < 4
    with pytest.raises(ConfigError, match="one class"):
        Experts(VanillaFFN, NUM_EXPERTS, expert_cls=VanillaFFN)


def test_losses_are_taken_once_and_in_training_only() -> None:
    layer = MoeLayer(8, NUM_EXPERTS, Top1Router(), FFNExperts(NUM_EXPERTS, 8, 16))
    loss_of, targets = MoeCrossEntropyLoss(aux_weight=2.0), torch.zeros(3, 8, dtype=torch.int64)
    output = layer(TOKENS)
    aux_loss = current_loss()
    plain = nn.functional.cross_entropy(output, targets)
    torch.testing.assert_close(loss_of(output, targets), plain + 2 * aux_loss)
    torch.testing.assert_close(loss_of(output, targets), plain)
    layer.eval()(TOKENS)
    assert MOE_CONTEXT.get_loss() == 0.0


def test_recomputation_adds_no_loss() -> None:
    layer = MoeLayer(8, NUM_EXPERTS, Top1Router(), FFNExperts(NUM_EXPERTS, 8, 16))
    tokens = TOKENS.clone().requires_grad_()
    output = checkpoint(layer, False, tokens, use_reentrant=False)
    before = current_loss()
    output.sum().backward()
    assert current_loss() == before > 0


def test_a_loss_that_recomputation_would_leave_without_gradient_is_refused() -> None:
    layer = MoeLayer(8, NUM_EXPERTS, Top1Router(), FFNExperts(NUM_EXPERTS, 8, 16))
    tokens = TOKENS.clone().requires_grad_()
    output = checkpoint(layer, False, tokens, use_reentrant=True)
    with pytest.raises(UnsupportedError, match=r"auxiliary loss.*use_reentrant=False.*or returns_loss=True"):
        output.sum().backward()


def test_passes_without_a_graph_may_run_before_the_backward_pass() -> None:
    layer = MoeLayer(8, NUM_EXPERTS, Top1Router(), FFNExperts(NUM_EXPERTS, 8, 16))
    inputs = TOKENS.clone().requires_grad_()
    for use_reentrant, passes_after in ((False, False), (True, True)):  # the last pass is of the other kind
        MOE_CONTEXT.reset_loss()
        output = checkpoint(layer, False, inputs, use_reentrant=use_reentrant)
        loss = torch.as_tensor(MOE_CONTEXT.get_loss())
        with torch.set_grad_enabled(passes_after):
            layer(TOKENS)
        if use_reentrant:
            with pytest.raises(UnsupportedError, match="auxiliary loss"):
                output.sum().backward()
        else:
            (output.sum() + loss).backward()
    expected, layer.moe.router.weight.grad = layer.moe.router.weight.grad, None
    MOE_CONTEXT.reset_loss()
    (layer(TOKENS).sum() + MOE_CONTEXT.get_loss()).backward()
    assert expected is not None
    torch.testing.assert_close(layer.moe.router.weight.grad, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_tensors_that_the_program_packs_do_not_hide_recomputation(use_reentrant: bool) -> None:
    layer = MoeLayer(8, NUM_EXPERTS, Top1Router(), FFNExperts(NUM_EXPERTS, 8, 16))

    def run(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            return layer(tokens)

    output = torch_checkpoint(run, TOKENS.clone().requires_grad_(), use_reentrant=use_reentrant)
    with pytest.raises(UnsupportedError) if use_reentrant else nullcontext():
        output.sum().backward()


def test_a_returned_loss_has_its_gradient_with_recomputation() -> None:
    layer = MoeLayer(8, NUM_EXPERTS, Top1Router(), FFNExperts(NUM_EXPERTS, 8, 16), returns_loss=True)
    weight = layer.moe.router.weight
    layer(TOKENS)[1].backward()
    assert weight.grad is not None
    expected, weight.grad = weight.grad, None
    checkpoint(layer, False, TOKENS.clone().requires_grad_(), use_reentrant=True)[1].backward()
    torch.testing.assert_close(weight.grad, expected)
    assert bool(expected.any())


def test_a_layer_can_return_its_loss() -> None:
    layer = MoeLayer(8, NUM_EXPERTS, Top1Router(), FFNExperts(NUM_EXPERTS, 8, 16), returns_loss=True)
    output, loss = layer(TOKENS)
    assert output.shape == TOKENS.shape
    assert loss > 0
    assert MOE_CONTEXT.get_loss() == 0.0


def test_the_routers_take_their_arguments_in_the_documented_order() -> None:
    noise = NormalNoiseGenerator(NUM_EXPERTS)
    assert Top1Router(1.5, 3.0, 2, "random", noise, False) == Top1Router(
        capacity_factor_train=1.5,
        capacity_factor_eval=3.0,
        min_capacity=2,
        select_policy="random",
        noisy_func=noise,
        drop_tks=False,
    )
    router = Top2Router(1.5, 3.0, 2, noise, False)
    assert (router.noisy_func, router.drop_tks, router.select_policy, router.top_k) == (noise, False, "first", 2)


@pytest.mark.parametrize("kind", [Top1Router, Top2Router])
def test_settings_of_routers(kind: Any) -> None:
    noise = UniformNoiseGenerator(0.1)
    router = kind(1.0, 3.0, 2, select_policy="random", noisy_func=noise, drop_tks=False).build(8, NUM_EXPERTS)
    assert router.top_k == (1 if kind is Top1Router else 2)
    assert router.noise == UniformNoise(0.1)
    capacity = router.capacity
    assert (capacity.train, capacity.eval, capacity.minimum, capacity.keep) == (1.0, None, 2, "random")
    assert kind().build(8, NUM_EXPERTS).capacity.eval == 2.0


@pytest.mark.parametrize("policy", [None, "Jitter", "Gaussian"])
def test_a_module_with_a_dense_one(policy: Any) -> None:
    linear = {"in_features": 8, "out_features": 8}
    options: dict[str, Any] = {"use_residual": True, "noisy_policy": policy, "expert_cls": nn.Linear, **linear}
    module: Any = MoeModule(8, NUM_EXPERTS, 2, 100.0, **options).eval()
    mixed = module.residual_mix(TOKENS).softmax(-1)
    expected = module.moe_layer(TOKENS) * mixed[..., :1] + module.residual(TOKENS) * mixed[..., 1:]
    torch.testing.assert_close(module(TOKENS), expected)
    assert (module.moe_layer.moe.router.noise is None) == (policy is None)
    with pytest.raises(ConfigError, match="Found 'Laplace'"):
        MoeModule(8, NUM_EXPERTS, expert_cls=nn.Linear, noisy_policy="Laplace", **linear)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="Found neither"):
        MoeModule(8, NUM_EXPERTS)


def test_sparse_mlp() -> None:
    layer = SparseMLP(NUM_EXPERTS, 8, 16, router_top_k=2, router_norm=True, mlp_activation="swiglu")
    moe: Any = layer.moe
    assert isinstance(moe, MixtureOfExperts)
    output, routing = moe(TOKENS)
    torch.testing.assert_close(layer(TOKENS), output)
    assert current_loss() == pytest.approx(float(routing.aux_loss.detach()))
    assert moe.experts.gate_up_proj.shape == (NUM_EXPERTS, 32, 8)
    with pytest.raises(ConfigError, match="Found 'tanh'"):
        MLPExperts(NUM_EXPERTS, 8, 16, activation="tanh")


# ------------------------------------------------------------------------------------------ the context


def test_the_context() -> None:
    moe_env: Any = importlib.import_module("colossal.global_variables").moe_env
    assert moe_env is MOE_CONTEXT
    assert (moe_env.model_parallel_size, moe_env.data_parallel_size, moe_env.get_info(8)) == (1, 1, (8, 1))
    with fake_world(4, rank=3):
        try:
            global_context.load_config({"parallel": {"moe": {"size": 2}}})
            global_context.init_parallel_groups()
            assert (moe_env.model_parallel_size, moe_env.model_parallel_rank) == (2, 1)
            assert (moe_env.data_parallel_size, moe_env.data_parallel_rank) == (2, 1)
            assert moe_env.get_info(8) == (4, 2)
            moe_env.setup(seed=3)
            drawn = torch.rand(3)
            moe_set_seed(3)
            assert torch.equal(torch.rand(3), drawn)
            with pytest.raises(MeshError, match=r"max_ep_size=1 ranks\. Found .*ep=2"):
                moe_env.setup(3, max_ep_size=1)
        finally:
            set_current_config(None)
