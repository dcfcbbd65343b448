# pyright: reportUnknownMemberType=false
"""Experts by the names of the last versions of the older API train as one process does, also while they move."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import assert_equal
from torch import nn

from colossal._src.cluster import set_ambient_mesh
from colossal._src.legacy.moe.load_balance import exchange_experts, find_arrangement
from colossal.booster import Booster
from colossal.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError, MeshError, PlanError, UnsupportedError
from colossal.legacy.booster import MoeHybridParallelPlugin
from colossal.legacy.interface import MoECheckpointIO
from colossal.legacy.moe import (
    MOE_CONTEXT,
    MOE_MANAGER,
    BaseExperts,
    EpDeepseekV3MoE,
    EPMixtralSparseMoeBlock,
    FFNExperts,
    LoadBalancer,
    MoeLayer,
    MoeParallelInfo,
    SparseMLP,
    Top2Router,
    TPExperts,
    apply_load_balance,
    build_ffn_experts,
)
from colossal.legacy.utils import set_seed
from colossal.nn.optimizer import HybridAdam
from colossal.testing import assert_equal_to_one_process, fake_world, run_processes

NUM_EXPERTS, WIDTH, TOKENS, STEPS = 4, 8, 12, 3


@pytest.fixture(autouse=True)
def _no_losses() -> None:
    MOE_MANAGER.reset_loss()


# ------------------------------------------------------------------------------------------ experts of several kinds


class Scales(BaseExperts):
    """Experts of a program's own, whose values say which of all experts they are."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__("all_to_all", num_experts)
        full = torch.randn(num_experts, 1, width)
        first = self.dist_info.ep_rank * self.num_local_experts if self.dist_info.ep_size > 1 else 0
        self.scale = nn.Parameter(full[first : first + self.num_local_experts])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert inputs.shape[:2] == (1, self.num_local_experts)
        return (inputs * self.scale).tanh() + self.scale


KINDS: dict[str, Any] = {
    "TPExperts, 3 of them": lambda: (3, TPExperts(3, WIDTH, 16)),
    "build_ffn_experts, 4": lambda: (4, build_ffn_experts(4, WIDTH, 16)),
    "build_ffn_experts, 3": lambda: (3, build_ffn_experts(3, WIDTH, 16)),
    "own": lambda: (4, Scales(4, WIDTH)),
}


def build(kind: str) -> nn.Module:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        set_seed(7)
        number, experts = KINDS[kind]()
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), MoeLayer(WIDTH, number, Top2Router(100.0), experts))
    finally:
        torch.set_default_dtype(default)


def batch_of(step: int, part: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(10 * step + part)
    return torch.randn(TOKENS - 5 * (part % 2), WIDTH, generator=drawn, dtype=torch.float64)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    MOE_CONTEXT.reset_loss()
    return model(tokens).square().mean() + 0.1 * MOE_CONTEXT.get_loss()


def train_one(kind: str, parts: int) -> dict[str, torch.Tensor]:
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.stack([loss_of(model, batch_of(step, part)) for part in range(parts)]).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.detach() for name, each in model.named_parameters()}


def train(kind: str, expected: dict[str, torch.Tensor]) -> None:
    with ParallelMesh(ep=2) as mesh:
        model = build(kind)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        booster = Booster(device="cpu", plugin=TorchDDPPlugin())
        boosted, optimizer, *_ = booster.boost(model, optimizer)
        for step in range(STEPS):
            booster.backward(loss_of(boosted, batch_of(step, mesh.rank("dp"))), optimizer)
            optimizer.clip_grad_by_norm(0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert_equal_to_one_process(boosted, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_equal_one_process(kind: str) -> None:
    run_processes(train, 2, kind, train_one(kind, 2))


def test_what_experts_cannot_be() -> None:
    with pytest.raises(ConfigError, match="Found 'ring'"):
        BaseExperts("ring", 4)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnsupportedError, match="Found 'all_gather'.*TPExperts"):
        BaseExperts("all_gather", 4)
    assert BaseExperts("all_to_all", 4).dist_info == MoeParallelInfo()
    with pytest.raises(ConfigError, match="Found none"):
        _ = MoeParallelInfo().ep_group
    with fake_world(2), ParallelMesh(ep=2):
        with pytest.raises(PlanError, match="num_experts=3 and d_ff=5"):
            build_ffn_experts(3, 8, 5)
        wrong = BaseExperts("all_to_all", 4)
        wrong.scale = nn.Parameter(torch.ones(4, 8))
        with pytest.raises(PlanError, match=r"scale of the shape \(4, 8\).*has 2 of 4"):
            MoeLayer(8, 4, Top2Router(), wrong)
    with fake_world(2), ParallelMesh(tp=2, ep=2), pytest.raises(PlanError, match="Found 16 features and .*tp=2"):
        TPExperts(3, 8, 16)


# ------------------------------------------------------------------------------------------ experts that move


class Mixture(nn.Module):
    """A layer whose router prefers the experts of the first rank."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.mlp = SparseMLP(NUM_EXPERTS, WIDTH, 16, 2, router_capacity_factor_train=100.0, **options)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens + self.mlp(self.embed(tokens))


def mixture(dtype: torch.dtype = torch.float64) -> Mixture:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        set_seed(3)
        model = Mixture(enable_load_balance=True, load_balance_tolerance=0.0, load_balance_group_swap_factor=1.0)
        with torch.no_grad():
            model.embed.bias.fill_(1.0)
            model.mlp.moe.router.weight[:2] += 0.5
        return model
    finally:
        torch.set_default_dtype(default)


def steps(booster: Booster, model: Any, optimizer: Any, part: int, moves: bool) -> list[torch.Tensor]:
    losses: list[torch.Tensor] = []
    for step in range(6):
        loss = loss_of(model, batch_of(step, part))
        losses.append(loss.detach())
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if moves and step % 2:
            tokens = batch_of(99, part)
            with torch.no_grad():
                outputs = model(tokens)
            if step == 1:
                assert model.unwrap().mlp.load_balancer.balance_load(optimizer) != [*range(NUM_EXPERTS)]
            else:
                apply_load_balance(model, optimizer)
            with torch.no_grad():
                assert_equal(model(tokens), outputs, "what the model computes")
    return losses


def train_while_experts_move(plugin: str, file: Path) -> None:
    losses: list[list[torch.Tensor]] = []
    for moves in (False, True):
        with ParallelMesh(ep=2) as mesh:
            model = mixture()
            booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
            optimizer_class: Any = HybridAdam if plugin == "gemini" else torch.optim.AdamW
            boosted, optimizer, *_ = booster.boost(model, optimizer_class(model.parameters(), lr=0.05))
            losses.append(steps(booster, boosted, optimizer, mesh.rank("dp"), moves))
            booster.save_model(boosted, file, use_safetensors=True)
            outputs = boosted(batch_of(0, 0)).detach()
    for step, (stays, moves) in enumerate(zip(*losses, strict=True)):
        assert_equal(moves, stays, f"loss of step {step}")
    serial = mixture()
    Booster(device="cpu").load_model(serial, file)
    assert_equal(serial(batch_of(0, 0)), outputs, "what the saved model computes")


PLUGINS: dict[str, Any] = {
    "ddp": TorchDDPPlugin,
    "zero1": lambda: LowLevelZeroPlugin(stage=1, precision="fp32"),
    "zero2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32"),
    "hybrid": lambda: HybridParallelPlugin(1, 1, ep_size=2, precision="fp32"),
    "hybrid, zero1, copies": lambda: MoeHybridParallelPlugin(1, 1, 2, precision="fp32", zero_stage=1),
}


@pytest.mark.parametrize(
    "plugin", [pytest.param(each, marks=() if "hybrid" in each else pytest.mark.slow) for each in PLUGINS]
)
def test_experts_move_and_the_model_stays(plugin: str, tmp_path: Path) -> None:
    run_processes(train_while_experts_move, 4 if "copies" in plugin else 2, plugin, tmp_path / "model.safetensors")


def move_experts_of_mixtral() -> tuple[list[int], list[int]]:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    with ParallelMesh(ep=2) as mesh:
        set_seed(1)
        config = MixtralConfig(hidden_size=WIDTH, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2)
        block: Any = MixtralSparseMoeBlock(config).double()
        for parameter in block.parameters():
            nn.init.normal_(parameter)
        tokens = batch_of(0, mesh.rank("dp"))[None].requires_grad_()
        expected = block(tokens)
        expected.square().sum().backward()
        grads = {name: each.grad for name, each in block.named_parameters()}
        of_tokens, tokens.grad = tokens.grad, None
        block.zero_grad()
        groups = mesh.group("tp"), mesh.group("edp"), mesh.group("ep")
        sharded = EPMixtralSparseMoeBlock.from_native_module(block, *groups)
        assert isinstance(sharded, EPMixtralSparseMoeBlock)
        assert isinstance(sharded, MixtralSparseMoeBlock)
        output = sharded(tokens)
        assert_equal(output, expected, "output")
        output.square().sum().backward()
        assert tokens.grad is not None
        assert of_tokens is not None
        assert_equal(tokens.grad, of_tokens, "gradient of the tokens")
        for name, each in sharded.named_parameters():
            total = grads[name].clone()
            if "experts" in name:  # of the tokens of all ranks
                torch.distributed.all_reduce(total)
                total = total[2 * mesh.rank("ep") :][:2]
            assert each.grad is not None
            assert_equal(each.grad, total, name)
        balancer = LoadBalancer(block.experts, block.gate, 2, 4, groups[2], groups[1], 0.0)
        balancer.update_load(torch.tensor([9, 8, 1, 0]))
        optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="Found some. Call optimizer.zero_grad"):
            balancer.balance_load(optimizer)
        optimizer.zero_grad()
        balancer.update_load(torch.tensor([9, 8, 1, 0]))
        order = balancer.balance_load(optimizer)
        # transformers normalizes scores in float32, in the order of the experts
        torch.testing.assert_close(block(tokens), expected, rtol=1e-5, atol=1e-5)
        return order, balancer.balance_load(optimizer)


def test_the_block_of_mixtral() -> None:
    assert run_processes(move_experts_of_mixtral, 2) == [([0, 3, 2, 1], [0, 1, 2, 3])] * 2


def test_blocks_that_are_refused() -> None:
    with fake_world(4):
        with pytest.raises(ConfigError, match="Found Linear, which has none"):
            EpDeepseekV3MoE.from_native_module(nn.Linear(2, 2))
        with pytest.raises(UnsupportedError, match="fp8_communication=True"):
            EpDeepseekV3MoE.from_native_module(nn.Linear(2, 2), fp8_communication=True)
        block = nn.Module()
        block.experts = FFNExperts(4, 8, 8)
        with ParallelMesh(ep=2) as mesh:
            with pytest.raises(MeshError, match=r"whose ep axis has the ranks \[0, 1\].*Found .*\[0, 1, 2, 3\]"):
                EPMixtralSparseMoeBlock.from_native_module(block, ep_group=mesh.group("dp"))
            with pytest.raises(ConfigError, match="Found local_expert_num=2 and expert_num=2"):
                LoadBalancer(FFNExperts(4, 8, 8), nn.Parameter(torch.ones(4, 8)), 2, 2, None, None)


@pytest.mark.parametrize(
    ("load", "num_swaps", "tolerance", "expected"),
    [
        ([5, 5, 0, 0], 2, 0.0, [[0, 2], [1, 3]]),
        ([8, 1, 1, 1, 1, 0], 4, 0.0, [[0, 1, 5], [2, 3, 4]]),  # one expert has most: nothing does better
        ([5, 5, 1, 1], 0, 0.0, [[0, 1], [2, 3]]),
        ([6, 5, 5, 4], 4, 0.1, [[0, 1], [2, 3]]),  # 11 of 10 are within the tolerance
        ([9, 7, 5, 3, 1, 1, 0, 0], 8, 0.0, [[0, 3, 4, 6], [1, 2, 5, 7]]),
    ],
)
def test_arrangements(load: list[int], num_swaps: int, tolerance: float, expected: list[list[int]]) -> None:
    found = find_arrangement(load, 2, tolerance, 8, num_swaps)
    half = len(found) // 2
    totals = [sum(load[each] for each in part) for part in (found[:half], found[half:])]
    assert sorted(totals) == sorted(sum(load[each] for each in part) for part in expected)
    assert sorted(found) == [*range(len(load))]
    if num_swaps == 0 or tolerance:
        assert found == [*range(len(load))]


def test_states_without_rows_are_refused() -> None:
    layer = SparseMLP(4, 8, 16, enable_load_balance=True)
    balancer = layer.load_balancer
    assert balancer is not None
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.state[layer.moe.router.weight]["basis"] = torch.ones(3, 3)
    before = {name: each.detach().clone() for name, each in layer.named_parameters()}
    with pytest.raises(UnsupportedError, match=r"Found 'basis' of the shape \(3, 3\)"):
        exchange_experts([(balancer, [1, 0, 2, 3])], optimizer)
    assert all(torch.equal(each, before[name]) for name, each in layer.named_parameters())


# ------------------------------------------------------------------------------------------ the manager, checkpoints


def test_the_layer_returns_logits_and_is_sharded_as_asked() -> None:
    layer = SparseMLP(4, 8, 16, 2, "EP", return_gate_logits=True)
    tokens = torch.randn(2, 3, 8)
    output, logits = layer(tokens)
    assert output.shape == tokens.shape
    torch.testing.assert_close(logits, tokens @ layer.moe.router.weight.T)
    with fake_world(2), ParallelMesh(ep=2):
        assert SparseMLP(3, 8, 16, parallel="TP", mlp_gated=True).moe.experts.gate_up_proj.shape == (3, 16, 8)
        with pytest.raises(ConfigError, match="Found None and .*ep=2"):
            SparseMLP(4, 8, 16, parallel=None)


def test_the_manager() -> None:
    manager: Any = importlib.import_module("colossal.moe.manager").MOE_MANAGER
    assert manager is MOE_MANAGER
    with fake_world(4):
        try:
            manager.setup(parallel="EP", mode="fixed", fixed_dp_size=2, fixed_ep_size=2, fixed_pp_size=1)
            number, info = manager.get_info(8)
            assert (number, info) == (4, MoeParallelInfo(True, 2, 2))
            assert (info.ep_rank, info.dp_rank, info.ep_group.size(), info.dp_group.size()) == (0, 0, 2, 2)
            assert manager.get_info(3, use_tp=True)[0] == 3
            assert (manager.get_parallel(), manager.is_initialized) == ("EP", True)
            assert SparseMLP(8, 8, 16).moe.experts.num_experts == 4
            with pytest.raises(MeshError, match="sizes of {'ep': 1, 'pp': 1}"):
                manager.setup("EP", max_ep_size=1)
        finally:
            set_ambient_mesh(None)
        try:
            manager.setup("TP", max_ep_size=3)  # 2 is the largest that divides the ranks
            assert manager.get_info(8)[1] == MoeParallelInfo(True, 2, 2)
        finally:
            set_ambient_mesh(None)
    manager.add_loss(torch.tensor(2.0), torch.tensor(3.0))
    assert manager.get_loss() == ([torch.tensor(2.0)], [torch.tensor(3.0)])
    manager.reset_loss()
    assert manager.get_loss() == ([], [])
    with pytest.raises(ConfigError, match="mode='static'"):
        manager.setup("EP", "static")
    with pytest.raises(ConfigError, match="'pp': 0"):
        manager.setup("EP", "fixed", fixed_dp_size=1, fixed_ep_size=2)
    with pytest.raises(UnsupportedError, match="use_ep_inside=False"):
        manager.setup("EP", use_ep_inside=False)


def test_checkpoints_and_the_plugin_by_their_groups() -> None:
    with fake_world(4):
        plugin = MoeHybridParallelPlugin(1, 1, 2, precision="bf16")
        assert isinstance(plugin, HybridParallelPlugin)
        groups = plugin.dp_group, plugin.pp_group, plugin.tp_group, plugin.mesh.group("sp")
        assert MoECheckpointIO(*groups, plugin.ep_group, plugin.moe_dp_group, 0) is not None
        assert (plugin.ep_group.size(), plugin.moe_dp_group.size(), plugin.moe_dp_size) == (2, 2, 2)
        with pytest.raises(ConfigError, match=r"the 4 ranks of a stage. Found .* of \[4, 2\]"):
            MoECheckpointIO(*groups, plugin.dp_group, plugin.moe_dp_group)
