"""Loading in two steps, so that several parts of a run are checked before any of them changes."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colossal._src.checkpoint_io.checkpoint_group import CheckpointGroup
from colossal._src.checkpoint_io.index_and_names import MODEL, OLD_OPTIMIZER, OPTIMIZER, full_path, listing
from colossal._src.checkpoint_io.model_state import ModelState
from colossal._src.checkpoint_io.optimizer_state import OptimizerState, optimizer_tree
from colossal._src.checkpoint_io.replica_check import WhatWasRead, refuse_different_files
from colossal._src.checkpoint_io.source import Source
from colossal._src.interface import OptimizerWrapper, unwrap_model
from colossal.errors import CheckpointError

MODEL_KINDS = tuple(MODEL.values())
OPTIMIZER_KINDS = (OPTIMIZER, OLD_OPTIMIZER)

_BY_GROUP = ("lrs", "_lr", "lambdas", "momentums")
"""How names of lists end that have one value for each parameter group."""

Load = Callable[[], None]
"""Loads what was checked."""


@contextmanager
def opened_model(
    writers: CheckpointGroup,
    model: nn.Module,
    checkpoint: str | Path,
    *,
    strict: bool = True,
    mmap: bool = True,
    num_threads: int = 1,
    member: str | None = None,
) -> Generator[Load]:
    """Open and check the files of a model."""
    state = writers.read(lambda: ModelState(unwrap_model(model), writers.rank))
    with writers.read(lambda: Source.find(full_path(checkpoint), MODEL_KINDS, mmap, member)) as source:
        writers.read(lambda: state.check(source.items, strict, checkpoint))

        def fill() -> WhatWasRead:
            source.each_file(state.fill, num_threads)
            entries = state.content(writers.ranks, for_safetensors=False).entries
            return WhatWasRead.of(source.sample(), source.items.keys(), entries, writers.rank)

        def load() -> None:
            refuse_different_files(writers.gather(fill), writers.ranks, checkpoint)
            state.log_experts(source.items, checkpoint)

        yield load


@contextmanager
def opened_optimizer(
    writers: CheckpointGroup,
    optimizer: Optimizer | OptimizerWrapper,
    checkpoint: str | Path,
    *,
    mmap: bool = True,
    num_threads: int = 1,
    member: str | None = None,
) -> Generator[Load]:
    """Open and check the files of an optimizer."""
    state = OptimizerState(optimizer, writers.rank)
    with writers.read(lambda: Source.find(full_path(checkpoint), OPTIMIZER_KINDS, mmap, member)) as source:
        restore = writers.read(lambda: state.prepare(optimizer_tree(source), checkpoint))
        yield lambda: writers.read(lambda: restore(num_threads))


def checked_schedule(
    writers: CheckpointGroup, lr_scheduler: LRScheduler, state: Mapping[str, Any], checkpoint: str | Path
) -> Load:
    """Check the saved state of a schedule."""
    writers.read(partial(_check_schedule, lr_scheduler, state, checkpoint))

    # by the rates that the optimizer has when this is called, which it may have loaded as well
    return lambda: writers.read(lambda: lr_scheduler.load_state_dict(_in_order_of_groups(lr_scheduler, state)))


def _check_schedule(lr_scheduler: LRScheduler, state: Mapping[str, Any], path: object) -> None:
    """Raise if a file does not have all that the scheduler's own state has."""
    if missing := {key for key in lr_scheduler.state_dict() if not key.startswith("_")} - set(state):
        raise CheckpointError(
            f"Loading needs a file of a {type(lr_scheduler).__name__}. Found {path} without "
            f"{listing(sorted(missing))}. Build the scheduler that was saved, or pass its file."
        )


def _in_order_of_groups(lr_scheduler: LRScheduler, state: Mapping[str, Any]) -> Any:
    """Return a saved state with its values by group in the order of the optimizer's groups.

    Optimizer states are matched by name, whatever the order of the groups. A schedule knows groups by position alone,
    and each group its initial rate.
    """
    rates = [float(group.get("initial_lr", group["lr"])) for group in lr_scheduler.optimizer.param_groups]
    for saved in _base_rates(state):
        if saved != rates and sorted(saved) == sorted(rates):
            # equal ones are matched in their order
            pairs = zip(_order_of(rates), _order_of(saved), strict=True)
            return _in_order(state, [place for _, place in sorted(pairs)])
    return state


def _order_of(rates: list[float]) -> list[int]:
    return sorted(range(len(rates)), key=rates.__getitem__)


def _base_rates(state: Any) -> Iterator[list[float]]:
    """Find the initial rates of a schedule, and of those that it is made of."""
    if type(state) is list:
        for each in state:
            yield from _base_rates(each)
    elif type(state) is dict:
        if "base_lrs" in state:
            yield [float(rate) for rate in state["base_lrs"]]
        yield from _base_rates(list(state.values()))


def _in_order(state: Any, places: list[int]) -> Any:
    if type(state) is list:
        return [_in_order(each, places) for each in state]
    if type(state) is not dict:
        return state
    return {
        key: [value[place] for place in places]
        if key.endswith(_BY_GROUP) and type(value) is list and len(value) == len(places)
        else _in_order(value, places)
        for key, value in state.items()
    }
