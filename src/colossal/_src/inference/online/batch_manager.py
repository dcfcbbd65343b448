"""Which queries are generated together, by the rules of the documented OPT service."""

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from colossal.errors import ConfigError


@dataclass(frozen=True)
class SubmitEntry:
    """A query that waits.

    Args:
        uid: What it is called.
        data: Its `input_ids`, `max_tokens`, `top_k`, `top_p` and `temperature`.

    Example:
        >>> from colossal.inference import SubmitEntry
        >>> SubmitEntry("a", {"input_ids": [5, 6], "max_tokens": 8}).uid
        'a'
    """

    uid: Hashable
    data: Mapping[str, Any]


@dataclass(frozen=True)
class TaskEntry:
    """Queries that are generated together, or what was generated for them.

    Args:
        uids: What they are called.
        batch: Their inputs by name, or their outputs, one row of tokens a query.

    Example:
        >>> from colossal.inference import TaskEntry
        >>> TaskEntry(("a",), {"max_tokens": 8}).uids
        ('a',)
    """

    uids: tuple[Hashable, ...]
    batch: Any


class BatchManagerForGeneration:
    """Takes queries from the head of a queue as long as they can be generated together, and splits the results.

    Those that follow the first one join it if they have the same `top_k`, `top_p` and `temperature`, and no more
    `max_tokens`. The first one that does not ends the batch, so that queries are served in the order in which they
    came. Prompts are padded on the left.

    Args:
        max_batch_size: The most queries of a batch.
        pad_token_id: The token before shorter prompts, and after shorter outputs.

    Raises:
        ConfigError: The batch size is below 1.

    Source: the documented OPT service. An `InferenceEngine` needs no such rules: it computes requests of any length
    and parameters together, and admits one when another ends.

    Example:
        >>> from collections import deque
        >>> from colossal.inference import BatchManagerForGeneration, SubmitEntry
        >>> waiting = deque([SubmitEntry(uid, {"input_ids": [5] * uid, "max_tokens": 8}) for uid in (1, 2)])
        >>> task, _ = BatchManagerForGeneration(max_batch_size=16).make_batch(waiting)
        >>> task.batch["input_ids"].tolist()
        [[0, 5], [5, 5]]
    """

    def __init__(self, max_batch_size: int = 1, pad_token_id: int = 0) -> None:
        if max_batch_size < 1:
            raise ConfigError(
                f"max_batch_size is at least 1. Found {max_batch_size}. Pass how many queries a batch has at most."
            )
        self.max_batch_size = max_batch_size
        self.pad_token_id = pad_token_id

    def make_batch(self, queue: deque[SubmitEntry]) -> tuple[TaskEntry, dict[str, Any]]:
        """Take the queries of the next batch from a queue.

        Args:
            queue: What waits, at least one query; those of the batch are removed.

        Returns:
            The inputs: `input_ids` and `attention_mask`, both [queries, longest prompt], the common `top_k`, `top_p`
            and `temperature`, and `max_tokens`, which counts the padded prompt. Then the keywords of `split_batch`.
        """
        head = queue.popleft()
        entries = [head]
        while queue and len(entries) < self.max_batch_size and self._joins(head, queue[0]):
            entries.append(queue.popleft())
        prompts = [list(entry.data["input_ids"]) for entry in entries]
        length = max(map(len, prompts))
        pads = [length - len(prompt) for prompt in prompts]
        rows = [[self.pad_token_id] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]
        inputs = {
            "input_ids": torch.tensor(rows),
            "attention_mask": torch.tensor([[0] * pad + [1] * (length - pad) for pad in pads]),
            "max_tokens": length + head.data["max_tokens"],
            **dict(zip(("top_k", "top_p", "temperature"), _batch_key(head), strict=True)),
        }
        ends = [length + entry.data["max_tokens"] for entry in entries]
        return TaskEntry(tuple(entry.uid for entry in entries), inputs), {"pads": pads, "ends": ends}

    def split_batch(
        self, task: TaskEntry, *, pads: Sequence[int] = (), ends: Sequence[int] = ()
    ) -> Iterator[tuple[Hashable, Any]]:
        """Split the outputs of a batch.

        Args:
            task: A row of tokens for each query: padding, prompt, output.
            pads: Tokens of padding in front, as `make_batch` returns them.
            ends: Tokens of each row with its longest output, as `make_batch` returns them.

        Yields:
            Each query and its tokens, without the padding in front, and not more than it asked for.
        """
        for uid, row, start, end in zip(task.uids, task.batch, pads, ends, strict=True):
            yield uid, row[start:end]

    def _joins(self, head: SubmitEntry, entry: SubmitEntry) -> bool:
        """Whether a query can be generated with the first one of a batch."""
        return _batch_key(entry) == _batch_key(head) and entry.data["max_tokens"] <= head.data["max_tokens"]


def _batch_key(entry: SubmitEntry) -> tuple[Any, ...]:
    return tuple(entry.data.get(name) for name in ("top_k", "top_p", "temperature"))
