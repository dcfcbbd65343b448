"""Log-probabilities of outputs under the model that is trained, and how far those of sampling are from them."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from colossal._src.inference.requests import CompletionOutput, RequestOutput
from colossal._src.interface import full_spec_of, model_without_adapters, unwrap_model
from colossal._src.shardformer import sharded_generation_of
from colossal.errors import ConfigError, UnsupportedError


@dataclass(frozen=True)
class LogprobGap:
    """How far log-probabilities of sampling are from those of a training forward pass; printed in one line.

    Args:
        largest: The largest absolute difference of a token.
        mean: The mean absolute difference.
        num_tokens: How many tokens were compared.

    Example:
        >>> from colossal.inference import LogprobGap
        >>> print(LogprobGap(largest=0.25, mean=0.125, num_tokens=2))
        log-probabilities of 2 tokens differ by at most 2.5e-01, on average by 1.2e-01
    """

    largest: float
    mean: float
    num_tokens: int

    def __str__(self) -> str:
        """Say it in a line."""
        return (
            f"log-probabilities of {self.num_tokens} tokens differ by at most {self.largest:.1e}, on average by "
            f"{self.mean:.1e}"
        )


def output_logprobs(model: nn.Module, outputs: Sequence[RequestOutput]) -> list[torch.Tensor]:
    """Compute log-probabilities of tokens that were generated, by one forward pass of a model.

    Prompts and outputs are padded on the right to one batch. Nothing is masked by `temperature` and other parameters of
    sampling: log-probabilities are those of the model, as those of `CompletionOutput`.

    Args:
        model: A causal language model of transformers, boosted or not, in any mode. With tensor parallelism all ranks
            of a group pass the same outputs; under each plugin all ranks call together, as for every forward pass.
        outputs: What the engine returned.

    Returns:
        One tensor for each completion, in their order, each (tokens,), in float32 or float64, with gradients if they
        are enabled.

    Raises:
        ConfigError: There are no outputs.
        UnsupportedError: The model is in pipeline stages.

    Communication: that of a forward pass, and with tensor parallelism all_gather, tp, the bytes of the logits.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from colossal.inference import InferenceConfig, InferenceEngine, SamplingParams, output_logprobs
        >>> sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        >>> model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)).eval()
        >>> engine = InferenceEngine(model, inference_config=InferenceConfig(max_input_len=8, max_output_len=8))
        >>> outputs = engine.generate([[5, 6], [7]], SamplingParams(max_tokens=3, ignore_eos=True))
        >>> [(each.shape, each.requires_grad) for each in output_logprobs(model, outputs)]
        [(torch.Size([3]), True), (torch.Size([3]), True)]
    """
    completions = [(output.prompt_token_ids, each.token_ids) for output in outputs for each in output.outputs]
    if not completions:
        raise ConfigError("Log-probabilities are those of outputs. Found none. Pass what the engine returned.")
    if full_spec_of(unwrap_model(model)) is not None:
        raise UnsupportedError(
            "output_logprobs calls the full model once. Found a model in pipeline stages. Call "
            "booster.execute_pipeline with the tokens, and compute them in its criterion from the logits of the last "
            "stage; or use a plugin without pp_size."
        )
    device = next(model.parameters()).device
    longest = max(len(prompt) + len(tokens) for prompt, tokens in completions)
    ids = torch.zeros(len(completions), longest, dtype=torch.int64, device=device)
    mask = torch.zeros_like(ids)
    for row, (prompt, tokens) in enumerate(completions):
        length = len(prompt) + len(tokens)
        ids[row, :length] = torch.tensor((*prompt, *tokens), device=device)
        mask[row, :length] = 1
    own = model_without_adapters(unwrap_model(model))
    sharded = sharded_generation_of(own)
    with nullcontext() if sharded is None else sharded.full_logits(own):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    lengths = [len(tokens) for _, tokens in completions]
    rows = torch.tensor([row for row, length in enumerate(lengths) for _ in range(length)], device=device)
    places = [len(prompt) + index for prompt, tokens in completions for index in range(len(tokens))]
    columns = torch.tensor(places, device=device)
    chosen = logits[rows, columns - 1]  # each token is predicted at the one before it
    chosen = chosen if chosen.dtype == torch.float64 else chosen.float()
    logprobs = chosen.log_softmax(-1).gather(-1, ids[rows, columns][:, None])[:, 0]
    return list(logprobs.split(lengths))


def logprob_gap(outputs: Sequence[RequestOutput], logprobs: Sequence[torch.Tensor]) -> LogprobGap:
    """Compare the log-probabilities of sampling with those that the model gives the same tokens in training.

    A sampler computes a token at a time, training all of them at once, and rounding depends on that: by some 1e-6 in
    float32, and by some 1e-2 in bfloat16, which shows in ratios of importance. The gap is exactly 0 where the engine
    has `batch_invariant=True` and `logprobs` are computed inside of `batch_invariant()`, with the weights that the
    engine had, and without dropout; `batch_invariant` says for which models.

    Args:
        outputs: What the engine returned for `SamplingParams(logprobs=0)` or more.
        logprobs: What `output_logprobs` returned for them.

    Returns:
        The gap over all tokens of this rank.

    Raises:
        ConfigError: Outputs have no log-probabilities, or others than `logprobs`.

    Example:
        >>> import torch
        >>> from colossal.inference import CompletionOutput, RequestOutput, TokenLogprob, logprob_gap
        >>> output = CompletionOutput(0, (7,), "", (TokenLogprob(7, -0.5, {}),), "length")
        >>> logprob_gap([RequestOutput(0, None, (5,), (output,))], [torch.tensor([-0.75])]).largest
        0.25
    """
    completions = [each for output in outputs for each in output.outputs]
    if [len(each.token_ids) for each in completions] != [len(each) for each in logprobs]:
        raise ConfigError(
            "Log-probabilities are compared token by token. Found others than those of the outputs. Pass what "
            "output_logprobs returned for these outputs."
        )
    values = [value for each in completions for value in _sampled(each)]
    sampled = torch.tensor(values, dtype=torch.float64, device="cpu")
    trained = torch.cat([each.detach() for each in logprobs]).double().cpu()
    apart = (sampled - trained).abs()
    return LogprobGap(apart.max().item(), apart.mean().item(), len(apart))


def _sampled(output: CompletionOutput) -> list[float]:
    if output.logprobs is None:
        raise ConfigError(
            "Log-probabilities of sampling are those of outputs. Found an output without. Generate with "
            "SamplingParams(logprobs=0)."
        )
    return [each.logprob for each in output.logprobs]
