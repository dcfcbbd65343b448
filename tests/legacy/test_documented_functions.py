# pyright: reportUnknownMemberType=false
"""Functions of the older documentation over process groups, masks, 8 bits and experts compute what one process does."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from equality import assert_equal
from torch import distributed as dist
from torch import nn
from torch.nn import functional

from colossal._src.legacy.shardformer.colo_attention import AttnMaskType, ColoAttention
from colossal.booster import Booster
from colossal.checkpoint_io import CheckpointIndexFile
from colossal.cluster import ParallelMesh
from colossal.errors import CheckpointError, ConfigError, ShapeError, UnsupportedError
from colossal.legacy.booster import DPPluginBase, PipelinePluginBase
from colossal.legacy.quantization import all_reduce_fp8, cast_from_fp8, cast_to_fp8
from colossal.legacy.shardformer import (
    ModelSharder,
    ModulePolicyDescription,
    Policy,
    SubModuleReplacementDescription,
    dist_cross_entropy,
    dist_log_prob,
)
from colossal.nn import Linear1D_Col
from colossal.nn.moe import FeedForwardExperts, shard_experts
from colossal.shardformer import ShardConfig
from colossal.testing import fake_world, run_threads

OPERATIONS: Any = importlib.import_module("colossal.shardformer.layer._operation")
MOE_TENSORS: Any = importlib.import_module("colossal.tensor.moe_tensor.api")
PADDED: Any = importlib.import_module("colossal.tensor.padded_tensor")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ------------------------------------------------------------------------------------------ collectives with gradients


def exchange() -> None:
    with ParallelMesh(tp=2):
        rank, full = dist.get_rank(), random(4, 6)
        own = full.chunk(2)[rank].clone().requires_grad_()
        gathered = OPERATIONS.gather_forward_split_backward(own, 0, None)
        assert_equal(gathered, full, "gathered")
        gathered.square().sum().backward()
        assert_equal(own.grad, 2 * full.chunk(2)[rank], "a shard of the gradient")  # type: ignore[arg-type]

        whole = full.clone().requires_grad_()
        part = OPERATIONS.split_forward_gather_backward(whole, 0, None, grad_scale="down")
        assert_equal(part, full.chunk(2)[rank], "split")
        part.sum().backward()
        assert_equal(whole.grad, torch.full_like(full, 0.5), "the gradient, divided by the ranks")  # type: ignore[arg-type]

        whole = (full * (rank + 1)).requires_grad_()
        summed = OPERATIONS.reduce_forward(whole, None)
        assert_equal(summed, 3 * full, "sum")
        assert_equal(OPERATIONS.reducescatter_forward_gather_backward(whole, None, 0), 3 * full.chunk(2)[rank], "part")

        whole = full.clone().requires_grad_()
        (OPERATIONS.reduce_backward(whole, None) * (rank + 1)).sum().backward()
        assert_equal(whole.grad, torch.full_like(full, 3), "the sum of gradients")  # type: ignore[arg-type]

        own = full.chunk(2)[rank].clone().requires_grad_()
        (OPERATIONS.gather_forward_reducescatter_backward(own, None, 0) * (rank + 1)).sum().backward()
        assert_equal(own.grad, torch.full_like(own, 3), "a shard of the sum of gradients")  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match="fp8_communication=True"):
            OPERATIONS.reduce_forward(own, None, fp8_communication=True)


def test_collectives_and_their_gradients() -> None:
    run_threads(exchange, 2)


# ------------------------------------------------------------------------------------------ losses and masks


def losses(expected: torch.Tensor, probabilities: torch.Tensor) -> None:
    with ParallelMesh(tp=2) as mesh:
        labels, logits = torch.tensor([[0, 3, -100, 5]]), random(1, 4, 6)
        own = logits.chunk(2, -1)[mesh.rank("tp")]
        config = ShardConfig(mesh)
        assert_equal(dist_cross_entropy(labels, own, config, 6), expected, "loss")
        assert_equal(dist_log_prob(labels, own, config, 6), probabilities, "log-probabilities")
        full = ShardConfig(mesh, parallel_output=False)
        assert_equal(dist_cross_entropy(labels, logits, full, 6), expected, "loss of full logits")
        split = ShardConfig(mesh, enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather")
        with pytest.raises(UnsupportedError, match="label of another rank's token"):
            dist_cross_entropy(labels, own, split, 6)


def test_losses_of_next_tokens() -> None:
    labels, logits = torch.tensor([[0, 3, -100, 5]]), random(1, 4, 6)
    expected = functional.cross_entropy(logits[0, :-1], labels[0, 1:])
    each = -functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="none")[None, :, None]
    assert_equal(dist_cross_entropy(labels, logits, ShardConfig(), 6), expected, "loss of one process")
    assert_equal(dist_log_prob(labels, logits, ShardConfig(), 6), each, "log-probabilities of one process")
    run_threads(losses, 2, expected, each)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("pads", [True, False])
def test_attention_by_masks(is_causal: bool, pads: bool) -> None:
    q, k, v = (random(2, 3, 5, 4, seed=seed) for seed in range(3))
    padding = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]) if pads else None
    made = ColoAttention.prepare_attn_kwargs((2, 1, 5, 5), q.dtype, q.device, padding, is_causal=is_causal)
    kinds = {(True, True): "PADDED_CAUSAL", (False, True): "PADDED", (True, False): "CAUSAL", (False, False): "CUSTOM"}
    assert made["attention_mask_type"] is AttnMaskType[kinds[is_causal, pads]]
    scores = q @ k.mT / 2
    kept = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    kept = kept.tril() if is_causal else kept
    if padding is not None:
        kept = kept & padding[:, None, None].bool()
    expected = scores.masked_fill(~kept, float("-inf")).softmax(-1) @ v
    torch.testing.assert_close(ColoAttention.attention(q, k, v, **made), expected)


def test_masks_that_are_refused() -> None:
    q = random(1, 1, 2, 2)
    with pytest.raises(ConfigError, match=r"Found \(2, 2, 5, 5\)"):
        ColoAttention.prepare_attn_kwargs((2, 2, 5, 5), q.dtype, q.device)
    with pytest.raises(UnsupportedError, match="invert=False"):
        ColoAttention.prepare_attn_kwargs((2, 1, 5, 5), q.dtype, q.device, invert=False)
    with pytest.raises(UnsupportedError, match="lengths of packed ones"):
        ColoAttention.attention(q, q, q, max_seqlen_q=2)


# ------------------------------------------------------------------------------------------ 8 bits, experts, padding


def test_numbers_in_8_bits() -> None:
    tensor = torch.tensor([[1.0, -2.0], [300.0, 4.0]])
    cases: list[dict[str, Any]] = [{}, {"fp8_format": "e5m2"}, {"per_channel_scale": True}]
    for options in cases:
        values, scale = cast_to_fp8(tensor, **options)
        assert values.dtype == (torch.float8_e5m2 if "fp8_format" in options else torch.float8_e4m3fn)
        assert scale.shape == ((2, 1) if options.get("per_channel_scale") else ())
        torch.testing.assert_close(cast_from_fp8(values, scale, torch.float32), tensor, rtol=0.13, atol=0.0)
    with pytest.raises(ConfigError, match="Found 'e3m4'"):
        cast_to_fp8(tensor, "e3m4")  # pyright: ignore[reportArgumentType]


def sum_in_8_bits() -> None:
    tensor = torch.full((3,), 2.0)
    all_reduce_fp8(tensor, op=dist.ReduceOp.AVG)
    assert tensor.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(UnsupportedError, match="async_op=True"):
        all_reduce_fp8(tensor, async_op=True)


def test_sums_in_8_bits() -> None:
    run_threads(sum_in_8_bits, 2)


def test_the_ranks_of_experts() -> None:
    with fake_world(4, rank=3), ParallelMesh(ep=2) as mesh:
        parameter: Any = shard_experts(FeedForwardExperts(4, 8, 8), mesh).down_proj
        api = MOE_TENSORS
        assert api.is_moe_tensor(parameter)
        assert (api.get_ep_size(parameter), api.get_ep_rank(parameter), api.get_ep_group_ranks(parameter)) == (
            2,
            1,
            [2, 3],
        )
        assert (api.get_dp_size(parameter), api.get_dp_rank(parameter), api.get_dp_group_ranks(parameter)) == (
            2,
            1,
            [1, 3],
        )
        assert (api.get_ep_group(parameter).size(), api.get_dp_group(parameter).size()) == (2, 2)
        assert not api.is_moe_tensor(torch.ones(2))
        with pytest.raises(ConfigError, match=r"Found a tensor of the shape \(2,\)"):
            api.get_ep_size(torch.ones(2))
        config = ShardConfig(ep_group=mesh.group("ep"), moe_dp_group=mesh.group("edp"), extra_kwargs={}, sp_axis=1)
        assert config.mesh is mesh
        assert config.expert_parallel_size == 2
    with fake_world(2), pytest.raises(UnsupportedError, match="Found fp8_communication"):
        ShardConfig(fp8_communication=True)
    assert ShardConfig(make_vocab_size_divisible_by=1).mesh is None


@pytest.mark.parametrize(("mode", "axis"), [(None, "sp"), ("ring", "tp"), ("all_to_all", "sp")])
def test_a_config_says_its_sizes(mode: str | None, axis: Any) -> None:
    with fake_world(4):
        mesh = ParallelMesh(tp=2) if axis == "tp" else ParallelMesh(tp=2, sp=2)
        options: Any = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": mode}
        config = ShardConfig(mesh, **options)
        assert (config.tensor_parallel_size, config.sequence_parallel_size, config.expert_parallel_size) == (2, 2, 1)
        assert ShardConfig(ParallelMesh(tp=2)).sequence_parallel_size == 1


@pytest.mark.parametrize(("mode", "axis"), [(None, "sp"), ("ring", "tp"), ("all_to_all", "sp")])
def test_a_config_of_a_mesh_says_its_groups(mode: str | None, axis: Any) -> None:
    with fake_world(4):
        mesh = ParallelMesh(tp=2) if axis == "tp" else ParallelMesh(tp=2, sp=2)
        options: Any = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": mode}
        config: Any = ShardConfig(mesh, **options)
        assert config.tensor_parallel_process_group is mesh.group("tp")
        assert config.sequence_parallel_process_group is mesh.group(axis)
        changed: Any = replace(config, enable_tensor_parallelism=False)
        assert (changed.mesh, changed.enable_tensor_parallelism) == (mesh, False)
        assert changed.sequence_parallel_process_group is mesh.group(axis)
        unset: Any = ShardConfig(mesh)
        without_mesh: Any = ShardConfig()
        assert unset.sequence_parallel_process_group is mesh.group("sp"), "of one rank where none shard sequences"
        assert without_mesh.tensor_parallel_process_group is without_mesh.sequence_parallel_process_group is None
        with pytest.raises(ConfigError, match="a mesh, or groups of processes"):
            ShardConfig(ParallelMesh(), tensor_parallel_process_group=mesh.group("tp"))


def test_a_tensor_that_is_padded_already() -> None:
    padded = PADDED.init_as_padded_tensor(torch.tensor([1.0, 2.0, 0.0]), 3, 2, 0)
    assert PADDED.is_padded_tensor(padded)
    assert PADDED.to_unpadded_tensor(padded).tolist() == [1.0, 2.0]
    with pytest.raises(ShapeError, match="current_length=4 and origin_length=2"):
        PADDED.init_as_padded_tensor(torch.ones(3), 4, 2, 0)


# ------------------------------------------------------------------------------------------ plugins, policies, files


class Own(PipelinePluginBase, DPPluginBase):
    """A plugin that a user wrote for both older base classes."""

    def supported_devices(self) -> list[str]:
        return ["cpu"]

    def supported_precisions(self) -> list[str]:
        return []

    def control_precision(self) -> bool:
        return False

    control_device = control_checkpoint_io = support_no_sync = control_precision

    def configure(self, model: Any, optimizer: Any = None, criterion: Any = None, *others: Any, **named: Any) -> Any:
        del others, named
        return model, optimizer, criterion, None, None

    def get_checkpoint_io(self) -> Any:
        return None

    def no_sync(self, model: Any, optimizer: Any = None) -> Any:
        raise NotImplementedError

    def execute_pipeline(
        self, data_iter: Any, model: Any, criterion: Any, optimizer: Any = None, *_: Any, **__: Any
    ) -> dict[str, Any]:
        batch = next(data_iter)
        loss = criterion(model(batch), batch)
        if optimizer is not None:
            optimizer.backward(loss)
        return {"loss": loss, "outputs": None}


def test_a_plugin_of_both_base_classes() -> None:
    with pytest.raises(ConfigError, match="Found no process group"):
        Own()
    with fake_world(2, rank=1):
        plugin = Own()
        assert (plugin.rank, plugin.world_size) == (1, 2)
        with pytest.raises(UnsupportedError, match="Found Own, which has no enable_lora"):
            plugin.enable_lora(nn.Linear(1, 1))
        booster = Booster(device="cpu", plugin=plugin)
        model, optimizer, *_ = booster.boost(linear := nn.Linear(2, 1), torch.optim.SGD(linear.parameters(), lr=0.1))
        done = booster.execute_pipeline(iter([torch.ones(3, 2)]), model, lambda out, _: out.sum(), optimizer)
        assert done["loss"] is not None
        assert linear.weight.grad is not None


class Columns(Policy):
    """A policy that shards a layer, and adds a method."""

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        found: dict[Any, ModulePolicyDescription] = {}
        row = SubModuleReplacementDescription("0", Linear1D_Col)
        return self.append_or_create_submodule_replacement(row, found, nn.Sequential)


def test_a_policy_shards_a_model() -> None:
    model = nn.Sequential(nn.Linear(4, 6))
    with fake_world(2), ParallelMesh(tp=2):
        assert ModelSharder(model, Columns()).shard() == []
    assert model[0].weight.shape == (3, 4)
    policy = Columns()
    policy.set_model(model)
    assert policy.get_held_layers() == [model[0]]
    assert (policy.get_shared_params(), policy.tie_weight_check()) == ([], False)
    described = policy.append_or_create_method_replacement({"forward": print}, {}, nn.Sequential)
    assert described[nn.Sequential].method_replacement == {"forward": print}


def test_files_of_shards_are_refused() -> None:
    index = CheckpointIndexFile()
    index.append_weight_map("weight", "pytorch_model-00001.bin")
    index.assert_no_dtensor_checkpoint()
    index.append_weight_map("bias", "pytorch_model-dtensor-00002.bin")
    with pytest.raises(CheckpointError, match="names files of shards"):
        index.assert_no_dtensor_checkpoint()
