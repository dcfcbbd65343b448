# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
"""Options do what they say for every family, equal to one process, or are refused."""

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from divided import assert_grads, whole_grads
from equality import assert_equal
from families import LENGTH, MODELS, NOT_CAUSAL, build, inputs_of, results_of
from torch import nn
from torch.overrides import TorchFunctionMode

from colossal._src.shardformer import compiled_activation
from colossal._src.shardformer.fused_norm import FusedOffsetRMSNorm, FusedRMSNorm, FusedScaleNorm
from colossal._src.shardformer.model_options import MODEL_OPTIONS
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError, UnsupportedError
from colossal.lazy import LazyInitContext
from colossal.shardformer import (
    GradientCheckpointConfig,
    PipelineGradientCheckpointConfig,
    ShardConfig,
    ShardFormer,
    option_matrix,
    plan_of,
    supported_options,
)
from colossal.tensor import ParallelPlan, Stages
from colossal.testing import fake_world, run_processes, run_threads

pytestmark = pytest.mark.slow

FUSED = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "cohere",
    "glm",
    "deepseek",
    "gemma",
    "olmoe",
    "t5",
    "blip-2-t5",
)
EAGER_ONLY = ("gptj", "bloom")
CHOSEN_WHEN_BUILT = ("falcon", "sam")
IN_PARTS = ("gpt2", "gptj", "bloom")


class Calls(TorchFunctionMode):
    """Counts calls of torch's fused attention, and of the kernel of RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = 0, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.attention += func is nn.functional.scaled_dot_product_attention
        self.norm += func is nn.functional.rms_norm
        return func(*args, **(kwargs or {}))


def optimize(model: nn.Module, mesh: ParallelMesh, plan: ParallelPlan | None = None, **options: Any) -> Any:
    return ShardFormer(ShardConfig(mesh, parallel_output=False, **options)).optimize(model, plan)[0]


def train(name: str, model: nn.Module, size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Run a step of a copy with options, and forward once more with another last token."""
    with ParallelMesh(tp=size) as mesh, Calls() as calls:
        own = optimize(copy.deepcopy(model), mesh, **options)
        loss, logits = results_of(own, inputs_of(name))
        loss.backward()
        with torch.no_grad():
            _, changed = results_of(own, inputs_of(name, num_changed=1))
        grads = whole_grads(own, mesh)
    return {"loss": loss.detach(), "logits": logits.detach(), "changed": changed, "grads": grads, "calls": calls}


def check_equal(name: str, found: dict[str, Any], alone: nn.Module) -> None:
    """Compare with one process, whose model has done a step."""
    loss, logits = results_of(alone, inputs_of(name))
    assert_equal(found["loss"], loss.detach(), "loss")
    assert_equal(found["logits"], logits.detach(), "logits")
    if name not in NOT_CAUSAL:
        before = found["logits"][..., : LENGTH - 1, :]
        torch.testing.assert_close(found["changed"][..., : LENGTH - 1, :], before, rtol=0, atol=1e-12)
    assert_grads(found["grads"], alone)


# ------------------------------------------------------------------------------------------ attention and norms


@pytest.mark.parametrize("name", MODELS)
def test_attention_and_norms_equal_one_process(name: str) -> None:
    alone = build(name, "sdpa" if "alibi" in name else "eager")  # Falcon rounds its biases to bfloat16 for sdpa
    results_of(alone, inputs_of(name))[0].backward()
    attends = not name.startswith(EAGER_ONLY)
    model = build(name, "sdpa" if name.startswith(CHOSEN_WHEN_BUILT) else "eager")
    options = {"enable_flash_attention": attends, "enable_fused_normalization": True}
    for found in run_threads(train, 2, name, model, 2, options):
        check_equal(name, found, alone)
        assert (found["calls"].attention > 0) == attends
        is_fused = name.startswith(FUSED) and not name.startswith("cohere")
        assert (found["calls"].norm > 0) == is_fused


@pytest.mark.parametrize("name", MODELS)
def test_what_honours_an_option(name: str) -> None:
    model = build(name, "sdpa" if name.startswith(CHOSEN_WHEN_BUILT) else "eager")
    if not name.startswith(EAGER_ONLY):
        assert MODEL_OPTIONS["enable_flash_attention"].check(model) == "sdpa"
    assert MODEL_OPTIONS["enable_fused_normalization"].check(model) == (
        "fused" if name.startswith(FUSED) else "torch's"
    )
    assert MODEL_OPTIONS["enable_jit_fused"].check(model) == ("compiled" if name.startswith(IN_PARTS) else "torch's")


def test_the_matrix_is_what_models_say() -> None:
    matrix = option_matrix()
    assert matrix["bloom"]["enable_flash_attention"] == "refused"
    assert matrix["llama"] == {
        "tensor_parallelism": "yes",
        "pipeline_parallelism": "yes",
        "sequence_parallelism_on_tp": "yes",
        "sequence_parallelism_on_sp": "yes",
        "enable_flash_attention": "sdpa",
        "enable_fused_normalization": "fused",
        "enable_jit_fused": "torch's",
        "gradient_checkpoint_config": "yes",
    }
    for name in MODELS:
        model = build(name)
        family = model.config.model_type
        if family in matrix and name != "blip-2-t5":  # the language model of BLIP-2 is OPT by default
            assert supported_options(model) == matrix[family], name
    assert set(supported_options(nn.Linear(2, 2)).values()) == {"refused"}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("gptj", "GPTJForCausalLM, which has 'eager' only"),
        ("bloom", "BloomForCausalLM, which has 'eager' only"),
        ("falcon", r"FalconForCausalLM, whose attention 'eager'.*Build the model with attn_implementation='sdpa'"),
        ("sam", r"SamVisionAttention, whose attention 'eager' was chosen when it was built"),
    ],
)
def test_attention_that_is_not_to_be_had(name: str, found: str) -> None:
    model = build(name, "eager")
    with fake_world(1), ParallelMesh() as mesh, pytest.raises(UnsupportedError, match=found):
        optimize(model, mesh, enable_flash_attention=True)


def test_padding_is_not_attended_to() -> None:
    inputs = inputs_of("llama")
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, -4:] = 0  # at the end: eager attention itself is NaN where a token sees nothing
    inputs |= {"attention_mask": mask, "labels": torch.where(mask == 1, inputs["input_ids"], -100)}
    alone, model = build("llama", "eager"), build("llama", "eager")
    loss = results_of(alone, inputs)[0]
    loss.backward()
    with fake_world(1), ParallelMesh() as mesh:
        own = optimize(model, mesh, enable_flash_attention=True, enable_fused_normalization=True)
    found = results_of(own, inputs)[0]
    found.backward()
    assert_equal(found.detach(), loss.detach(), "loss")
    assert_grads({key: parameter.grad for key, parameter in own.named_parameters()}, alone)


KINDS: dict[str, tuple[str, type[nn.Module], Any]] = {
    "llama": ("llama.modeling_llama.LlamaRMSNorm", FusedRMSNorm, ()),
    "t5": ("t5.modeling_t5.T5LayerNorm", FusedRMSNorm, (True,)),
    "mt5": ("mt5.modeling_mt5.MT5LayerNorm", FusedRMSNorm, (True,)),
    "umt5": ("umt5.modeling_umt5.UMT5LayerNorm", FusedRMSNorm, (True,)),
    "gemma": ("gemma.modeling_gemma.GemmaRMSNorm", FusedOffsetRMSNorm, ()),
    "cohere": ("cohere.modeling_cohere.CohereLayerNorm", FusedScaleNorm, ()),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of_weight", DTYPES)
@pytest.mark.parametrize("of_input", DTYPES)
def test_norms_in_mixed_dtypes(kind: str, of_weight: torch.dtype, of_input: torch.dtype) -> None:
    path, fused, others = KINDS[kind]
    home, _, name = path.rpartition(".")
    native = getattr(__import__(f"transformers.models.{home}", fromlist=[name]), name)(64, eps=1e-6)
    nn.init.normal_(native.weight)
    native = native.to(of_weight)
    own = fused(native.weight, 1e-6, *others)
    x = torch.randn(3, 5, 64).to(of_input)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, found = native(one), own(other)
    assert found.dtype == expected.dtype
    halves = torch.bfloat16 if torch.bfloat16 in (of_input, of_weight) else torch.float16
    unit = torch.finfo(torch.float32 if of_input == of_weight == torch.float32 else halves).eps
    torch.testing.assert_close(found, expected, rtol=2 * unit, atol=2 * unit)
    grad = torch.randn(3, 5, 64).to(expected.dtype)
    expected.backward(grad)
    found.backward(grad)
    torch.testing.assert_close(other.grad, one.grad, rtol=8 * unit, atol=8 * unit)


def test_models_without_anything_to_fuse() -> None:
    class PlainNorm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / x.norm()

    model = nn.Sequential(nn.Linear(2, 2), PlainNorm())
    refused = {
        "enable_fused_normalization": r"Found Sequential with PlainNorm\. Leave the option out",
        "enable_jit_fused": "Found Sequential, which has none of them",
        "enable_flash_attention": "Found Sequential, which is no model of it",
    }
    with fake_world(1), ParallelMesh() as mesh:
        for option, message in refused.items():
            with pytest.raises(UnsupportedError, match=message):
                optimize(model, mesh, **{option: True})
        assert optimize(model, mesh, enable_all_optimization=True) is model


def test_all_optimizations_that_a_model_can_honour(logged: Callable[[], list[str]]) -> None:
    model = build("gptj")
    with fake_world(1), ParallelMesh() as mesh:
        own = optimize(model, mesh, enable_all_optimization=True)
    text = "\n".join(logged())
    assert "GPTJForCausalLM: enable_fused_normalization: torch's; enable_jit_fused: compiled; " in text
    assert "enable_flash_attention is left out: enable_flash_attention needs a model whose attention" in text
    assert own.transformer.h[0].mlp.act._compiled_call_impl is not None
    with fake_world(1), ParallelMesh() as mesh, pytest.raises(UnsupportedError, match="enable_flash_attention needs"):
        optimize(model, mesh, enable_all_optimization=True, enable_flash_attention=True)


# ------------------------------------------------------------------------------------------ compiled activations


def compile_and_train(names: tuple[str, ...]) -> list[int]:
    """Compare with a model that is not compiled; in a process of its own, in which the compiler leaves its traces."""
    numbers = []
    for name in names:
        alone, model = build(name), build(name)
        loss = results_of(alone, inputs_of(name))[0]
        loss.backward()
        own = optimize(model, ParallelMesh(), enable_jit_fused=True)
        torch._dynamo.utils.counters.clear()
        found = results_of(own, inputs_of(name))[0]
        found.backward()
        numbers.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
        for (key, mine), other in zip(own.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")
    return numbers


def test_compiled_activations_equal_one_process() -> None:
    (numbers,) = run_processes(compile_and_train, 1, ("gpt2", "bloom"), fresh=True)
    assert numbers == [1, 1], "one graph for the activations of all layers"


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UnsupportedError, match=r"a C\+\+ compiler on 'cpu'\. Found none\. Install g\+\+"):
        MODEL_OPTIONS["enable_jit_fused"].check(build("gpt2"))
    assert MODEL_OPTIONS["enable_jit_fused"].check(build("llama")) == "torch's"


def test_on_an_accelerator_triton_is_asked_for_while_the_model_is_still_on_the_host(monkeypatch) -> None:
    has: dict[str, object] = {}
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiled_activation, "find_spec", has.get)
    monkeypatch.setattr(compiled_activation, "get_accelerator", lambda: SimpleNamespace(name="xpu", is_cpu=False))
    with LazyInitContext():
        lazy = build("gpt2")
    for model in (build("gpt2"), lazy):
        has.clear()
        with pytest.raises(UnsupportedError, match=r"triton on 'xpu'\. Found none\. Install triton, or leave"):
            MODEL_OPTIONS["enable_jit_fused"].check(model)
        has["triton"] = object()
        assert MODEL_OPTIONS["enable_jit_fused"].check(model) == "compiled"
        has.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_device_module", {"xpu": SimpleNamespace(Scheduling=object)}.get)
            assert MODEL_OPTIONS["enable_jit_fused"].check(model) == "compiled"


# ------------------------------------------------------------------------------------------ checkpointing


def saved_bytes(name: str, model: Any) -> int:
    """Count the bytes that the forward pass stores besides parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, torch.UntypedStorage] = {}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        results_of(model, inputs_of(name))
    return sum(storage.nbytes() for storage in seen.values())


def with_stages() -> list[str]:
    return [name for name in MODELS if plan_of(build(name)).stages is not None]


@pytest.mark.parametrize("name", with_stages())
def test_checkpointed_layers_equal_one_process(name: str) -> None:
    alone = build(name)
    results_of(alone, inputs_of(name))[0].backward()
    options = {"gradient_checkpoint_config": GradientCheckpointConfig(1.0)}
    model = build(name)
    for found in run_threads(train, 2, name, model, 2, options):
        check_equal(name, found, alone)
    sizes = []
    for ratio in (0.0, 0.5, 1.0):
        with fake_world(1), ParallelMesh() as mesh:
            config = GradientCheckpointConfig(ratio)
            sizes.append(saved_bytes(name, optimize(build(name), mesh, gradient_checkpoint_config=config)))
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_options_beside_shared_sequences(name: str) -> None:
    alone, model = build(name, "eager"), build(name, "eager")
    results_of(alone, inputs_of(name))[0].backward()
    options: dict[str, Any] = {
        "enable_flash_attention": True,
        "enable_fused_normalization": True,
        "gradient_checkpoint_config": GradientCheckpointConfig(0.5),
        "enable_sequence_parallelism": True,
    }
    for found in run_threads(train, 2, name, model, 2, options):
        check_equal(name, found, alone)


def test_layers_of_a_user_are_checkpointed_while_they_train() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    plan = ParallelPlan({}, stages=Stages("blocks", pre_layers=()))
    with fake_world(1), ParallelMesh() as mesh:
        alone = Own()
        config = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[3])
        own = optimize(copy.deepcopy(alone), mesh, plan, gradient_checkpoint_config=config)
    x, runs, calls = torch.randn(5, 4), [], []
    for block in own.blocks:
        block[0].register_forward_hook(lambda *_: calls.append(0))
    for model in (alone, own):
        torch.manual_seed(0)
        model(x).sum().backward()
        runs.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*runs)
    assert len(calls) == 4 + 3, "three layers ran twice"
    own.eval()(x).sum().backward()
    assert len(calls) == 4 + 3 + 4
    assert list(own.state_dict()) == list(alone.state_dict())


def test_checkpointing_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"between 0 and 1\. Found 1\.5"):
        GradientCheckpointConfig(1.5)
    with pytest.raises(ConfigError, match=r"0 or more\. Found \[1, -1\]"):
        PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1, -1])
    some = PipelineGradientCheckpointConfig(0.5)
    assert [some.num_layers(held, 1, 2) for held in (4, 5)] == [2, 2]
    with fake_world(1), ParallelMesh() as mesh:
        model = build("t5")
        with pytest.raises(UnsupportedError, match="T5ForConditionalGeneration, whose plan has no stages"):
            optimize(model, mesh, replace(plan_of(model), stages=None), gradient_checkpoint_config=some)
        for numbers in ([3], [1, 1]):
            config = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=numbers)
            with pytest.raises(ConfigError, match=r"where stage 0 has 2 layers"):
                optimize(build("llama"), mesh, gradient_checkpoint_config=config)
