"""JSONL files as tokens: one text, prompt with completion, or chat a line; padded, or packed into windows."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch.utils.data import Dataset

from colossal.errors import ConfigError

IGNORED = -100
"""A label that does not count."""

Sample = tuple[list[int], list[int]]
"""Tokens, and labels of the same length."""


def read(path: Path, tokenizer: Any, length: int, *, pack: bool) -> list[Sample]:
    """Read JSONL files.

    Args:
        path: The file, or a directory of files that end in ``.jsonl``. Each line has ``text``; ``prompt`` and
            ``completion``; or ``messages``, a list of role and content.
        tokenizer: That of the model.
        length: Tokens of a sample at most; with `pack`, of every sample.
        pack: Join all samples, and cut the result into windows.

    Returns:
        The samples. Those whose labels are all cut off, as where the answer begins beyond `length`, have none to learn.

    Raises:
        ConfigError: A line is not as described above, or the chat template does not take it.
    """
    samples = list[Sample]()
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        for where, row in _rows(file):
            try:
                samples += _tokenize(row, tokenizer)
            except Exception as error:  # a chat template raises what it likes
                raise ConfigError(f"{error}\nFound at {where}.") from error
    # nothing predicts the first token of a sample: in a window it would be the end of the sample before
    samples = [(ids, [IGNORED, *labels[1:]][: len(ids)]) for ids, labels in samples]
    if pack:
        samples = list(_windows(samples, length))
    return [(ids[:length], labels[:length]) for ids, labels in samples]


def num_labels(labels: Sequence[int]) -> int:
    """Count the labels of a sample that are learned; the first is predicted from nothing."""
    return sum(label != IGNORED for label in labels[1:])


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    # not splitlines() of the text, which also ends lines at characters that JSON has in strings
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"A JSONL file has a JSON object in each line, in UTF-8. Found {error} in {where}. Repair this line, "
                "or convert the file: the README shows how for CSV, a JSON array and plain text."
            ) from None
        _check_row(row, where)
        yield where, row


def _check_row(row: Any, where: str) -> None:
    keys = row.keys() if isinstance(row, dict) else frozenset[str]()
    forms = [form for form in ({"text"}, {"prompt", "completion"}, {"messages"}) if form <= keys]
    if len(forms) != 1:
        found = f"the keys {', '.join(keys)}" if isinstance(row, dict) else type(row).__name__
        raise ConfigError(
            f"A line has one of these: text; prompt and completion; messages. Found {found} in {where}. Rename or "
            "remove keys, or convert the file as the README shows."
        )
    texts = [row[each] for each in ("text", "prompt", "completion") if each in forms[0]]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"Text, prompt and completion are strings. Found {texts} in {where}. Leave the line out, or write a string."
        )
    messages = row["messages"] if "messages" in forms[0] else []
    if not isinstance(messages, list) or not all(
        isinstance(each, dict) and {"role", "content"} <= each.keys() for each in messages
    ):
        raise ConfigError(f"Each of the messages has role and content. Found others in {where}. Rename their keys.")
    roles = {message["role"]: None for message in messages}
    if "assistant" not in roles and not roles.keys() <= {"system", "developer", "user", "tool"}:
        raise ConfigError(
            f"What messages of the role assistant say is learned. Found the roles {', '.join(map(str, roles))} in "
            f"{where}. Rename them: user asks, and assistant answers."
        )
    for content, calls in ((message["content"], message.get("tool_calls")) for message in messages):
        if not isinstance(content, str) and not (content is None and calls):
            raise ConfigError(
                f"The content of a message is a string, which the chat template writes as it is. Found {content!r} in "
                f"{where}. Write its text as one string, or leave the line out."
            )


def _tokenize(row: Mapping[str, Any], tokenizer: Any) -> list[Sample]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if "messages" in row:
        return _tokenize_chat(row["messages"], tokenizer)
    if "text" in row:
        ids = tokenizer(row["text"], verbose=False).input_ids  # long ones are cut later
        ids = ids if end and ids[-1:] == end else [*ids, *end]  # some tokenizers have added it
        return [(ids, ids)]
    prompt, alone = (
        tokenizer(row["prompt"], add_special_tokens=each, verbose=False).input_ids for each in (True, False)
    )
    if end and prompt[-1:] == end != alone[-1:]:
        del prompt[-1]  # the tokenizer has ended what goes on
    answer = [*tokenizer(row["completion"], add_special_tokens=False, verbose=False).input_ids, *end]
    return [([*prompt, *answer], [IGNORED] * len(prompt) + answer)]


def _tokenize_chat(messages: Sequence[Mapping[str, str]], tokenizer: Any) -> list[Sample]:
    """Only what the assistant says is learned.

    Some templates render an answer otherwise once other messages follow, as that of Qwen3 leaves out its reasoning.
    Such a conversation becomes several samples, which end with an answer as the model has to write it.
    """
    if not tokenizer.chat_template or not tokenizer.is_fast:
        raise ConfigError(
            "Messages need a tokenizer of the library tokenizers with a chat template. Found "
            f"{type(tokenizer).__name__}{'' if tokenizer.chat_template else ' without a template'}. Set "
            "tokenizer.chat_template and save it by save_pretrained, or write prompt and completion instead."
        )
    samples, text, answers = list[Sample](), "", list[range]()
    for number in (number for number, message in enumerate(messages) if message["role"] == "assistant"):
        before, after = (
            tokenizer.apply_chat_template(messages[:count], add_generation_prompt=is_prompt, tokenize=False)
            if count
            else ""
            for count, is_prompt in ((number, True), (number + 1, False))
        )
        if not after.startswith(before):
            raise ConfigError(
                "The chat template must render an answer after the prompt that it asks for it by. Found another "
                f"beginning at message {number + 1}. Write the answers as prompt and completion instead."
            )
        if not before.startswith(text):
            samples.append(_label(text, answers, tokenizer))
            answers = []
        text = after
        answers.append(range(len(before), len(after)))
    return [*samples, _label(text, answers, tokenizer)]


def _label(text: str, answers: Sequence[range], tokenizer: Any) -> Sample:
    """Tokenize a text at once, as a token may begin before an answer and end in it: such a token is learned."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spans = encoded.offset_mapping
    learned = [any(start < each.stop and each.start < stop for each in answers) for start, stop in spans]
    ids = encoded.input_ids
    return ids, [token if is_learned else IGNORED for token, is_learned in zip(ids, learned, strict=True)]


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
