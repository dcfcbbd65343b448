# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""A boosted model generates with the weights that are trained, and trains on as if it had not."""

import gc
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from decoders import VOCABULARY, build_decoder, generate, make_prompts
from plugins import HYBRID, plugins
from torch import distributed as dist

from colossal.booster import Booster
from colossal.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from colossal.errors import ConfigError, UnsupportedError
from colossal.inference import InferenceConfig, InferenceEngine, RequestOutput, SamplingParams, output_logprobs
from colossal.testing import fake_world, run_processes

PLUGINS = plugins("DDP", "FSDP", "ZeRO-1", "ZeRO-2", "Gemini", "tp2", "Gemini, tp2") | {
    "ZeRO-1, overlapped": partial(LowLevelZeroPlugin, precision="fp32", overlap_allgather=True),
    "Gemini, offloaded": partial(GeminiPlugin, precision="fp32", offload_optim_frac=1.0, offload_param_frac=1.0),
    "tp2, ZeRO-1": partial(HYBRID, 2, 1, zero_stage=1),
}
CONFIG = InferenceConfig(max_input_len=32, max_output_len=32, block_size=4, max_tokens_per_step=16)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
STEPS = 3


def in_gate(*names: str) -> list[Any]:
    """All plugins, of which those without these names are slow."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in PLUGINS]


def boost(plugin: str, family: str = "gpt2") -> tuple[Booster, Any, Any]:
    """Boost a model with dropout, in training mode."""
    torch.manual_seed(0)
    own = build_decoder(family).train()
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    model, optimizer, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.3))
    return booster, model, optimizer


def batch_of(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(step))


def prompts_of(booster: Booster) -> list[list[int]]:
    """Other prompts, and another number of them, on each data-parallel rank."""
    rank, _ = booster.plugin.data_parallel_rank_and_size()
    return make_prompts()[rank : 3 + 2 * rank]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def train(plugin: str, *, generates: bool) -> dict[str, Any]:
    """Train for some steps, and generate before, inside and after each of them, or not at all."""
    booster, model, optimizer = boost(plugin)
    model.unwrap().transformer.h[0].eval()  # a mode that is not that of the rest
    engine = InferenceEngine(model, inference_config=CONFIG) if generates else None
    outputs: list[list[list[int]]] = []
    losses: list[float] = []

    def use_engine() -> None:
        if engine is not None:
            outputs.append(tokens_of(engine.generate(prompts_of(booster), GREEDY)))

    use_engine()
    for step in range(STEPS):
        ids = batch_of(step)
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        booster.backward(loss, optimizer)
        use_engine()
        optimizer.step()
        optimizer.zero_grad()
    use_engine()
    drawn = torch.rand(2)
    modes = [module.training for module in model.modules()]
    state = model.state_dict(only_rank_0=False)
    return {"outputs": outputs, "losses": losses, "drawn": drawn, "state": state, "modes": modes}


def compare_training(plugin: str) -> None:
    plain, found = train(plugin, generates=False), train(plugin, generates=True)
    assert found["losses"] == plain["losses"]
    assert found["modes"] == plain["modes"]
    assert torch.equal(found["drawn"], plain["drawn"])
    for name, value in plain["state"].items():
        assert torch.equal(found["state"][name], value), name
    before, *_, inside, after = found["outputs"]
    assert before == found["outputs"][1], "a backward pass changed the weights"
    assert before != inside != after


@pytest.mark.parametrize("plugin", in_gate("ZeRO-2", "Gemini, tp2"))
def test_training_goes_on_as_if_nothing_was_generated(plugin: str) -> None:
    run_processes(compare_training, 2, plugin)


def compare_with_newest(plugin: str, family: str) -> None:
    """After each step, compare with `generate` of a plain model that has the newest weights."""
    booster, model, optimizer = boost(plugin, family)
    engine, prompts = InferenceEngine(model, inference_config=CONFIG), prompts_of(booster)
    reference = build_decoder(family)
    for step in range(STEPS):
        ids = batch_of(step)
        booster.backward(model(input_ids=ids, labels=ids).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        reference.load_state_dict(model.state_dict(only_rank_0=False))
        expected = generate(reference, prompts, 8)
        assert len({token for tokens in expected for token in tokens}) >= 8
        found = tokens_of(engine.generate(prompts, GREEDY))
        hits = engine.statistics.num_hit_tokens
        again = tokens_of(engine.generate(prompts, GREEDY))
        assert found == again == expected
        assert engine.statistics.num_hit_tokens > hits, "the prefixes of equal weights are used again"


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("plugin", in_gate("Gemini", "tp2"))
def test_the_newest_weights_generate(plugin: str, family: str) -> None:
    run_processes(compare_with_newest, 2, plugin, family)


# ------------------------------------------------------------------------------------------ what an engine holds


def count_bytes() -> int:
    """Bytes of all storages that tensors of this process have."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and type(found) in (torch.Tensor, torch.nn.Parameter):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def generate_and_count(plugin: str) -> tuple[list[int], int]:
    """Bytes before an engine, after it has generated, and without it again; and those of a copy of the model."""
    booster, model, optimizer = boost(plugin)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in build_decoder("gpt2").parameters())
    ids = batch_of(0)
    booster.backward(model(input_ids=ids, labels=ids).loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    counted = [count_bytes()]
    config = InferenceConfig(max_batch_size=1, max_input_len=8, max_output_len=8, block_size=4)
    engine = InferenceEngine(model, inference_config=config)
    engine.generate([[5, 6, 7]], GREEDY)
    counted.append(count_bytes())
    del engine
    counted.append(count_bytes())
    return counted, num_bytes


@pytest.mark.parametrize("plugin", in_gate("FSDP", "Gemini"))
def test_there_is_no_second_copy(plugin: str) -> None:
    for (before, with_engine, after), num_bytes in run_processes(generate_and_count, 2, plugin):
        assert with_engine - before < num_bytes / 8, "pages, and nothing that was gathered"
        assert after - before < num_bytes / 100


# ------------------------------------------------------------------------------------------ weights that change


@pytest.fixture
def boosted() -> Any:
    with fake_world(1):
        yield boost("ZeRO-1", "llama")


@pytest.mark.parametrize("how", ["values", "data", "load_state_dict"])
def test_weights_are_new_however_they_were_written(boosted: Any, how: str) -> None:
    _, model, _ = boosted
    engine, prompts = InferenceEngine(model, inference_config=CONFIG), make_prompts()[:3]
    before = tokens_of(engine.generate(prompts, GREEDY))
    weight = model.unwrap().model.layers[0].mlp.down_proj.weight  # on which keys of the second layer depend
    if how == "values":
        with torch.no_grad():
            weight.mul_(-1)
    elif how == "data":
        weight.data.mul_(-1)
    else:
        model.unwrap().load_state_dict({**model.unwrap().state_dict(), "model.layers.0.mlp.down_proj.weight": -weight})
    after = tokens_of(engine.generate(prompts, GREEDY))
    assert after != before
    assert after == generate(deepcopy(model.unwrap()).eval(), prompts, 8)


def test_requests_that_run_go_on_with_the_new_weights(boosted: Any) -> None:
    """Their tokens stay, and all keys and values are computed again."""
    _, model, _ = boosted
    engine, prompt = InferenceEngine(model, inference_config=CONFIG), make_prompts()[0]
    engine.add_request(prompt, GREEDY)
    for _ in range(3):
        [output] = engine.step()
    kept = list(output.outputs[0].token_ids)
    with torch.no_grad():
        model.unwrap().model.layers[0].mlp.down_proj.weight.mul_(-1)
    while engine.has_requests:
        [output] = engine.step()
    found = list(output.outputs[0].token_ids)
    assert found[:3] == kept
    assert found[3:] == generate(deepcopy(model.unwrap()).eval(), [prompt + kept], 5)[0]
    assert engine.statistics.num_preempted == 1
    assert model.training


def test_an_exception_leaves_the_model_as_it_was(boosted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, _ = boosted
    engine, prompts = InferenceEngine(model, inference_config=CONFIG), make_prompts()[:2]
    with monkeypatch.context() as patch:
        patch.setattr(model.unwrap().lm_head, "forward", lambda _hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate(prompts)
    assert all(module.training for module in model.modules())
    assert tokens_of(engine.generate(prompts, GREEDY)) == generate(deepcopy(model.unwrap()).eval(), prompts, 8)


def test_adapters_generate() -> None:
    """Low-rank adapters are in the layers of the model that they adapt."""
    from peft import LoraConfig

    torch.manual_seed(0)
    with fake_world(1):
        booster = Booster(device="cpu", plugin=PLUGINS["DDP"]())
        own = booster.enable_lora(build_decoder("llama"), lora_config=LoraConfig(init_lora_weights=False))
        model, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.1))
        prompts = make_prompts()[:3]
        expected = generate(deepcopy(model.unwrap(unwrap_peft=False)).merge_and_unload().eval(), prompts, 8)
        assert tokens_of(InferenceEngine(model, inference_config=CONFIG).generate(prompts, GREEDY)) == expected


def test_autocast_is_that_of_training() -> None:
    torch.manual_seed(0)
    with fake_world(1):
        booster = Booster(device="cpu", mixed_precision="bf16", plugin=PLUGINS["DDP"]())
        own = build_decoder("llama").float()
        model, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.1))
        [output] = InferenceEngine(model, inference_config=CONFIG).generate(
            [make_prompts()[0]], SamplingParams(logprobs=0, max_tokens=1)
        )
        model.eval()
        [trained] = output_logprobs(model, [output])
        [exact] = output_logprobs(model.unwrap(), [output])
    assert output.outputs[0].logprobs[0].logprob == trained.item() != exact.item()


# ------------------------------------------------------------------------------------------ ranks


def sample_without_seeds() -> list[list[int]]:
    torch.manual_seed(dist.get_rank())
    _, model, _ = boost("tp2", "llama")
    engine = InferenceEngine(model, inference_config=CONFIG)
    first, second = (tokens_of(engine.generate([[5, 6], [7]], SamplingParams(max_tokens=8))) for _ in range(2))
    assert first != second, "without a seed each call takes another one"
    with pytest.raises(ConfigError, match="pipeline stages pass the same prompts"):
        engine.generate([[5 + dist.get_rank()]])
    return first + second


def test_ranks_that_shard_a_model_sample_the_same_tokens() -> None:
    first, second = run_processes(sample_without_seeds, 2)
    assert first == second


def refuse_sequence_parallelism() -> None:
    own = build_decoder("llama")
    sharded = HYBRID(2, 1, enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather")
    model, *_ = Booster(device="cpu", plugin=sharded).boost(own, torch.optim.SGD(own.parameters(), lr=0.1))
    with pytest.raises(UnsupportedError, match="Found a model whose tokens are sharded over ranks"):
        InferenceEngine(model)


def test_models_that_are_refused() -> None:
    run_processes(refuse_sequence_parallelism, 2)
