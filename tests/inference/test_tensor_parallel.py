"""A model that ranks shard generates what one process does; the first rank leads, and the others compute with it."""

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import DECODERS, MORE_DECODERS, build_decoder, generate, make_prompts
from engines import SIZES, TIGHT, assert_led, greedy, lead, tokens_of
from torch import distributed as dist

from colossal._src.testing.limits import scaled
from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.errors import CommunicationError, ConfigError
from colossal.inference import InferenceConfig, InferenceEngine, RequestOutput, SamplingParams
from colossal.testing import WorldError, run_processes, run_threads

QUICK = ("llama", "bloom", "falcon-rope")  # one key for two heads, a bias of positions, one key for all heads
WITHOUT_A_PLAN = ("gpt_neo", "mpt", "gpt_bigcode")


def build(model: Any, size: int, **options: Any) -> InferenceEngine:
    """Build an engine of a copy: ranks that are threads would shard the same model."""
    return InferenceEngine(copy.deepcopy(model), None, InferenceConfig(tp_size=size, **SIZES | options))


def shapes_of_pages(engine: InferenceEngine) -> set[int]:
    """How many values of keys a token has in the pages of this rank."""
    layers: list[Any] = engine._runner._cache.layers
    return {layer._states[0]._pages.shape[1] for layer in layers}


# ------------------------------------------------------------------------------------------ equal to `generate`


def generate_sharded(model: Any, size: int, prompts: list[list[int]], options: dict[str, Any]) -> Any:
    engine = build(model, size, **options)
    return tokens_of(engine.generate(prompts, greedy(16))), engine.statistics, shapes_of_pages(engine)


def check_equal(name: str, size: int, options: dict[str, Any]) -> list[Any]:
    model, prompts = build_decoder(name), make_prompts()
    expected = generate(model, prompts, 16)
    assert len({token for tokens in expected for token in tokens}) >= 20, "outputs repeat themselves and show little"
    ranks = run_threads(generate_sharded, size, model, size, prompts, options)
    assert [tokens for tokens, *_ in ranks] == [expected] * size
    return ranks


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in DECODERS | MORE_DECODERS
        if name not in WITHOUT_A_PLAN
    ],
)
def test_equal_to_generate_in_chunks_with_prefixes_and_preempted(name: str) -> None:
    (_, first, _), (_, second, _) = check_equal(name, 2, TIGHT)
    assert first.num_preempted > 0
    assert first.num_hit_tokens > 0
    assert second.num_steps == 0, "the first rank alone schedules"


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    ("size", "options"), [(2, {}), (2, TIGHT | {"batch_invariant": True}), (4, TIGHT)], ids=["2", "2-invariant", "4"]
)
def test_equal_to_generate(name: str, size: int, options: dict[str, Any]) -> None:
    check_equal(name, size, options)


@pytest.mark.parametrize("size", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_a_family_with_all_heads_on_each_rank_takes_more_ranks_than_heads(size: int) -> None:
    check_equal("phi3", size, {})


@pytest.mark.parametrize(("size", "num_heads"), [(2, 1), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_pages_hold_the_heads_of_a_rank(size: int, num_heads: int) -> None:
    """Of two key heads one, also where each is that of two ranks."""
    head_dim = 16
    for *_, shapes in check_equal("llama", size, {}):
        assert shapes == {num_heads * head_dim}


def generate_in_a_process(prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
    return build(build_decoder("llama"), 2, **TIGHT).generate(prompts, params)


@pytest.mark.slow
def test_all_ranks_have_all_of_the_outputs() -> None:
    prompts = make_prompts()
    params = [SamplingParams(seed=seed, n=2, logprobs=2, max_tokens=8) for seed in range(len(prompts))]
    alone = build(build_decoder("llama"), 1, **TIGHT).generate(prompts, params)
    first, second = run_processes(generate_in_a_process, 2, prompts, params)
    assert first == second
    for found, expected in zip(first, alone, strict=True):
        for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.logprobs is not None
            assert theirs.logprobs is not None
            pairs = zip(ours.logprobs, theirs.logprobs, strict=True)
            assert all(abs(one.logprob - other.logprob) < 1e-9 for one, other in pairs)


# ------------------------------------------------------------------------------------------ directories


def generate_from(path: Path, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    engine = InferenceEngine(path, None, InferenceConfig(tp_size=2, dtype=torch.float64, **SIZES))
    return tokens_of(engine.generate(prompts, greedy(8))), sum(each.numel() for each in engine.model.parameters())


def check_directory(path: Path, model: Any) -> None:
    prompts = make_prompts()
    total = sum(each.numel() for each in model.parameters())
    for tokens, numel in run_processes(generate_from, 2, path, prompts):  # transformers loads in one thread at a time
        assert tokens == generate(model.double(), prompts, 8)
        assert numel < 0.6 * total


def test_each_rank_reads_its_shard_of_a_directory(tmp_path) -> None:
    model = build_decoder("llama").float()
    model.save_pretrained(tmp_path)
    check_directory(tmp_path, model)


def save_by_ranks(path: Path, use_safetensors: bool) -> None:
    plugin = HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32")
    booster = Booster(plugin=plugin)
    model, *_ = booster.boost(build_decoder("llama").float())
    booster.save_model(model, path, shard=True, use_safetensors=use_safetensors)


@pytest.mark.slow
@pytest.mark.parametrize("use_safetensors", [True, False])
def test_each_rank_takes_its_shard_of_a_checkpoint_of_a_booster(tmp_path, use_safetensors: bool) -> None:
    run_processes(save_by_ranks, 2, tmp_path, use_safetensors)
    check_directory(tmp_path, build_decoder("llama").float())


# ------------------------------------------------------------------------------------------ the first rank leads


def serve(model: Any, prompts: list[list[int]]) -> Any:
    return lead(build(model, 2, **TIGHT), prompts)


def test_the_others_follow_the_first_rank() -> None:
    assert_led(run_threads(serve, 2, build_decoder("llama"), make_prompts()))


def test_each_group_of_ranks_has_an_engine_of_its_own() -> None:
    model, prompts = build_decoder("llama"), make_prompts()

    def program() -> list[list[int]]:
        engine = build(model, 2)
        return tokens_of(engine.generate(prompts[dist.get_rank() // 2], greedy(4)))

    first, second = generate(model, prompts[:1], 4), generate(model, prompts[1:2], 4)
    assert run_threads(program, 4) == [first, first, second, second]


def test_a_record_that_is_longer_than_its_buffer_comes_in_two() -> None:
    model = build_decoder("llama")
    prompt = [5 + index for index in range(32)]
    options = {"max_batch_size": 1, "max_tokens_per_step": 1, "block_size": 1, "batch_invariant": True}

    def program() -> list[list[int]]:
        engine = build(model, 2, **options)
        if engine._peers is not None and engine._peers.is_first:
            engine._peers.send(5, list(range(100, 400)))  # pyright: ignore[reportArgumentType]
        elif engine._peers is not None:
            kind, values = engine._peers.receive()
            assert (int(kind), values.tolist()) == (5, list(range(100, 400)))
        return tokens_of(engine.generate([prompt], greedy(4)))

    assert run_threads(program, 2) == [generate(model, [prompt], 4)] * 2


def generate_alone(prompts: list[list[int]]) -> str:
    engine = build(build_decoder("llama"), 2)
    if dist.get_rank():
        engine.generate(prompts, greedy(2))
        return ""  # and leaves the process group, as one that was killed does
    engine.generate(prompts, greedy(2))
    started_at = time.monotonic()
    with pytest.raises(CommunicationError, match="rank 1") as caught:
        engine.generate(prompts, greedy(2))
    assert time.monotonic() - started_at < scaled(10)
    return str(caught.value)


def test_a_rank_that_is_lost_ends_requests_with_an_error() -> None:
    first, _ = run_processes(generate_alone, 2, make_prompts())
    assert "has left the group" in first or "has ended" in first


# ------------------------------------------------------------------------------------------ refused


def refuse(model: Any, size: int) -> None:
    build(model, size)


@pytest.mark.parametrize(
    "name", [WITHOUT_A_PLAN[0], *(pytest.param(n, marks=pytest.mark.slow) for n in WITHOUT_A_PLAN[1:])]
)
def test_a_family_without_a_plan_is_refused(name: str) -> None:
    model = build_decoder(name)
    with pytest.raises(WorldError, match=rf"UnsupportedError: .* Found {type(model).__name__} with tp_size=2"):
        run_threads(refuse, 2, model, 2)


def test_more_ranks_than_there_are_are_refused() -> None:
    model = build_decoder("llama")
    with pytest.raises(ConfigError, match=r"Found tp_size=2, pp_size=1 and 1 rank"):
        build(model, 2)


def test_ranks_have_the_same_model_and_the_same_prompts() -> None:
    model = build_decoder("llama")

    def other_models() -> None:
        own = copy.deepcopy(model)
        own.model.norm.weight.data += dist.get_rank()
        with pytest.raises(ConfigError, match=r"Found that model\.norm\.weight differs between ranks"):
            build(own, 2)

    def other_prompts() -> None:
        engine = build(model, 2)
        with pytest.raises(ConfigError, match="Found different ones"):
            engine.generate([[5, 6 + dist.get_rank()]], greedy(2))
        assert len(engine.generate([[5, 6]], greedy(2))) == 1

    run_threads(other_models, 2)
    run_threads(other_prompts, 2)


def test_only_the_first_rank_takes_requests() -> None:
    model = build_decoder("llama")

    def program() -> None:
        engine = build(model, 2)
        if dist.get_rank() == 0:
            with pytest.raises(ConfigError, match="Found the first"):
                engine.follow()
        else:
            for call in (lambda: engine.add_request([5]), engine.step, lambda: engine.prompt_logits([5])):
                with pytest.raises(ConfigError, match="on rank 1"):
                    call()

    run_threads(program, 2)


def fail(_logits: Any) -> Any:
    raise ZeroDivisionError("division by zero")


def test_what_the_first_rank_raises_ends_the_others() -> None:
    model = build_decoder("llama")

    def program() -> str:
        engine = build(model, 2)
        if dist.get_rank() == 0:
            engine._core.sampler.sample = fail  # pyright: ignore[reportAttributeAccessIssue]
        try:
            engine.generate([[5, 6]], greedy(2))
        except (ZeroDivisionError, CommunicationError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    first, second = run_threads(program, 2)
    assert first.startswith("ZeroDivisionError")
    assert second.startswith("CommunicationError")
    assert "ZeroDivisionError: division by zero" in second
