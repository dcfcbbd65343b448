"""A model in pipeline stages generates what one process does, with tensor parallelism or without."""

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
from colossal.errors import CommunicationError, ConfigError
from colossal.inference import InferenceConfig, InferenceEngine, SamplingParams
from colossal.testing import WorldError, run_processes, run_threads

WITHOUT_A_PLAN = ("gpt_neo", "mpt", "gpt_bigcode")
HEAD = "lm_head.weight"


def build(model: Any, tp: int, pp: int, **options: Any) -> InferenceEngine:
    return InferenceEngine(model, None, InferenceConfig(tp_size=tp, pp_size=pp, **SIZES | options))


def layers_with_pages(engine: InferenceEngine) -> list[int]:
    layers: list[Any] = engine._runner._cache.layers
    return [index for index, layer in enumerate(layers) if layer.is_initialized]


# ------------------------------------------------------------------------------------------ equal to `generate`


def generate_staged(model: Any, tp: int, pp: int, prompts: list[list[int]], options: dict[str, Any]) -> Any:
    engine = build(model, tp, pp, **options)
    return tokens_of(engine.generate(prompts, greedy(16))), engine.statistics, layers_with_pages(engine)


def check_equal(name: str, tp: int, pp: int, options: dict[str, Any]) -> list[Any]:
    model, prompts = build_decoder(name), make_prompts()
    expected = generate(model, prompts, 16)
    assert len({token for tokens in expected for token in tokens}) >= 20, "outputs repeat themselves and show little"
    ranks = run_processes(generate_staged, tp * pp, model, tp, pp, prompts, options)
    assert [tokens for tokens, *_ in ranks] == [expected] * tp * pp
    return ranks


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "llama" else pytest.mark.slow)
        for name in DECODERS | MORE_DECODERS
        if name not in WITHOUT_A_PLAN
    ],
)
def test_equal_to_generate_in_chunks_with_prefixes_and_preempted(name: str) -> None:
    (_, first, first_layers), (_, second, second_layers) = check_equal(name, 1, 2, TIGHT)
    assert first.num_preempted > 0
    assert first.num_hit_tokens > 0
    assert second.num_steps == 0, "the first rank alone schedules"
    assert (first_layers, second_layers) == ([0], [1]), "a rank has the pages of its own layers"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DECODERS | MORE_DECODERS if name not in WITHOUT_A_PLAN])
@pytest.mark.parametrize(
    ("tp", "options"), [(1, {}), (1, TIGHT | {"batch_invariant": True}), (2, TIGHT)], ids=["1", "1-invariant", "2"]
)
def test_equal_to_generate(name: str, tp: int, options: dict[str, Any]) -> None:
    check_equal(name, tp, 2, options)


def test_equal_to_generate_with_tensor_parallelism() -> None:
    check_equal("llama", 2, 2, TIGHT)


def sample_staged(model: Any, prompts: list[list[int]], params: list[SamplingParams], options: dict[str, Any]) -> Any:
    return build(model, 1, 2, **options).generate(prompts, params)


def test_logprobs_have_the_bits_of_one_rank() -> None:
    """Also without an invariant batch: a stage computes a batch of the same shape, and rounds as one process does."""
    model, prompts = build_decoder("llama").float(), make_prompts()
    params = [SamplingParams(seed=seed, n=2, logprobs=2, max_tokens=6) for seed in range(len(prompts))]
    for options in (TIGHT, TIGHT | {"batch_invariant": True}):
        alone = build(model, 1, 1, **options).generate(prompts, params)
        assert run_processes(sample_staged, 2, model, prompts, params, options) == [alone] * 2


def generate_in_stages(model: Any, prompts: list[list[int]], pp: int) -> Any:
    engine = build(model, 1, pp, **TIGHT)
    return tokens_of(engine.generate(prompts, greedy(8))), layers_with_pages(engine)


@pytest.mark.slow
def test_stages_between_the_first_and_the_last() -> None:
    model, prompts = build_decoder("llama"), make_prompts()
    extra = [copy.deepcopy(model.model.layers[0]) for _ in range(2)]
    model.model.layers.extend(extra)
    model.config.num_hidden_layers = 4
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    expected = generate(model, prompts, 8)
    ranks = run_processes(generate_in_stages, 3, model, prompts, 3)
    assert ranks == [(expected, [0]), (expected, [1, 2]), (expected, [3])]


def generate_in_a_group(model: Any, prompts: list[list[int]]) -> Any:
    engine = build(model, 1, 2)
    assert engine._peers is not None
    group = engine._peers.mesh.rank("dp")
    return group, tokens_of(engine.generate(prompts[group], greedy(4)))


@pytest.mark.slow
def test_each_group_of_ranks_has_an_engine_of_its_own() -> None:
    model, prompts = build_decoder("llama"), make_prompts()
    expected = [(group, generate(model, prompts[group : group + 1], 4)) for group in range(2)]
    assert sorted(run_processes(generate_in_a_group, 4, model, prompts)) == [expected[0]] * 2 + [expected[1]] * 2


# ------------------------------------------------------------------------------------------ directories


def generate_from(path: Path, prompts: list[list[int]], tp: int) -> Any:
    config = InferenceConfig(tp_size=tp, pp_size=2, dtype=torch.float64, **SIZES)
    engine = InferenceEngine(path, None, config)
    return tokens_of(engine.generate(prompts, greedy(8))), set(dict(engine.model.named_parameters()))


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_rank_reads_its_stage_of_a_directory(tmp_path, tp: int) -> None:
    model, prompts = build_decoder("llama").float(), make_prompts()
    model.save_pretrained(tmp_path)
    names = set(dict(model.named_parameters()))
    expected = generate(model.double(), prompts, 8)
    ranks = run_processes(generate_from, 2 * tp, tmp_path, prompts, tp)  # transformers loads in one thread at a time
    assert [tokens for tokens, _ in ranks] == [expected] * 2 * tp
    (_, first), (_, last) = ranks[0], ranks[-1]
    assert first | last == names
    assert first == {name for name in names if "layers.0." in name or "embed_tokens" in name}


@pytest.mark.slow
def test_a_tied_head_is_on_the_last_stage_as_well(tmp_path) -> None:
    model, prompts = build_decoder("llama"), make_prompts()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    expected = generate(model, prompts, 8)
    (first, first_names), (last, last_names) = run_processes(generate_from, 2, tmp_path, prompts, 1)
    assert first == last == expected
    assert "model.embed_tokens.weight" in first_names
    assert HEAD in last_names


# ------------------------------------------------------------------------------------------ the first rank leads


def serve(model: Any, prompts: list[list[int]]) -> Any:
    return lead(build(model, 1, 2, **TIGHT), prompts)


def test_the_others_follow_the_first_rank() -> None:
    assert_led(run_processes(serve, 2, build_decoder("llama"), make_prompts()))


def generate_until_one_is_lost(prompts: list[list[int]], lost: int) -> str:
    engine = build(build_decoder("llama"), 2, 2)
    engine.generate(prompts, greedy(2))
    if dist.get_rank() == lost:
        return ""  # and leaves the process group, as one that was killed does
    started_at = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        engine.generate(prompts, greedy(2))
    assert time.monotonic() - started_at < scaled(10)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_rank_that_is_lost_ends_requests_with_an_error(lost: int) -> None:
    assert all(
        message or rank == lost
        for rank, message in enumerate(run_processes(generate_until_one_is_lost, 4, make_prompts(), lost))
    )


# ------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    "name", [WITHOUT_A_PLAN[0], *(pytest.param(n, marks=pytest.mark.slow) for n in WITHOUT_A_PLAN[1:])]
)
def test_a_family_without_a_plan_is_refused(name: str) -> None:
    model = build_decoder(name)
    with pytest.raises(WorldError, match=rf"UnsupportedError: .* {type(model).__name__} with tp_size=1 and pp_size=2"):
        run_threads(build, 2, model, 1, 2)


def test_a_plan_without_stages_is_refused() -> None:
    model = build_decoder("phi3")
    model.config.base_model_pp_plan = None
    with pytest.raises(WorldError, match=r"UnsupportedError: .* Found Phi3ForCausalLM with pp_size=2, .* tp_size=2"):
        run_threads(build, 2, model, 1, 2)


def test_more_stages_than_layers_or_ranks_are_refused() -> None:
    model = build_decoder("llama")
    with pytest.raises(ConfigError, match=r"Found tp_size=1, pp_size=2 and 1 rank"):
        build(model, 1, 2)
    with pytest.raises(WorldError, match=r"Found 2 layers for 3 stages"):
        run_threads(build, 3, model, 1, 3)
