"""Engines as tests ask them: sizes, greedy requests, and the program of a first rank that leads the others."""

from typing import Any

import torch
from decoders import build_decoder, generate, make_prompts
from torch import distributed as dist

from colossal.inference import InferenceEngine, RequestOutput, SamplingParams

SIZES: dict[str, Any] = {"max_input_len": 32, "max_output_len": 32}
TIGHT: dict[str, Any] = {"max_batch_size": 4, "block_size": 4, "num_blocks": 20, "max_tokens_per_step": 12}
TIGHT |= {"output_reserve": 0.0}
"""Prompts in chunks, next to outputs, on so few pages that sequences are preempted; prefixes are used again."""


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **params)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def lead(engine: InferenceEngine, prompts: list[list[int]]) -> Any:
    """Use all that the first rank has, while the others follow it; return what `assert_led` compares."""
    if dist.get_rank():
        engine.follow()
        return engine.has_requests
    ids = [engine.add_request(prompt, greedy(8)) for prompt in prompts]
    engine.step()
    engine.abort(ids[-1])
    finished: dict[Any, RequestOutput] = {}
    while engine.has_requests:
        finished |= {output.request_id: output for output in engine.step()}
    engine.step()  # with nothing to compute
    logits = engine.prompt_logits(prompts[0])
    again = tokens_of(engine.generate(prompts, greedy(8)))  # those that follow take part
    engine.close()
    return tokens_of([finished[each] for each in ids[:-1]]), again, logits


def assert_led(ranks: list[Any]) -> None:
    """Compare what `lead` returned on each rank, given the LLaMA and the prompts of `decoders`, with one process."""
    model, prompts = build_decoder("llama"), make_prompts()
    expected = generate(model, prompts, 8)
    (found, again, logits), *have_requests = ranks
    assert found == expected[:-1]
    assert again == expected
    torch.testing.assert_close(logits, model(torch.tensor(prompts[:1])).logits[0].detach(), rtol=0, atol=1e-12)
    assert have_requests == [False] * (len(ranks) - 1)
