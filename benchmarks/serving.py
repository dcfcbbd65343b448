"""Tokens per second of many requests at once, and the time to the first token of a prompt whose beginning is known.

All ways generate greedily for the same prompts with the same Llama in float32, in one process and in turns whose order
alternates: the engine with all requests at once and with one after the other, `generate` of transformers one after the
other, and its continuous batching. Tokens of all ways are equal.

    OMP_NUM_THREADS=1 python benchmarks/serving.py [--turns 5 --requests 16 --hidden 256]

Printed are seconds by the clock, and those of the processor, which other work on the machine leaves alone.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from colossal.inference import InferenceConfig, InferenceEngine, SamplingParams

VOCABULARY = 4096
PREFIX_BAR = 0.2
ENGINE, ONE_BY_ONE, GENERATE, CONTINUOUS = "engine", "engine, one by one", "generate, one by one", "continuous batching"

Way = Callable[[], list[list[int]]]
Seconds = tuple[float, float]
"""By the clock, and of the processor."""


def build_model(hidden: int, layers: int) -> Any:
    """A Llama whose head is not tied, with weights so strong that outputs do not repeat themselves."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64 or 1,
        num_key_value_heads=hidden // 64 or 1,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 2 / hidden**0.5)
    return model


def make_prompts(count: int, shortest: int, longest: int) -> list[list[int]]:
    """Prompts of different lengths."""
    numbers = random.Random(0)  # noqa: S311
    lengths = [numbers.randint(shortest, longest) for _ in range(count)]
    return [[numbers.randrange(5, VOCABULARY) for _ in range(length)] for length in lengths]


def make_ways(model: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Way]:
    """All ways to generate for the prompts."""
    length = max(map(len, prompts))
    engine = InferenceEngine(
        model,
        inference_config=InferenceConfig(
            max_batch_size=len(prompts), max_input_len=length, max_output_len=max_tokens, prefix_cache=False
        ),
    )
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    greedy = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
    # as many pages, and tokens of a step, as the engine has
    pages = ContinuousBatchingConfig(
        page_size=engine.config.block_size,
        num_blocks=engine.config.total_blocks,
        max_batch_tokens=engine.config.step_tokens,
    )

    def at_once() -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in engine.generate(prompts, params)]

    def one_by_one() -> list[list[int]]:
        return [list(engine.generate([prompt], params)[0].outputs[0].token_ids) for prompt in prompts]

    def generate() -> list[list[int]]:
        found = [model.generate(torch.tensor([prompt]), generation_config=greedy) for prompt in prompts]
        return [ids[0, len(prompt) :].tolist() for ids, prompt in zip(found, prompts, strict=True)]

    def continuous() -> list[list[int]]:
        found = model.generate_batch(
            prompts, generation_config=greedy, progress_bar=False, continuous_batching_config=pages
        )
        # requests are numbered in their order
        ordered = sorted(found.values(), key=lambda output: int(output.request_id.rpartition("_")[2]))
        return [list(output.generated_tokens) for output in ordered]

    return {ENGINE: at_once, ONE_BY_ONE: one_by_one, GENERATE: generate, CONTINUOUS: continuous}


def timed(act: Callable[[], Any]) -> tuple[Any, Seconds]:
    """What a call returns, and how long it took."""
    clock, processor = time.perf_counter(), time.process_time()
    found = act()
    return found, (time.perf_counter() - clock, time.process_time() - processor)


def race(ways: dict[str, Way], turns: int) -> dict[str, list[Seconds]]:
    """Time each way in each turn, after one that is not counted.

    Raises:
        AssertionError: Two ways give other tokens.
    """
    times: dict[str, list[Seconds]] = {name: [] for name in ways}
    expected = ways[GENERATE]()
    for turn in range(-1, turns):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            tokens, seconds = timed(ways[name])
            assert tokens == expected, f"{name} gives other tokens than {GENERATE}"
            if turn >= 0:
                times[name].append(seconds)
    return times


def time_to_first_token(model: Any, length: int, turns: int) -> tuple[list[Seconds], list[Seconds]]:
    """Time the first token of prompts whose beginning is new, and of prompts that begin like these."""
    config = InferenceConfig(max_input_len=length, max_output_len=1, max_tokens_per_step=length)
    engine = InferenceEngine(model, inference_config=config)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    misses: list[Seconds] = []
    hits: list[Seconds] = []
    [prompt] = make_prompts(1, length, length)
    for turn in range(-1, turns):
        prompt[0] = 6 + turn  # no two turns begin with the same page
        for times, last in ((misses, 5), (hits, 6)):
            _, seconds = timed(lambda last=last: engine.generate([[*prompt[:-1], last]], params))
            if turn >= 0:
                times.append(seconds)
    return misses, hits


def ratio(these: list[Seconds], those: list[Seconds], clock: int) -> float:
    """The median of how many times as long these took, turn by turn."""
    return statistics.median(this[clock] / that[clock] for this, that in zip(these, those, strict=True))


def main() -> None:
    """Measure, and print medians and ratios of turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of each output")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prefix", type=int, default=512, help="tokens of the prompt that is shared")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model = build_model(options.hidden, options.layers)
    numel = sum(parameter.numel() for parameter in model.parameters())
    prompts = make_prompts(options.requests, 16, 128)
    times = race(make_ways(model, prompts, options.tokens), options.turns)
    print(f"{numel / 1e6:.1f} million parameters, {options.requests} requests of {options.tokens} tokens,", end=" ")
    print(f"{options.turns} turns, {torch.get_num_threads()} threads")
    for name, seconds in times.items():
        speed = options.requests * options.tokens / statistics.median(clock for clock, _ in seconds)
        faster = [ratio(seconds, times[ENGINE], clock) for clock in (0, 1)]
        print(f"{name:<22} median {speed:8.1f} tokens/s   the engine is {faster[0]:5.2f} times as fast", end="")
        print(f", {faster[1]:5.2f} by processor time")
    misses, hits = time_to_first_token(model, options.prefix, options.turns)
    parts = [ratio(hits, misses, clock) for clock in (0, 1)]
    print(f"first token after a prefix of {options.prefix}: {parts[0]:.3f} of that without, {parts[1]:.3f} by", end=" ")
    print(f"processor time   (bar: {PREFIX_BAR})")


if __name__ == "__main__":
    main()
