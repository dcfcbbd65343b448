# pyright: reportArgumentType=false
"""A step that is planned without memory and without other ranks is the step that these make."""

import copy
from typing import Any, cast

import pytest
import torch
from families import EXPERTS, LENGTH, build, inputs_of
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from colossal._src.booster.plugin.hybrid.dry_run import dry_run
from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, StepPlan, plan_step
from colossal.comm import CommCounter
from colossal.errors import ConfigError, MeshError, UnsupportedError
from colossal.testing import SavedTensorCounter, fake_world, run_processes, run_threads

pytestmark = pytest.mark.slow

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2-pp2": ("llama", {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}),
    "tp2-pp2-tied": ("llama-tied", {"tp_size": 2, "pp_size": 2, "num_microbatches": 4}),
    "tp2-dp2": ("llama", {"tp_size": 2, "pp_size": 1}),
    "dp4-8-bits": ("llama", {"tp_size": 1, "pp_size": 1, "fp8_communication": True}),
    "dp4-zero1-8-bits": ("llama", {"tp_size": 1, "pp_size": 1, "zero_stage": 1, "fp8_communication": True}),
    "pp2-dp2-8-bits": ("llama", {"tp_size": 1, "pp_size": 2, "num_microbatches": 2, "fp8_communication": True}),
    "pp4-tied-interleaved": ("gpt2", {"tp_size": 1, "pp_size": 2, "num_microbatches": 4, "pp_style": "interleaved",
                                      "num_model_chunks": 2, "precision": "bf16"}),
    "tp2-dp2-zero1": ("llama", {"tp_size": 2, "pp_size": 1, "zero_stage": 1}),
    "tp2-dp2-zero2-bf16": ("gpt2", {"tp_size": 2, "pp_size": 1, "zero_stage": 2, "precision": "bf16"}),
    "pp2-dp2-zbv": ("llama", {"tp_size": 1, "pp_size": 2, "num_microbatches": 4, "pp_style": "zbv",
                              "num_model_chunks": 2}),
    "dp4-ep2": ("mixtral", {"tp_size": 1, "pp_size": 1, "ep_size": 2, "precision": "bf16"}),
    "tp2-dp2-ep4-zero1": ("mixtral", {"tp_size": 2, "pp_size": 1, "ep_size": 4, "zero_stage": 1, "precision": "bf16"}),
    "pp2-dp2-ep2": ("mixtral", {"tp_size": 1, "pp_size": 2, "num_microbatches": 2, "ep_size": 2, "precision": "bf16"}),
    "pp2-dp2-zero1": ("bert", {"tp_size": 1, "pp_size": 2, "num_microbatches": 2, "zero_stage": 1}),
}  # fmt: skip


def batch_of(name: str) -> dict[str, torch.Tensor]:
    pairs = [inputs_of(name, num_changed=each) for each in (0, 4)]
    return {key: torch.cat([pair[key] for pair in pairs]) for key in pairs[0]}


def make(name: str) -> Any:
    model: Any = build(name, num_layers=4).float()
    if name in EXPERTS:
        model.set_experts_implementation("grouped_mm")
    return model


def loss_of(outputs: Any, _inputs: Any = None) -> torch.Tensor:
    return outputs.loss


def plugin_of(options: dict[str, Any]) -> HybridParallelPlugin:
    return HybridParallelPlugin(**{"precision": "fp32", **options})


def train_all() -> dict[str, Any]:
    return {case: train(*CASES[case]) for case in CASES}


def train(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Make a step, and count."""
    booster = Booster(plugin=(plugin := plugin_of(options)))
    model: nn.Module = make(name)
    model, optimizer, criterion, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()), loss_of)

    def step() -> None:
        if plugin.pp_size > 1:
            booster.execute_pipeline(iter([batch_of(name)]), model, criterion, optimizer)
        else:
            booster.backward(criterion(model(**batch_of(name))), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    step()  # whose first message of each kind has a description in front of it
    with CommCounter() as counter:
        step()
    # What the plan leaves out: 4 bytes for each parameter and bucket, by which ranks agree on what was used; and by
    # which ranks of a pipeline see that they have the same batch, and learn the loss.
    agreed = ("all_reduce", "dp") if options.get("zero_stage") else ("all_gather", "pp")
    sent = {
        axis: sum(number for (op, each), number in counter.bytes.items() if each == axis and (op, axis) != agreed
                  and (op, axis) not in (("all_gather", "pp"), ("broadcast", "pp")))
        for axis in ("tp", "dp", "pp", "ep", "edp")
    }  # fmt: skip
    kept = [*optimizer.parameters, *(each for state in optimizer.state.values() for each in state.values())]
    whole = storages([*model.parameters(), *model.buffers()])
    return {
        "sent": sent,
        "parameters": sum(each.numel() for each in model.parameters()),
        "parameter_bytes": sum(whole.values()),
        "optimizer_bytes": sum(size for at, size in storages(kept).items() if at not in whole),
    }


def storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_processes(train_all, 4)


def on_meta(model: nn.Module) -> nn.Module:
    """The same without values, also of what is tied."""
    empty: dict[int, Any] = {id(each): nn.Parameter(each.to("meta")) for each in model.parameters()}
    return copy.deepcopy(model, empty | {id(each): each.to("meta") for each in model.buffers()})


def planned(name: str, options: dict[str, Any], rank: int) -> StepPlan:
    with fake_world(4, rank):
        model = on_meta(make(name))
        optimizer = torch.optim.AdamW(model.parameters())
        return plan_step(plugin_of(options), model, optimizer, batch_of(name), loss_of)


@pytest.mark.parametrize("case", CASES)
def test_is_what_ranks_do(case, trained) -> None:
    for rank, found in enumerate(each[case] for each in trained):
        plan = planned(*CASES[case], rank)
        assert plan.num_parameters == found["parameters"]
        assert plan.parameter_bytes == found["parameter_bytes"]
        assert plan.optimizer_bytes == found["optimizer_bytes"]
        for axis, number in plan.sent_bytes.items():
            if axis == "ep":  # where tokens went to depends on their values, and is not planned
                assert number == pytest.approx(found["sent"][axis], rel=0.5)
            else:
                assert number == found["sent"][axis] > 0, axis


def test_keeps_what_backward_passes_need() -> None:
    layers = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5)).to("meta")
    with dry_run() as live:
        inputs = torch.ones(3, 10, device="meta")
        outputs = layers(inputs)
        assert live.now == 4 * 3 * (10 + 20 + 5)  # what enters, what the middle needs once, and what leaves
        outputs.sum().backward()
        del outputs
        assert live.now == 4 * (3 * 10 + 10 * 20 + 20 + 20 * 5 + 5)  # what entered, and the gradients


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_autocast_keeps_what_it_keeps_on_a_real_device(name: str, recompute: bool) -> None:
    model, batch = make(name).train(), batch_of(name)
    if recompute:
        model.activation_checkpointing_enable()
    empty = on_meta(model)
    with SavedTensorCounter(model) as saved, torch.autocast("cpu", torch.bfloat16):
        model(**batch)
    with fake_world(1, 0):
        plugin, optimizer = plugin_of({"tp_size": 1, "pp_size": 1}), torch.optim.AdamW(empty.parameters())
        plan = plan_step(plugin, empty, optimizer, batch, loss_of, autocast=torch.bfloat16)
    inputs = sum(each.nbytes for each in batch.values())  # which autograd may keep, and the plan does not count
    assert saved.bytes - inputs <= plan.activation_bytes * 1.01
    assert plan.activation_bytes <= saved.bytes * 1.05  # rotary embeddings live until the end of the pass


def big(rank: int, *, recompute: bool = False, **options: Any) -> StepPlan:
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, use_cache=False,
    )  # fmt: skip
    with fake_world(1024, rank):
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        if recompute:
            model.train()
            model.activation_checkpointing_enable()
        ids = torch.zeros(16, 2048, dtype=torch.int64, device="meta")
        plugin = HybridParallelPlugin(8, 8, precision="bf16", zero_stage=1, microbatch_size=1, **options)
        optimizer = torch.optim.AdamW(model.parameters())
        return plan_step(plugin, model, optimizer, {"input_ids": ids, "labels": ids}, loss_of)


def test_70_billion_parameters_on_1024_ranks() -> None:
    stages = [big(8 * stage) for stage in range(8)]
    assert sum(
        8 * (one.num_parameters - one.num_replicated_parameters) + one.num_replicated_parameters for one in stages
    ) == (128256 * 8192 * 2 + 80 * (8192 * (64 + 8 + 8 + 64) * 128 + 3 * 8192 * 28672 + 2 * 8192) + 8192)
    layers, tokens = 10, 2048
    hidden = tokens * 8192 * 2
    for index, plan in enumerate(stages):
        assert plan.coordinate == {"pp": index, "dp": 0, "tp": 0}
        assert plan.gradient_bytes == pytest.approx(2 * plan.num_parameters, rel=1e-3)
        assert plan.optimizer_bytes == pytest.approx(12 * plan.num_parameters / 16, rel=1e-3)
        assert plan.num_in_flight == 8 - index
        assert plan.sent_bytes["pp"] == 16 * hidden * (1 if index in (0, 7) else 2)
        in_layers = 16 * layers * 4 * 2 * hidden * 7 // 8  # four all-reduces, of which each sends nearly twice
        assert plan.sent_bytes["tp"] - in_layers == {0: 16 * 2 * hidden * 7 // 8}.get(index, 0) or index == 7
        assert plan.sent_bytes["dp"] == pytest.approx(2 * 2 * plan.num_parameters * 15 / 16, rel=1e-3)


def test_recomputed_layers_keep_less_and_send_more() -> None:
    plain, recomputed = big(64 + 8), big(64 + 8, recompute=True)
    assert recomputed.activation_bytes < 0.2 * plain.activation_bytes
    assert recomputed.sent_bytes["tp"] > plain.sent_bytes["tp"]
    assert recomputed.optimizer_bytes == plain.optimizer_bytes


def real_model() -> None:
    plan_step(plugin_of({"tp_size": 2, "pp_size": 1}), model := build("llama"), torch.optim.AdamW(model.parameters()),
              batch_of("llama"), loss_of)  # fmt: skip


def test_a_world_that_exists_is_refused() -> None:
    def program() -> None:
        with pytest.raises(MeshError, match="communicates through threaded.*fake_world"):
            real_model()

    run_threads(program, 2)


def test_a_model_with_values_is_refused() -> None:
    with fake_world(2), pytest.raises(ConfigError, match=r"embed_tokens.weight, which has some.*device\('meta'\)"):
        real_model()


def test_other_plugins_are_named() -> None:
    model, other = build("llama"), cast("HybridParallelPlugin", LowLevelZeroPlugin())
    with fake_world(2), pytest.raises(ConfigError, match="Found LowLevelZeroPlugin.*colossal estimate"):
        plan_step(other, model, torch.optim.AdamW(model.parameters()), batch_of("llama"), loss_of)


def test_shared_sequences_are_refused() -> None:
    options = {
        "tp_size": 2,
        "pp_size": 1,
        "enable_sequence_parallelism": True,
        "sequence_parallelism_mode": "split_gather",
    }
    with pytest.raises(UnsupportedError, match="'split_gather'.*without sequence parallelism"):
        planned("llama", options, 0)


def test_experts_whose_shapes_depend_on_values_are_refused() -> None:
    for precision, implementation in (("fp32", "grouped_mm"), ("bf16", "eager")):
        with fake_world(2):
            model = on_meta(build("mixtral").float())
            model.set_experts_implementation(implementation)  # type: ignore[operator]
            plugin = plugin_of({"tp_size": 1, "pp_size": 1, "ep_size": 2, "precision": precision})
            with pytest.raises(UnsupportedError, match=r"experts_implementation=.*set_experts_implementation.*'bf16'"):
                plan_step(plugin, model, torch.optim.AdamW(model.parameters()), batch_of("mixtral"), loss_of)


def test_tokens_that_go_to_all_ranks_are_planned() -> None:
    options = {"tp_size": 1, "pp_size": 1, "ep_size": 2, "precision": "bf16", "expert_exchange": "all_gather"}
    plan, layers, width = planned("mixtral", options, 0), 4, 64
    tokens = 4 * LENGTH
    # each token once to the other rank, with its experts and their weights; results are summed in float32
    values, weights, chosen, results = tokens * width * 2, tokens * 2 * 4, tokens * 2 * 8, tokens * width * 4
    assert plan.sent_bytes["ep"] == layers * (chosen + 2 * (values + weights + results))
    assert plan.num_calls["ep"] == 7 * layers


def test_tokens_are_planned_to_be_routed_evenly() -> None:
    options = {"tp_size": 1, "pp_size": 1, "ep_size": 2, "precision": "bf16"}
    plan, layers, width = planned("mixtral", options, 0), 4, 64
    rows = 2 * 4 * LENGTH  # each of the tokens of this rank goes to two experts
    counts_bytes = 4 * 8 // 2
    # out and back, and the gradients of both; of two ranks, half of the rows leave this one
    assert plan.sent_bytes["ep"] == layers * (counts_bytes + 4 * rows // 2 * width * 2)
    assert plan.num_calls["ep"] == 5 * layers
