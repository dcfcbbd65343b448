"""Logits of which a rank has some vocabulary entries, or tokens: what would take them for all is refused by name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, final

import torch
from torch import nn

from colossal._src.comm import end_graphs_in
from colossal.errors import UnsupportedError

end_graphs_in(__name__)  # a compiled model returns marked logits too

# What needs all entries. Those that return a tensor without the dimension of the vocabulary need not be listed.
_NEEDS_ALL_ENTRIES = (
    *("argmax", "argmin", "argsort", "cummax", "cummin", "cumprod", "cumsum", "kthvalue", "msort", "sort", "topk"),
    *("binary_cross_entropy_with_logits", "cross_entropy", "kl_div", "multi_margin_loss", "nll_loss"),
    *("gumbel_softmax", "log_softmax", "logcumsumexp", "logsumexp", "normalize", "softmax", "softmin"),
    *("special_log_softmax", "special_softmax", "multinomial", "numpy", "tolist", "__array__"),
)
_FORWARD_OF_FAMILIES = "transformers."  # which use logits for their loss_function only
_ABOUT_OTHERS = ("to", "type_as", "as_subclass", "backward")  # of a tensor, which the logits are given to


@final
class ShardedLogits(torch.Tensor):
    """The logits of some vocabulary entries or tokens, and what is computed of each element, such as casts."""

    entries: tuple[int, int]  # the number of vocabulary entries or tokens here, and of all
    of_tokens: bool  # which of the two

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch on logits, and see that it does without the entries of other ranks."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        logits = next(_logits_in((*args, *kwargs.values())))
        if name in _NEEDS_ALL_ENTRIES:
            logits.refuse(name)
        try:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (as torch does itself)
                result = func(*args, **kwargs)
        except RuntimeError as error:  # such as a view of the shape that all entries would have
            error.add_note(logits.message(name))
            raise
        if name.startswith("new_") or (name in _ABOUT_OTHERS and (args[0] is not logits or name == "as_subclass")):
            return result
        if isinstance(result, tuple | list) and any(isinstance(each, torch.Tensor) for each in result):
            return type(result)([logits.mark(each, name) for each in result])
        return logits.mark(result, name)

    def mark(self, result: Any, name: str) -> Any:
        """Mark a result that has an element for each entry; refuse one that has a mean, a maximum or one entry only."""
        if type(result) is not torch.Tensor or result.dtype == torch.bool:
            return result
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (as above)
            own, numel = self.numel(), result.numel()
        if self.entries[0] in result.shape or numel == own:
            return mark_logits(result, *self.entries, of_tokens=self.of_tokens)
        return self.refuse(name) if numel < own else result  # logits of several ranks, put together

    def refuse(self, name: str) -> NoReturn:
        """Say that a function needs other entries too."""
        raise UnsupportedError(self.message(name))

    def message(self, name: str) -> str:
        """Say what a function needs, and what to do."""
        here, total = self.entries
        if self.of_tokens:
            return (
                f"{name} needs the logits of all {total} tokens of a sequence. Found those of {here}: ranks shard "
                "sequences, and compute the loss of `labels` from the shards. Pass parallel_output=False to the plugin "
                "or to ShardConfig, which gathers them."
            )
        return (
            f"{name} needs the logits of all {total} vocabulary entries. Found those of {here}: tensor-parallel ranks "
            "shard them, and compute the loss of `labels` from the shards. Pass parallel_output=False to the plugin or "
            "to ShardConfig, which gathers them, or compute a loss by colossal.nn.VocabParallelCrossEntropyLoss."
        )


def mark_logits(logits: torch.Tensor, here: int, total: int, *, of_tokens: bool = False) -> ShardedLogits:
    """Note that logits are those of some vocabulary entries, or tokens; the memory stays the same."""
    marked = logits.as_subclass(ShardedLogits)
    marked.entries, marked.of_tokens = (here, total), of_tokens
    return marked


def mark_outputs(model: nn.Module) -> None:
    """Mark the logits that a model returns, whose head is sharded over the vocabulary."""
    head = _head_of(model)
    # the layer itself knows its full size also before it has values
    total, here = int(head.out_features), head.weight.shape[0]
    _mark_outputs(model, here, lambda logits: mark_logits(logits, here, total))


def mark_tokens(model: nn.Module, num_ranks: int) -> None:
    """Mark the logits that a model returns, whose sequences are sharded; its head has the full vocabulary."""
    head = _head_of(model)
    if getattr(head, "weight", None) is not None:  # else another stage of a pipeline has it

        def mark(logits: torch.Tensor) -> ShardedLogits:
            here = logits.shape[1]
            return mark_logits(logits, here, here * num_ranks, of_tokens=True)

        _mark_outputs(model, int(head.weight.shape[0]), mark)


def _head_of(model: Any) -> Any:
    head = model.get_output_embeddings()
    return getattr(head, "base_layer", head)


def _mark_outputs(model: nn.Module, num_entries: int, mark: Callable[[torch.Tensor], ShardedLogits]) -> None:
    if not getattr(model.forward, "__module__", "").startswith(_FORWARD_OF_FAMILIES):
        # a method of the program may use logits, as for a loss of its own, before it returns them
        _head_of(model).register_forward_hook(lambda _head, _args, logits: mark(logits))
    model.register_forward_hook(partial(_mark_logits_in, num_entries, mark))


def _mark_logits_in(
    num_entries: int, mark: Callable[[torch.Tensor], ShardedLogits], _model: nn.Module, _args: Any, outputs: Any
) -> Any:
    """Forward hook: mark the logits of what a model returns."""
    if isinstance(outputs, tuple):
        chosen = next((each for each in outputs if _is_of(each, num_entries)), None)
        return tuple(mark(each) if each is chosen else each for each in outputs)
    logits: Any = getattr(outputs, "logits", None)
    if _is_of(logits, num_entries):
        outputs.logits = mark(logits)
    return outputs


def _is_of(logits: Any, here: int) -> bool:
    """Whether these are logits of this rank's entries; `generate` gathers those of all."""
    return isinstance(logits, torch.Tensor) and logits.dim() > 1 and logits.shape[-1] == here


def _logits_in(values: Any) -> Iterator[ShardedLogits]:
    for value in values:
        if isinstance(value, ShardedLogits):
            yield value
        elif isinstance(value, tuple | list):
            yield from _logits_in(value)
