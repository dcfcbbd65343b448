# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""Log-probabilities of sampling and those of a training forward pass: how far apart they are, and that it can be 0."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from decoders import VOCABULARY, build_decoder, make_prompts
from equality import assert_equal
from plugins import plugins
from torch import distributed as dist

from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.errors import ConfigError, UnsupportedError
from colossal.inference import (
    InferenceConfig,
    InferenceEngine,
    LogprobGap,
    RequestOutput,
    SamplingParams,
    batch_invariant,
    logprob_gap,
    output_logprobs,
)
from colossal.testing import fake_world, run_processes

PLUGINS = plugins("DDP", "FSDP", "ZeRO-2", "Gemini", "tp2")
SIZES: dict[str, Any] = {"max_input_len": 32, "max_output_len": 32, "block_size": 4, "max_tokens_per_step": 16}
FAMILIES = ("llama", "gpt2", "opt", "qwen3", "gpt_neox", "mistral-window")


def without_dropout(name: str) -> Any:
    """A model in float32, whose training forward pass is that of evaluation."""
    model = build_decoder(name).float()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        vars(module).update({each: 0.0 for each in ("attention_dropout", "dropout") if each in vars(module)})
    return model.train()


def boost(plugin: str, name: str = "llama") -> tuple[Booster, Any, Any]:
    torch.manual_seed(0)
    own = without_dropout(name)
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    model, optimizer, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.05))
    return booster, model, optimizer


def sample(model: Any, prompts: list[list[int]], *, is_invariant: bool) -> list[RequestOutput]:
    config = InferenceConfig(batch_invariant=is_invariant, **SIZES)
    params = [SamplingParams(logprobs=0, seed=index, n=2, max_tokens=6) for index in range(len(prompts))]
    return InferenceEngine(model, inference_config=config).generate(prompts, params)


def compare(model: Any, prompts: list[list[int]], *, is_invariant: bool) -> LogprobGap:
    outputs = sample(model, prompts, is_invariant=is_invariant)
    if not is_invariant:
        return logprob_gap(outputs, output_logprobs(model, outputs))
    with batch_invariant():
        return logprob_gap(outputs, output_logprobs(model, outputs))


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:])])
def test_the_gap_is_0_where_rows_are_computed_one_by_one(name: str) -> None:
    with fake_world(1):
        _, model, _ = boost("DDP", name)
        prompts = make_prompts()[:4]
        rounded = compare(model, prompts, is_invariant=False)
        assert 0 < rounded.largest < 1e-3
        assert rounded.num_tokens == 2 * 6 * 4
        assert compare(model, prompts, is_invariant=True) == LogprobGap(0.0, 0.0, 2 * 6 * 4)


def train_and_compare(plugin: str) -> list[LogprobGap]:
    """Sample, compare, and train by the log-probabilities that were compared; ranks of dp have other prompts."""
    booster, model, optimizer = boost(plugin)
    rank, _ = booster.plugin.data_parallel_rank_and_size()
    gaps: list[LogprobGap] = []
    for _ in range(2):
        outputs = sample(model, make_prompts()[rank : rank + 2], is_invariant=True)
        with batch_invariant():
            logprobs = output_logprobs(model, outputs)
            booster.backward(-torch.cat(logprobs).mean(), optimizer)
        gaps.append(logprob_gap(outputs, logprobs))
        optimizer.step()
        optimizer.zero_grad()
    after = output_logprobs(model, outputs)
    assert torch.cat(after).mean() > torch.cat(logprobs).mean(), "tokens that were trained are more probable"
    return gaps


@pytest.mark.parametrize(
    "plugin", ["tp2", *(pytest.param(name, marks=pytest.mark.slow) for name in PLUGINS if name != "tp2")]
)
def test_the_gap_is_0_under_each_plugin_after_each_step(plugin: str) -> None:
    for gaps in run_processes(train_and_compare, 2, plugin):
        assert [gap.largest for gap in gaps] == [0.0, 0.0]


def gradients(model: Any, outputs: list[RequestOutput]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logprobs = output_logprobs(model, outputs)
    (torch.cat(logprobs) * torch.linspace(-1, 1, sum(map(len, logprobs)))).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_are_those_of_the_formula(name: str) -> None:
    """Also where rows are computed one by one."""
    model = build_decoder(name)
    outputs = sample(model, make_prompts()[:3], is_invariant=False)
    total, count = torch.zeros((), dtype=torch.float64), sum(len(each.token_ids) for o in outputs for each in o.outputs)
    weights = iter(torch.linspace(-1, 1, count))
    for output in outputs:
        for each in output.outputs:
            ids = [*output.prompt_token_ids, *each.token_ids]
            logits = model(input_ids=torch.tensor([ids])).logits[0]
            for place in range(len(output.prompt_token_ids), len(ids)):
                total = total + next(weights) * logits[place - 1].log_softmax(-1)[ids[place]]
    total.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    found = gradients(model, outputs)
    with batch_invariant():
        by_rows = gradients(model, outputs)
    for each, grad in expected.items():
        assert_equal(found[each], grad, each)
        assert_equal(by_rows[each], grad, each)


def compare_over_tp() -> None:
    outputs = sample(build_decoder("llama"), make_prompts()[:2], is_invariant=False)
    [*expected] = output_logprobs(build_decoder("llama"), outputs)
    own = build_decoder("llama")
    booster = Booster(device="cpu", plugin=PLUGINS["tp2"]())
    model, optimizer, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=1.0))
    found = output_logprobs(model, outputs)
    for each, other in zip(found, expected, strict=True):
        assert_equal(each.detach(), other.detach(), "log-probabilities")
    booster.backward(torch.cat(found).sum(), optimizer)
    optimizer.step()
    reference = build_decoder("llama")
    torch.cat(output_logprobs(reference, outputs)).sum().backward()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.sub_(parameter.grad)
    state = model.state_dict(only_rank_0=False)
    for name, value in reference.state_dict().items():
        assert_equal(state[name], value, name)
    assert dist.get_world_size() == 2


def test_logits_that_ranks_shard_give_equal_gradients() -> None:
    run_processes(compare_over_tp, 2)


def test_what_cannot_be_compared() -> None:
    model = build_decoder("llama")
    engine = InferenceEngine(model, inference_config=InferenceConfig(**SIZES))
    outputs = engine.generate([[5, 6]], SamplingParams(max_tokens=3))
    with pytest.raises(ConfigError, match=r"Generate with SamplingParams\(logprobs=0\)"):
        logprob_gap(outputs, output_logprobs(model, outputs))
    with pytest.raises(ConfigError, match="Found others than those of the outputs"):
        logprob_gap(outputs, [torch.zeros(2)])
    with pytest.raises(ConfigError, match="Found none"):
        output_logprobs(model, [])
    with fake_world(2):
        staged, *_ = Booster(device="cpu", plugin=HybridParallelPlugin(1, 2, num_microbatches=1)).boost(
            build_decoder("llama")
        )
        with pytest.raises(UnsupportedError, match=r"in pipeline stages.*booster\.execute_pipeline"):
            output_logprobs(staged, outputs)
    bloom = build_decoder("bloom")
    with batch_invariant(), pytest.raises(UnsupportedError, match="attn_implementation='sdpa'"):
        bloom(input_ids=torch.tensor([[5, 6]]))


def test_rows_see_nothing_of_each_other() -> None:
    model = deepcopy(without_dropout("llama")).eval()
    ids = torch.randint(VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), batch_invariant():
        together = model(input_ids=ids).logits
        for row in range(3):
            assert torch.equal(model(input_ids=ids[row : row + 1, :13]).logits[0], together[row, :13])
