# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
"""A model that is trained in pipeline stages generates what one process does, on all ranks, between the steps."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from decoders import VOCABULARY, build_decoder, generate, make_prompts
from engines import tokens_of
from plugins import HYBRID
from torch import distributed as dist
from torch import nn

from colossal.booster import Booster
from colossal.errors import ConfigError
from colossal.inference import InferenceConfig, InferenceEngine, SamplingParams
from colossal.testing import run_processes

IN_STAGES = partial(HYBRID, pp_size=2, num_microbatches=2)
PLUGINS: dict[str, tuple[int, Any]] = {
    "pp2": (2, partial(IN_STAGES, tp_size=1)),
    "pp2, interleaved": (2, partial(IN_STAGES, tp_size=1, pp_style="interleaved", num_model_chunks=2)),
    "pp2, zbv": (2, partial(IN_STAGES, tp_size=1, pp_style="zbv", num_model_chunks=2)),
    "pp2, dp2, ZeRO-1": (4, partial(IN_STAGES, tp_size=1, zero_stage=1)),
    "pp2, tp2": (4, partial(IN_STAGES, tp_size=2)),
}
CONFIG = InferenceConfig(max_input_len=32, max_output_len=32, block_size=4, max_tokens_per_step=16)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def build(family: str) -> Any:
    """Four layers, so that a rank can have two stages; without dropout, of which each rank draws its own."""
    model = build_decoder(family)
    layers = model.base_model.get_submodule("layers" if family == "llama" else "h")
    layers.extend(copy.deepcopy(layer) for layer in list(layers))
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.num_hidden_layers = len(layers)
    return model.train()


def batch_of(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def compare_with_one_process(plugin: str, family: str) -> None:
    own, reference = build(family), build(family)
    booster = Booster(device="cpu", plugin=PLUGINS[plugin][1]())
    model, optimizer, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.01))
    of_reference = torch.optim.SGD(reference.parameters(), lr=0.01)
    engine = InferenceEngine(model, inference_config=CONFIG)
    rank, _ = booster.plugin.data_parallel_rank_and_size()
    prompts = make_prompts()[rank : 4 + 2 * rank]
    for step in range(2):
        booster.execute_pipeline(iter([batch_of(step)]), model, lambda outputs, _inputs: outputs.loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        reference(**batch_of(step)).loss.backward()
        of_reference.step()
        of_reference.zero_grad()
        expected = generate(reference.eval(), prompts, 8)
        assert len({token for tokens in expected for token in tokens}) >= 8
        assert tokens_of(engine.generate(prompts, GREEDY)) == expected
        hits = engine.statistics.num_hit_tokens
        assert tokens_of(engine.generate(prompts, GREEDY)) == expected
        assert engine.statistics.num_hit_tokens > hits, "the prefixes of equal weights are used again"
        logits = reference(torch.tensor(prompts[:1])).logits[0]
        # transformers computes the loss in float32, so that gradients are rounded in another order over tp
        torch.testing.assert_close(engine.prompt_logits(prompts[0]), logits, rtol=0, atol=1e-5)
        assert model.training
        reference.train()


@pytest.mark.parametrize(
    ("plugin", "family"),
    [
        pytest.param(plugin, family, marks=() if (plugin, family) in in_gate else pytest.mark.slow)
        for in_gate in [{("pp2", "gpt2"), ("pp2, zbv", "llama"), ("pp2, tp2", "llama")}]
        for plugin in PLUGINS
        for family in ("llama", "gpt2", "bloom")
    ],
)
def test_the_newest_weights_generate(plugin: str, family: str) -> None:
    run_processes(compare_with_one_process, PLUGINS[plugin][0], plugin, family)


def sample_without_seeds() -> list[list[int]]:
    torch.manual_seed(dist.get_rank())
    own = build("llama")
    booster = Booster(device="cpu", plugin=PLUGINS["pp2"][1]())
    model, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.1))
    engine = InferenceEngine(model, inference_config=CONFIG)
    found = tokens_of(engine.generate([[5, 6], [7]], SamplingParams(max_tokens=8)))
    with pytest.raises(ConfigError, match="tensor-parallel ranks and pipeline stages pass the same prompts"):
        engine.generate([[5 + dist.get_rank()]])
    return found


def test_stages_sample_the_same_tokens_or_say_why_not() -> None:
    first, second = run_processes(sample_without_seeds, 2)
    assert first == second
