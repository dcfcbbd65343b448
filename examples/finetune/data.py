"""JSONL files as tokens: one text, prompt with completion, or chat a line; padded, or packed into windows."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch.utils.data import Dataset

IGNORED = -100
"""A label that does not count."""

Sample = tuple[list[int], list[int]]
"""Tokens, and labels of the same length."""


def read(path: Path, tokenizer: Any, length: int, *, pack: bool) -> list[Sample]:
    """Read a JSONL file.

    Args:
        path: Each line has ``text``; ``prompt`` and ``completion``; or ``messages``, a list of role and content.
        tokenizer: That of the model.
        length: Tokens of a sample at most; with `pack`, of every sample.
        pack: Join all samples, and cut the result into windows.

    Returns:
        The samples, without those that have no label to learn: where the answer begins beyond `length`, for example.
    """
    samples = [_tokenize(row, tokenizer) for row in _rows(path)]
    if pack:
        samples = list(_windows(samples, length))
    kept = [(ids[:length], labels[:length]) for ids, labels in samples]
    return [(ids, labels) for ids, labels in kept if num_labels(labels)]


def num_labels(labels: Sequence[int]) -> int:
    """Count the labels of a sample that are learned; the first is predicted from nothing."""
    return sum(label != IGNORED for label in labels[1:])


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    # not splitlines(), which also ends lines at characters that JSON has in strings
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            message = f"A JSONL file has a JSON object in each line. Found {error} in {path}:{number}."
            raise ValueError(message) from None
        keys = row.keys() if isinstance(row, dict) else frozenset[str]()
        if not {"messages", "text"} & keys and not {"prompt", "completion"} <= keys:
            found = f"the keys {', '.join(keys)}" if isinstance(row, dict) else type(row).__name__
            raise ValueError(
                f"A line has text; prompt and completion; or messages. Found {found} in {path}:{number}. Rename the "
                "keys."
            )
        yield row


def _tokenize(row: Mapping[str, Any], tokenizer: Any) -> Sample:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if "messages" in row:
        return _tokenize_chat(row["messages"], tokenizer)
    if "text" in row:
        ids = [*tokenizer(row["text"]).input_ids, *end]
        return ids, [IGNORED, *ids[1:]]  # with packing, the sample before does not predict it
    prompt = tokenizer(row["prompt"]).input_ids
    answer = [*tokenizer(row["completion"], add_special_tokens=False).input_ids, *end]
    return [*prompt, *answer], [IGNORED] * len(prompt) + answer


def _tokenize_chat(messages: Sequence[Mapping[str, str]], tokenizer: Any) -> Sample:
    """Only what the assistant says is learned."""
    ids, labels = list[int](), list[int]()
    for number, message in enumerate(messages, start=1):
        for count, is_prompt in ((number - 1, True), (number, False)) if message["role"] == "assistant" else ():
            longer = tokenizer.apply_chat_template(
                messages[:count], add_generation_prompt=is_prompt, tokenize=True, return_dict=False
            )
            if longer[: len(ids)] != ids:
                raise ValueError(
                    "The chat template must render a conversation as the beginning of a longer one. Found another "
                    f"beginning at message {number}. Write the answers as prompt and completion instead."
                )
            labels += [IGNORED] * (len(longer) - len(ids)) if is_prompt else longer[len(ids) :]
            ids = longer
    return ids, labels


def _windows(samples: Sequence[Sample], length: int) -> Iterator[Sample]:
    ids, labels = ([token for sample in samples for token in sample[part]] for part in (0, 1))
    for start in range(0, len(ids) - length + 1, length):
        yield ids[start : start + length], labels[start : start + length]


@final
class Samples(Dataset[Sample]):
    """Samples, and as many without labels as divide them into batches: those count for nothing.

    Args:
        samples: What `read` returned, or a part of it.
        batch_size: What their number becomes a multiple of.
    """

    def __init__(self, samples: Sequence[Sample], batch_size: int = 1) -> None:
        self._samples = [*samples, *[([0], [IGNORED])] * (-len(samples) % batch_size)]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]


@final
class Collator:
    """Makes a batch: samples padded on the right.

    Args:
        pad_token: What they are padded with; attention and labels leave it out.
        multiple: What the length of a batch is a multiple of.
    """

    def __init__(self, pad_token: int, multiple: int) -> None:
        self._pad_token, self._multiple = pad_token, multiple

    def __call__(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Pad samples to the length of the longest, rounded up."""
        length = max(len(ids) for ids, _ in samples)
        length += -length % self._multiple
        columns = {
            "input_ids": [ids + [self._pad_token] * (length - len(ids)) for ids, _ in samples],
            "attention_mask": [[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in samples],
            "labels": [labels + [IGNORED] * (length - len(labels)) for _, labels in samples],
        }
        return {name: torch.tensor(rows) for name, rows in columns.items()}
