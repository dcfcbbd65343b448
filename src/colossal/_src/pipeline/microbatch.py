"""Splits a batch into micro-batches, merges their outputs, and refuses those whose mean loss does not exist."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, final

import torch

from colossal.errors import ConfigError

_IGNORED_LABEL = -100  # of torch.nn.functional.cross_entropy, and so of transformers

_NUM_LABELS = "num_items_in_batch"  # the keyword of models of transformers


@final
@dataclass(frozen=True)
class Microbatching:
    """How many micro-batches a batch becomes; one of the two is given."""

    num_microbatches: int | None = None  # their number
    microbatch_size: int | None = None  # samples of each

    def __post_init__(self) -> None:
        given = [value for value in (self.num_microbatches, self.microbatch_size) if value is not None]
        if len(given) != 1 or given[0] < 1:
            raise ConfigError(
                "A pipeline takes a batch in parts: num_microbatches says how many, or microbatch_size how large; one "
                f"of them. Found num_microbatches={self.num_microbatches}, microbatch_size={self.microbatch_size}. "
                "Pass one, at least 1."
            )

    def number_of(self, batch_size: int) -> int:
        """Count the micro-batches of a batch."""
        parts = self.num_microbatches or self.microbatch_size or 1
        if batch_size % parts or not batch_size:
            name = "num_microbatches" if self.num_microbatches else "microbatch_size"
            raise ConfigError(
                f"A batch divides by {name}, so that all micro-batches weigh the same. Found {batch_size} samples and "
                f"{name}={parts}. Pass a {name} that divides the batch, or leave the last batch out by drop_last=True."
            )
        return self.num_microbatches or batch_size // parts


def split_batch(batch: Any, microbatching: Microbatching) -> list[Any]:
    """Split a batch into micro-batches."""
    sizes = {len(tensor) for tensor in tensors_in(batch) if tensor.dim()}
    if len(sizes) != 1:
        raise ConfigError(
            "All tensors of a batch have as many samples, in their first dimension. Found "
            f"{sorted(sizes) or 'no tensor'} in a {type(batch).__name__}. Make the batch of tensors of one length."
        )
    number = microbatching.number_of(sizes.pop())
    if number > 1 and isinstance(batch, Mapping) and batch.get(_NUM_LABELS) is not None:
        raise ConfigError(
            "The loss of a batch is the mean of those of its micro-batches. Found num_items_in_batch, by which a model "
            f"of transformers divides each sum, so that the loss would be {number} times too small. Leave it out, and "
            "weight the loss by booster.weight_by_tokens, which gives all labels of a step the same weight."
        )
    return [map_tensors(batch, lambda tensor, index=index: _part(tensor, number, index)) for index in range(number)]


def merge_outputs(parts: Sequence[Any]) -> Any:
    """Merge the outputs of micro-batches."""
    flat = [list(tensors_in(part)) for part in parts]
    # Numbers, such as losses, become their mean, as all micro-batches weigh the same.
    joined = iter([torch.cat(each) if each[0].dim() else torch.stack(each).mean() for each in zip(*flat, strict=True)])
    return map_tensors(parts[0], lambda _: next(joined))


def lacks_labels(batch: Any, number: int) -> list[bool]:
    """Tell of each of a number of micro-batches whether none of its labels counts: one read, however many."""
    found = [_are_ignored(tensor, number) for tensor in tensors_in(batch) if _may_be_labels(tensor)]
    return [any(each) for each in zip(*found, strict=True)] or [False] * number


def refuse_loss_without_labels(loss: torch.Tensor) -> None:
    """Refuse the loss of a batch, some of which lacks labels, if it is a mean over them."""
    if loss.isnan():
        raise ConfigError(
            "A mean loss over labels needs one that is not -100, in each micro-batch and on each rank. Found a "
            "micro-batch without, and a loss that is NaN. Weight the loss by booster.weight_by_tokens, which gives all "
            "labels of a step the same weight, or leave such samples out."
        )


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Go through the tensors of a batch."""
    if isinstance(tree, torch.Tensor):
        yield tree
    for child in _children(tree):
        yield from tensors_in(child)


def map_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change the tensors of a batch."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        other = {key: map_tensors(value, change) for key, value in tree.items()}
        return type(tree)(**other) if is_dataclass(tree) else type(tree)(other)  # pyright: ignore[reportCallIssue]
    if is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in fields(tree) if field.init]
        return replace(tree, **{name: map_tensors(getattr(tree, name), change) for name in names})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(child, change) for child in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(child, change) for child in tree)
    return tree


def _may_be_labels(tensor: torch.Tensor) -> bool:
    # Those on a device are not read, as the host would wait for it; a loader has them on the host.
    return tensor.device.type == "cpu" and not tensor.is_floating_point() and bool(tensor.dim())


def _are_ignored(labels: torch.Tensor, number: int) -> list[bool]:
    values: Any = labels.numpy()  # whose operations take half the time
    predicted = values[:, 1:] if values.ndim > 1 else values  # nothing predicts the first of a causal model
    parts = (predicted == _IGNORED_LABEL).reshape(number, predicted.size // number)
    return parts.all(1).tolist()


def _children(tree: Any) -> Sequence[Any]:
    if isinstance(tree, Mapping):
        return list(tree.values())
    if is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, field.name) for field in fields(tree) if field.init]
    return tree if isinstance(tree, (tuple, list)) else ()


def _part(tensor: torch.Tensor, number: int, index: int) -> torch.Tensor:
    return tensor.chunk(number)[index] if tensor.dim() else tensor
