"""Passes of a model on the meta device, where tensors have shapes but no elements, and what they would keep."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeGuard, final
from weakref import WeakSet, finalize

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colossal._src.interface import OptimizerWrapper
from colossal._src.pipeline import Action, Stage, StageOutput

_aten = torch.ops.aten


class PassMemory(NamedTuple):
    """One micro-batch that has passed a stage, forward and backward."""

    activation_bytes: int  # what the stage keeps between the two
    working_bytes: int  # temporary memory in either of them
    input_bytes: int  # the hidden states that came from the stage before; as many bytes go back
    output_bytes: int  # those for the next stage


@contextmanager
def dry_run() -> Iterator["LiveBytes"]:
    """Count what is allocated on the meta device inside.

    What only values could decide is taken to be as in training at its best: attention is computed by a kernel that
    keeps no matrix of scores, and inputs are not padded nor packed.
    """
    slow = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = partial(_flash_attention, slow)
    try:
        with LiveBytes() as live, _UnpaddedInputs():
            yield live
    finally:
        functional.scaled_dot_product_attention = slow


@final
class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages on the meta device that operations have made, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: WeakSet[torch.UntypedStorage] = WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if _is_meta(leaf)}
        for leaf in tree_leaves(results):
            if _is_meta(leaf):
                self._add(leaf.untyped_storage(), given)
        return results

    def _add(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        # views and operations in place make no memory
        if id(storage) in given or storage in self._known:
            return
        self._known.add(storage)
        finalize(storage, self._drop, storage.nbytes()).atexit = False
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)

    def _drop(self, num_bytes: int) -> None:
        self.now -= num_bytes


def run_pass(
    stage: Stage,
    carry: StageOutput | None,
    batch: Any,
    criterion: Callable[[Any, Any], torch.Tensor],
    optimizer: OptimizerWrapper,
    live: LiveBytes,
    forget: Callable[[], None],
) -> PassMemory:
    """Run a micro-batch through a stage, forward and backward, each of which forgets what it has kept for itself."""
    entered = [each.detach() for each in tree_leaves(carry) if each is not None]
    for each in entered:
        each.requires_grad_(each.is_floating_point())
    before, live.most = live.now, live.now
    outputs = stage(None if carry is None else entered[0] if len(entered) == 1 else tuple(entered), batch)
    left = [criterion(outputs, batch)] if stage.is_last else tree_leaves(outputs)
    del outputs
    forget()
    kept = live.now - before
    output_bytes = 0 if stage.is_last else sum(each.nbytes for each in left)
    if stage.is_last:
        optimizer.backward(left[0])
    else:
        left = [each for each in left if each.requires_grad]
        optimizer.backward_by_grad(left, [torch.empty_like(each) for each in left])
    forget()
    input_bytes = sum(each.nbytes for each in entered)
    return PassMemory(kept + input_bytes, live.most - before - kept, input_bytes, output_bytes)


def peak_activations(order: Sequence[Action], kept: Mapping[int, int]) -> tuple[int, int]:
    """Find out how much a rank keeps in a step."""
    now, passes, most, most_passes = 0, 0, 0, 0
    for kind, stage, _ in order:
        if kind == "F":
            now, passes = now + kept[stage], passes + 1
            most, most_passes = max(most, now), max(most_passes, passes)
        elif kind in ("B", "W"):
            now, passes = now - kept[stage], passes - 1
    return most, most_passes


@final
class _UnpaddedInputs(TorchFunctionMode):
    """Answers checks of models for the simplest inputs, such as masks without padding, with True."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__bool__ and _is_meta(args[0]):
            return True
        return func(*args, **(kwargs or {}))


def _flash_attention(slow: Callable[..., torch.Tensor], *inputs: Any, **options: Any) -> torch.Tensor:
    """Stand in for torch's function, which computes with a matrix of scores on the meta device."""
    query, key, value, *_ = inputs
    if not query.is_meta or query.shape[-1] != value.shape[-1]:
        return slow(*inputs, **options)
    return _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]  # noqa: SLF001 (it has no other name)


def _is_meta(leaf: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and leaf.is_meta
