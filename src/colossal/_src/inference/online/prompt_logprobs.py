"""Log-probabilities of the tokens of a prompt, for clients that rate texts."""

from collections.abc import Sequence

import torch

from colossal._src.inference.engine import InferenceEngine
from colossal._src.inference.requests import TokenLogprob

PromptLogprobs = tuple[TokenLogprob | None, ...]
"""One entry a token; None for the first, which follows nothing."""


def rate_prompt(engine: InferenceEngine, prompt: Sequence[int], num_top: int) -> PromptLogprobs:
    """Compute a prompt in one forward of its own: the pages that it may share hold no logits."""
    logprobs = engine.prompt_logits(prompt)[:-1].log_softmax(-1)
    own = logprobs.gather(-1, torch.tensor(prompt[1:], device=logprobs.device)[:, None])[:, 0].tolist()
    highest = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    tops = [dict(zip(*row, strict=True)) for row in zip(highest.indices.tolist(), highest.values.tolist(), strict=True)]
    return None, *map(TokenLogprob, prompt[1:], own, tops)
