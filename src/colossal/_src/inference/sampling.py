"""The next token of each sequence, chosen from the logits of all of them at once.

Every operation is on rows that do not see each other, and a random number is that of the sequence alone: what a row
gives does not depend on the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import torch

from colossal._src.inference.requests import Sequence, TokenLogprob
from colossal._src.inference.sampling_params import SamplingParams


@dataclass(frozen=True)
class SampledToken:
    """The next token of a sequence, and its log-probability if that is asked for."""

    token_id: int
    logprob: TokenLogprob | None = None


class Sampler:
    """Keeps the random numbers of each sequence; those without a seed draw it from one of the engine, if it has one."""

    def __init__(self, seed: int | None = None) -> None:
        self._random: dict[Sequence, Random] = {}
        self._seeds = None if seed is None else Random(seed)  # noqa: S311

    def forget(self, sequence: Sequence) -> None:
        """Drop what belongs to a sequence that is finished."""
        self._random.pop(sequence, None)

    def sample(self, logits_of: Mapping[Sequence, torch.Tensor]) -> dict[Sequence, SampledToken]:
        """Choose a token for each sequence from its logits, (vocabulary,)."""
        if not logits_of:
            return {}
        sequences = list(logits_of)
        logits = torch.stack(list(logits_of.values()))
        # half precision has too few values for sums over a vocabulary
        logits = logits if logits.dtype == torch.float64 else logits.float()
        penalized = penalize(logits, sequences)
        tokens = most_probable(penalized)
        sampled = [row for row, sequence in enumerate(sequences) if not sequence.params.is_greedy]
        if sampled:
            rows = torch.tensor(sampled, device=logits.device)
            chosen = self._draw(penalized[rows], [sequences[row] for row in sampled])
            tokens = tokens.index_copy(0, rows, chosen)
        logprobs = token_logprobs(logits, tokens, sequences)
        pairs = zip(sequences, tokens.tolist(), strict=True)
        return {sequence: SampledToken(token, logprobs.get(sequence)) for sequence, token in pairs}

    def _draw(self, logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
        """Draw a token a row from the distributions that parameters leave of the logits."""
        numbers = [self._random_of(sequence).random() for sequence in sequences]
        uniform = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
        probabilities, order = candidates(logits, [sequence.params for sequence in sequences])
        sums = probabilities.double().cumsum(-1)
        # Below the last sum, which is not exactly 1; a token of probability 0 is passed over, as its sum is not larger.
        index = torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)
        last = (probabilities > 0).sum(-1, keepdim=True) - 1
        return order.gather(-1, torch.minimum(index, last))[:, 0]

    def _random_of(self, sequence: Sequence) -> Random:
        found = self._random.get(sequence)
        if found is None:
            seed = sequence.params.seed
            if seed is None and self._seeds is not None:
                seed = self._seeds.getrandbits(64)
            # a string is hashed: outputs of one request, and neighbouring seeds, have nothing in common
            found = self._random[sequence] = Random(None if seed is None else f"{seed}/{sequence.index}")  # noqa: S311
        return found


def most_probable(logits: torch.Tensor) -> torch.Tensor:
    """Return the first of the highest logits of each row; in host memory by numpy, which compares vectors."""
    return torch.from_numpy(logits.detach().numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)


def penalize(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Lower the logits of earlier tokens, (rows, vocabulary), where parameters ask for it."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.params.has_penalties]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        sequence, params, own = sequences[row], sequences[row].params, logits[row]
        seen = torch.tensor([*sequence.prompt, *sequence.outputs], device=logits.device).unique()
        found = own[seen]
        own[seen] = torch.where(found > 0, found / params.repetition_penalty, found * params.repetition_penalty)
        if sequence.outputs:
            generated, counts = torch.tensor(sequence.outputs, device=logits.device).unique(return_counts=True)
            own[generated] -= params.frequency_penalty * counts + params.presence_penalty
    return logits


def candidates(logits: torch.Tensor, parameters: list[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of the tokens that may be drawn, the highest first and 0 for the others, and which tokens they are.

    Both are (rows, vocabulary). Probabilities do not sum to 1.
    """

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=logits.dtype, device=logits.device)[:, None]

    # below the highest one, as a low temperature would divide to infinity, and not by 0, what it rounds to
    temperature = column([each.temperature for each in parameters]).clamp_min(torch.finfo(logits.dtype).tiny)
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    logits, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    if any(each.top_k for each in parameters):
        num_kept = column([each.top_k or logits.shape[-1] for each in parameters])
        ranks = torch.arange(logits.shape[-1], device=logits.device)
        logits = logits.masked_fill(ranks >= num_kept, -torch.inf)
    probabilities = logits.softmax(-1)
    if any(each.top_p < 1 for each in parameters):
        before = probabilities.cumsum(-1) - probabilities
        # the first is kept even if top_p is smaller than any probability
        probabilities = probabilities.masked_fill(before >= column([each.top_p for each in parameters]), 0.0)
    if any(each.min_p for each in parameters):
        least = column([each.min_p for each in parameters]) * probabilities[:, :1]
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    return probabilities, order


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, sequences: list[Sequence]
) -> dict[Sequence, TokenLogprob]:
    """Log-probabilities of tokens, and the highest ones besides, where parameters ask for them."""
    asked = [row for row, sequence in enumerate(sequences) if sequence.params.logprobs is not None]
    if not asked:
        return {}
    rows = torch.tensor(asked, device=logits.device)
    logprobs = logits[rows].log_softmax(-1)
    chosen = tokens[rows]
    own = logprobs.gather(-1, chosen[:, None])[:, 0].tolist()
    counts = [min(sequences[row].params.logprobs or 0, logits.shape[-1]) for row in asked]
    highest = logprobs.topk(max(counts), dim=-1)
    found: dict[Sequence, TokenLogprob] = {}
    each_row = zip(asked, chosen.tolist(), own, counts, highest.indices.tolist(), highest.values.tolist(), strict=True)
    for row, token, value, count, indices, values in each_row:
        top = dict(zip(indices[:count], values[:count], strict=True))
        found[sequences[row]] = TokenLogprob(token, value, top)
    return found
