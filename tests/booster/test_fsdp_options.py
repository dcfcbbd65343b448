# pyright: reportAttributeAccessIssue=false
"""Every documented keyword of TorchFSDPPlugin means something to FSDP2, or is refused with what to do instead."""

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import wrap
from torch.distributed.tensor import DTensor

from colossal._src.booster.plugin.fsdp.fsdp_options import parse_fsdp_options
from colossal.booster import Booster
from colossal.booster.plugin import TorchFSDPPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError, MeshError, UnsupportedError
from colossal.testing import fake_world, run_processes

NAMES = ("replicate", "shard")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner[1](torch.relu(self.inner[0](x)))


class Net(nn.Module):
    """Two blocks in a list, a list without a forward pass of its own, and layers around them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.heads = nn.ModuleDict({"many": nn.ModuleList([nn.ModuleDict({"a": nn.Linear(4, 4)})])})
        self.out = nn.Linear(4, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(self.heads["many"][0]["a"](hidden))


def boost(model: nn.Module, *, optimizer: Any = None, precision: str | None = None, **options: Any) -> nn.Module:
    booster = Booster(device="cpu", plugin=TorchFSDPPlugin(**options), mixed_precision=precision)
    return booster.boost(model, optimizer)[0]


def units_of(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, fsdp.FSDPModule)}


def gathered(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}


# ------------------------------------------------------------------------------------------ strategies and groups


@pytest.mark.parametrize("strategy", [None, "FULL_SHARD", fsdp.ShardingStrategy.FULL_SHARD])
def test_full_shard_frees_parameters_after_the_forward_pass(strategy) -> None:
    model = Net()
    with fake_world(4):
        boosted = boost(model, sharding_strategy=strategy)
        boosted(torch.zeros(2, dtype=torch.int64))
        assert not gathered(model)


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", fsdp.ShardingStrategy.SHARD_GRAD_OP])
def test_shard_grad_op_keeps_them_for_the_backward_pass_only(strategy) -> None:
    model = Net()
    with fake_world(4):
        boosted = boost(model, sharding_strategy=strategy)
        loss = boosted(torch.zeros(2, dtype=torch.int64)).sum()
        assert gathered(model) == {name for name, _ in model.named_parameters()}
        loss.backward()
        assert not gathered(model)
        with torch.no_grad():
            boosted(torch.zeros(2, dtype=torch.int64))
        assert not gathered(model)


@pytest.mark.parametrize(
    ("strategy", "kept"),
    [(None, False), ("HYBRID_SHARD", False), ("_HYBRID_SHARD_ZERO2", True)],
)
def test_a_mesh_of_replicas_and_shards_is_hybrid_sharding(strategy, kept) -> None:
    model = Net()
    with fake_world(4):
        group = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
        boosted = boost(model, sharding_strategy=strategy, process_group=group)
        assert [str(placement) for placement in model.out.weight.placements] == ["R", "S(0)"]
        assert model.out.weight.to_local().shape == (3, 4)
        boosted(torch.zeros(2, dtype=torch.int64))
        assert bool(gathered(model)) == kept


def test_the_group_of_the_dp_axis_is_the_default() -> None:
    with fake_world(4), ParallelMesh() as mesh:
        for group in (None, mesh.group("dp")):
            model = Net()
            boost(model, process_group=group)
            assert model.out.weight.device_mesh.mesh.tolist() == [0, 1, 2, 3]


def test_other_groups_are_refused() -> None:
    with fake_world(4), ParallelMesh() as mesh:
        with pytest.raises(
            ConfigError, match=r"of other ranks\. Leave process_group out, and train inside of `with Para"
        ):
            boost(Net(), process_group=dist.new_group([0, 1]))
        with pytest.raises(ConfigError, match=r"the dp axis, \[0, 1, 2, 3\]\. Found \[\[0\], \[1\]\]"):
            boost(Net(), process_group=DeviceMesh("cpu", [[0], [1]], mesh_dim_names=NAMES))
        with pytest.raises(ConfigError, match=r"two named dimensions.*Found one with 1, named .*init_device_mesh"):
            boost(Net(), process_group=mesh.device_mesh["dp"])
        with pytest.raises(ConfigError, match=r"Found one with 2, named None"):
            boost(Net(), process_group=init_device_mesh("cpu", (2, 2)))
        with pytest.raises(ConfigError, match=r"Found \(1, 2\)\. Choose ranks by ParallelMesh"):
            boost(Net(), process_group=(1, 2))
        with pytest.raises(ConfigError, match="Found a mesh of replicas and shards.*Pass sharding_strategy='HYBRID_SH"):
            boost(
                Net(),
                process_group=init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES),
                sharding_strategy="FULL_SHARD",
            )


# ------------------------------------------------------------------------------------------ what is refused


REFUSED = {
    "no shard": ({"sharding_strategy": fsdp.ShardingStrategy.NO_SHARD}, UnsupportedError, "Use TorchDDPPlugin"),
    "hybrid without a mesh": (
        {"sharding_strategy": "HYBRID_SHARD"},
        ConfigError,
        r"Pass process_group=.*init_device_me",
    ),
    "hybrid 2 without a mesh": ({"sharding_strategy": "_HYBRID_SHARD_ZERO2"}, ConfigError, "replicate.*shard"),
    "unknown strategy": ({"sharding_strategy": "ZERO"}, ConfigError, "Found 'ZERO'"),
    "strategy of another type": ({"sharding_strategy": 3}, ConfigError, "Found 3"),
    "backward post": (
        {"backward_prefetch": fsdp.BackwardPrefetch.BACKWARD_POST},
        UnsupportedError,
        "Pass BACKWARD_PRE or leave it out",
    ),
    "unknown prefetch": ({"backward_prefetch": "LATER"}, ConfigError, "Found 'LATER'"),
    "parameters from a function": ({"param_init_fn": print}, UnsupportedError, "sync_module_states=True"),
    "offload by a word": ({"cpu_offload": "yes"}, ConfigError, "Found 'yes'"),
    "precision by a word": ({"mixed_precision": "bf16"}, ConfigError, r"write Booster\(mixed_precision='bf16'\)"),
    "buffers in another dtype": (
        {"mixed_precision": fsdp.MixedPrecision(buffer_dtype=torch.bfloat16)},
        UnsupportedError,
        "Convert the buffers before boost",
    ),
    "low precision gradients": (
        {"mixed_precision": fsdp.MixedPrecision(keep_low_precision_grads=True)},
        UnsupportedError,
        "keep_low_precision_grads=True.*Leave it False",
    ),
    "modules out of the precision": (
        {"mixed_precision": fsdp.MixedPrecision(_module_classes_to_ignore=[nn.Linear])},
        UnsupportedError,
        "_module_classes_to_ignore",
    ),
    "float16 without a scale": (
        {"mixed_precision": fsdp.MixedPrecisionPolicy(param_dtype=torch.float16)},
        UnsupportedError,
        r"Booster\(mixed_precision='fp16'\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_ignored_is_refused(name) -> None:
    options, error, match = REFUSED[name]
    with pytest.raises(error, match=match):
        TorchFSDPPlugin(**options)


def test_what_fsdp2_does_anyway_is_accepted() -> None:
    with fake_world(2):
        boost(
            Net(),
            backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_PRE,
            cpu_offload=fsdp.CPUOffload(offload_params=False),
            mixed_precision=fsdp.MixedPrecision(),
            fp8_communication=False,
        )


@pytest.mark.parametrize("offload", [True, fsdp.CPUOffload(offload_params=True)])
def test_offloading_from_the_cpu_to_the_cpu_is_refused(offload) -> None:
    with fake_world(2), pytest.raises(UnsupportedError, match="Found a model on the CPU.*Leave cpu_offload out"):
        boost(Net(), cpu_offload=offload)


def test_it_needs_a_world() -> None:
    with pytest.raises(MeshError):
        boost(Net())


def test_a_precision_that_replaces_parameters_is_refused_by_the_booster() -> None:
    with pytest.raises(UnsupportedError, match=r"TorchFSDPPlugin takes .*Found mixed_precision='fp16_naive'.*'fp16'\."):
        Booster(device="cpu", plugin=TorchFSDPPlugin(), mixed_precision="fp16_naive")


def test_two_precisions_are_refused() -> None:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with fake_world(2), pytest.raises(ConfigError, match="Leave out one of them"):
        boost(Net(), precision="bf16", mixed_precision=policy)


# ------------------------------------------------------------------------------------------ models that are refused


def sharded_twice() -> None:
    model = Net()
    boost(model)
    boost(model)


def halves() -> nn.Module:
    model = Net()
    model.blocks[0].inner[1].to(torch.bfloat16)
    return model


def ignoring(choose: Any) -> None:
    model = Net()
    boost(model, ignored_modules=[choose(model)])


MODELS = {
    "sharded already": (sharded_twice, ConfigError, "sharded already"),
    "without values": (lambda: boost(nn.Linear(2, 2, device="meta")), ConfigError, "Found weight on the meta device"),
    "sparse gradients": (lambda: boost(nn.Embedding(4, 2, sparse=True)), UnsupportedError, "sparse=False"),
    "two dtypes in a unit": (
        lambda: boost(halves()),
        ConfigError,
        r"inner\.0\.bias in torch\.float32 and inner\.1\.bias",
    ),
    "ignored, but trainable": (
        lambda: ignoring(lambda model: model.blocks[1]),
        ConfigError,
        r"blocks\.1 with trainable parameters: inner\.0\.weight.*requires_grad_\(False\)",
    ),
    "ignored, but not in it": (
        lambda: ignoring(lambda _: nn.Linear(1, 1)),
        ConfigError,
        "Found Linear, which does not",
    ),
    "no policy": (lambda: boost(Net(), auto_wrap_policy=3), ConfigError, "Found 3"),
    "a policy with options": (
        lambda: boost(Net(), auto_wrap_policy=wrap.CustomPolicy(lambda _: {"sharding_strategy": 1})),
        UnsupportedError,
        "Let it return True or False",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_would_fail_later_are_refused_by_boost(name) -> None:
    run, error, match = MODELS[name]
    with fake_world(2), pytest.raises(error, match=match):
        run()


def test_frozen_modules_that_are_ignored_stay_whole() -> None:
    model = Net()
    model.blocks[0].requires_grad_(False)
    model.out.requires_grad_(False)
    with fake_world(4):
        boosted = boost(model, ignored_modules=[model.blocks[0], model.out])
        boosted(torch.zeros(2, dtype=torch.int64)).sum().backward()
    assert gathered(model) == {name for name, _ in model.named_parameters() if name.startswith(("blocks.0", "out"))}
    assert units_of(model) == {"", "blocks.1", "heads.many.0.a"}


# ------------------------------------------------------------------------------------------ units


UNITS = {
    "the entries of the outermost lists": (None, {"", "blocks.0", "blocks.1", "heads.many.0.a"}),
    "classes": (wrap.ModuleWrapPolicy({Block}), {"", "blocks.0", "blocks.1"}),
    "a class of the root": (wrap.ModuleWrapPolicy({Net, nn.Embedding}), {"", "embed"}),
    "custom": (wrap.CustomPolicy(lambda module: isinstance(module, nn.Embedding)), {"", "embed"}),
    "transformer": (
        functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        {"", "blocks.0", "blocks.1"},
    ),
    "lambda": (
        functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block)),
        {"", "blocks.0", "blocks.1"},
    ),
    "size": (
        functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=30),
        {"", "blocks.0", "blocks.1"},
    ),
    "always": (
        wrap.always_wrap_policy,
        {"", "embed", "out", "heads.many.0.a"}
        | {f"blocks.{block}{inner}" for block in (0, 1) for inner in ("", ".inner.0", ".inner.1")},
    ),
    "never": (lambda **_: False, {""}),
}


@pytest.mark.parametrize("name", UNITS)
def test_a_policy_chooses_the_units(name) -> None:
    policy, expected = UNITS[name]
    model = Net()
    with fake_world(2):
        boost(model, auto_wrap_policy=policy)
    assert units_of(model) == expected


def units_of_fsdp1(model: nn.Module, policy: Any) -> set[str]:
    found: list[nn.Module] = []

    def note(module: nn.Module, **_options: Any) -> nn.Module:
        found.append(module)
        return module

    wrap._recursive_wrap(model, policy, note, set(), set(), only_wrap_children=True)
    callable_ones = [module for module in found if type(module).forward is not nn.Module.forward]
    return {name for name, module in model.named_modules() if module in callable_ones} | {""}


@pytest.mark.parametrize("name", ["transformer", "lambda", "size", "always", "never", "classes"])
def test_fsdp1_makes_the_same_units_of_a_policy(name) -> None:
    policy, expected = UNITS[name]
    assert units_of_fsdp1(Net(), policy) == expected


def test_parameters_that_units_share_pull_the_units_together() -> None:
    model = Net()
    model.out.weight = model.embed.weight
    model.blocks[1].inner[0].bias = model.blocks[0].inner[0].bias
    with fake_world(2):
        boost(model, auto_wrap_policy=wrap.always_wrap_policy)
    inner = {"blocks.0.inner.1", "blocks.1.inner.1"}
    assert units_of(model) == {"", "heads.many.0.a"} | inner
    assert model.out.weight is model.embed.weight
    assert model.blocks[1].inner[0].bias is model.blocks[0].inner[0].bias


def test_a_block_that_is_listed_twice_stays_a_unit() -> None:
    model = Net()
    model.blocks[1] = model.blocks[0]
    with fake_world(2):
        boost(model)
    assert units_of(model) == {"", "blocks.0", "heads.many.0.a"}


def test_a_module_inside_of_two_units_pulls_them_together() -> None:
    model = Net()
    model.blocks[1].inner[0] = model.blocks[0].inner[0]
    with fake_world(2):
        boost(model)
    assert units_of(model) == {"", "heads.many.0.a"}


def test_a_transformers_model_names_its_blocks() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    with fake_world(2):
        boost(model)
    assert units_of(model) == {"", "model.layers.0", "model.layers.1", "model.layers.2"}


# ------------------------------------------------------------------------------------------ precision of the plugin


class Watch(nn.Module):
    """Notes the dtypes that it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((x.dtype, self.layer.weight.dtype))
        return self.layer(x.to(self.layer.weight.dtype))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ModuleList([Watch()])
        self.own = Watch()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.list[0](self.own(x).float())


BF16, FP32 = torch.bfloat16, torch.float32
CASTS = {
    "FSDP2": (fsdp.MixedPrecisionPolicy(param_dtype=BF16), (BF16, BF16), BF16),
    "FSDP2, output": (fsdp.MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32), (BF16, BF16), FP32),
    "FSDP2, inputs as they are": (
        fsdp.MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False),
        (FP32, FP32),
        BF16,
    ),
    "FSDP1": (fsdp.MixedPrecision(param_dtype=BF16), (BF16, FP32), BF16),
    "FSDP1, inputs of units": (fsdp.MixedPrecision(param_dtype=BF16, cast_forward_inputs=True), (BF16, BF16), BF16),
    "FSDP1, not of the model": (
        fsdp.MixedPrecision(param_dtype=BF16, cast_root_forward_inputs=False),
        (FP32, FP32),
        BF16,
    ),
}


@pytest.mark.parametrize("name", CASTS)
def test_the_plugins_own_precision_casts_parameters_and_inputs(name) -> None:
    policy, (root_input, unit_input), output = CASTS[name]
    model = Pair()
    with fake_world(2):
        boosted = boost(model, mixed_precision=policy)
        result = boosted(torch.ones(2, 4))
        result.sum().backward()
    assert model.own.seen == [(root_input, BF16)]
    assert model.list[0].seen == [(unit_input, BF16)]
    assert result.dtype == output
    for parameter in model.parameters():
        assert parameter.dtype == parameter.grad.dtype == FP32


def rounded(policy: Any) -> bool:
    """Tell whether gradients that two ranks averaged have no more bits than bfloat16."""
    model = Pair()
    torch.manual_seed(0)
    boosted = boost(model, mixed_precision=policy, sync_module_states=True)
    boosted(torch.randn(2, 4, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))).sum().backward()
    grads = [parameter.grad.to_local() for parameter in model.parameters()]
    return all(torch.equal(grad, grad.bfloat16().float()) for grad in grads)


@pytest.mark.parametrize("kind", [fsdp.MixedPrecisionPolicy, fsdp.MixedPrecision])
@pytest.mark.parametrize("reduce_dtype", [None, FP32])
def test_gradients_travel_in_the_dtype_that_is_asked_for(kind, reduce_dtype) -> None:
    policy = kind(param_dtype=BF16, reduce_dtype=reduce_dtype)
    assert run_processes(rounded, 2, policy) == [reduce_dtype is None] * 2


def test_offloaded_parameters_take_the_precision_of_the_plugin() -> None:
    given = dict.fromkeys(inspect.signature(TorchFSDPPlugin).parameters)
    options = parse_fsdp_options({**given, "cpu_offload": True})
    with pytest.raises(
        UnsupportedError, match=r"mixed_precision='bf16'\. Pass TorchFSDPPlugin\(cpu_offload=True, mixed"
    ):
        options.check_precision("bf16")
