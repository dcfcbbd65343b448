"""A directory of complete training states, one for each saved step, from which a run resumes."""

import ctypes
import os
import random
import re
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colossal._src.checkpoint_io.api import CheckpointIO
from colossal._src.checkpoint_io.index_and_names import full_path, listing
from colossal._src.checkpoint_io.save_queue import wait_for_saves
from colossal._src.checkpoint_io.staging import sync
from colossal._src.cluster import AXES
from colossal._src.comm import RandomStreams, draw_number, stream_seed
from colossal._src.interface import OptimizerWrapper, random_streams_of
from colossal.accelerator import get_accelerator
from colossal.errors import CheckpointError, ConfigError
from colossal.logging import get_dist_logger

_NAME = r"step-(\d{8,})"
_MODEL, _OPTIMIZER, _SCHEDULE, _PROGRESS = "model", "optimizer", "lr_scheduler", "progress"
_DATA = "dataloader"
_STREAMS, _DP = "streams", AXES.index("dp")
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@final
class CheckpointManager:
    """The training states under a directory.

    Each is a directory of its own, ``step-00000100``, that appears by one rename when all of it is on the disk.
    """

    def __init__(self, root: str | Path, io: CheckpointIO) -> None:
        self._root, self._io = full_path(root), io

    def save(
        self,
        model: nn.Module,
        optimizer: Optimizer | OptimizerWrapper | None,
        lr_scheduler: LRScheduler | None,
        step: int,
        keep: int,
        use_async: bool = False,
        dataloader: Any = None,
    ) -> None:
        """Save the state after a step, and delete the oldest ones."""
        if not hasattr(step, "__index__") or step < 0 or keep < 1:
            raise ConfigError(
                "A step is an integer of at least 0, and at least 1 state is kept. Found "
                f"step={step}, keep={keep}. Count steps from 0, as int(step); the default is keep=2."
            )
        step = index(step)
        root = full_path(self._root, use_async)
        clear = partial(_remove_temporary, root)
        self._io.after(clear, use_async)
        try:
            temporary = root / f".step-{step:08d}.tmp"
            data = {} if dataloader is None else {_DATA: dataloader.state_dict()}
            self._save(temporary, data | {"step": step}, model, optimizer, lr_scheduler, use_async)
            self._io.after(partial(_commit, root, temporary, step, keep), use_async)
        finally:
            self._io.after(clear, use_async, always=True)

    def _save(
        self, temporary: Path, progress: Any, model: nn.Module, optimizer: Any, lr_scheduler: Any, use_async: bool
    ) -> None:
        io = self._io
        io.save_model(model, temporary / _MODEL, shard=True, use_safetensors=True, use_async=use_async)
        if optimizer is not None:
            io.save_optimizer(optimizer, temporary / _OPTIMIZER, shard=True, use_async=use_async)
        if lr_scheduler is not None:
            io.save_plain(lambda: lr_scheduler.state_dict(), temporary / _SCHEDULE, use_async)  # noqa: PLW0108
        # now: when a background save comes to it, training has drawn more numbers
        randoms = io.writers.gather(partial(random_state, random_streams_of(model)))
        progress |= {"world_size": len(io.writers.ranks), "random": randoms}
        io.save_plain(lambda: progress, temporary / _PROGRESS, use_async)

    def load(
        self,
        model: nn.Module,
        optimizer: Optimizer | OptimizerWrapper | None,
        lr_scheduler: LRScheduler | None,
        step: int | None = None,
        dataloader: Any = None,
    ) -> int:
        """Load a state, and let the generators of random numbers go on from it."""
        self._io.synchronize()
        there = self._io.writers.gather(lambda: _steps(self._root))[0]
        if not there or (step is not None and step not in there):
            wanted = "" if step is None else f" with step {step} among them"
            raise CheckpointError(
                f"Loading needs states that were saved{wanted}. Found {listing(there) or 'none'} in {self._root}. "
                "Check the path, or start from scratch: latest_step returns None if there is nothing to load."
            )
        chosen = there[-1] if step is None else step
        try:
            return self._load(_path(self._root, chosen), model, optimizer, lr_scheduler, dataloader)
        except CheckpointError as error:
            earlier = [each for each in there if each < chosen]
            if not earlier:
                raise
            advice = f"An earlier state is there: pass step={earlier[-1]} to load it, or delete"
            raise CheckpointError(f"{error} {advice} {_path(self._root, chosen)}.") from error

    @property
    def latest(self) -> int | None:
        """The latest step whose state is there, after saves in the background; None if there is none."""
        wait_for_saves()
        there = self._io.writers.gather(lambda: _steps(self._root))[0]
        return there[-1] if there else None

    def _load(self, path: Path, model: nn.Module, optimizer: Any, lr_scheduler: Any, dataloader: Any) -> int:
        from colossal._src.checkpoint_io.loading import checked_schedule, opened_model, opened_optimizer

        io = self._io
        progress = io.load_plain(path / _PROGRESS)
        if dataloader is not None and _DATA not in progress:
            raise CheckpointError(
                f"Loading a data loader needs its position. Found none in {path}. Pass dataloader to booster.save too, "
                "or leave it out here, and skip what has been read."
            )
        with ExitStack() as opened:
            # all of them are checked before any is loaded: a run that starts from scratch instead must find itself as
            # it was
            loads = [opened.enter_context(opened_model(io.writers, model, path / _MODEL))]
            if optimizer is not None:
                loads.append(opened.enter_context(opened_optimizer(io.writers, optimizer, path / _OPTIMIZER)))
            if lr_scheduler is not None:
                state = io.load_plain(path / _SCHEDULE)
                loads.append(checked_schedule(io.writers, lr_scheduler, state, path / _SCHEDULE))
            if dataloader is not None:
                dataloader.check_state_dict(progress[_DATA])
            for load in loads:
                load()
        if dataloader is not None:
            dataloader.load_state_dict(progress[_DATA])
        if optimizer is not None:  # the run goes on, and is not only measured
            is_saved = {"lr_scheduler": (path / _SCHEDULE).exists(), "dataloader": _DATA in progress}
            given = {"lr_scheduler": lr_scheduler, "dataloader": dataloader}
            _warn_of_left(path, [name for name, value in given.items() if value is None and is_saved[name]])
        restore_random_state(progress["random"], io.writers.ranks.index(io.writers.rank), random_streams_of(model))
        return progress["step"]


def _warn_of_left(path: Path, left: Sequence[str]) -> None:
    if left:
        get_dist_logger().warning(
            f"A run that resumes loads what it saved. Found a state of {' and '.join(left)} in {path}, and none passed "
            "to booster.load: what is not loaded begins anew. Pass it, unless that is meant.",
            ranks=[0],
        )


def _path(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def _steps(root: Path) -> list[int]:
    names = [entry.name for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(_NAME, name)))


def _remove_temporary(root: Path) -> None:
    """Delete what a process that was killed left."""
    for left in root.glob(".step-*.tmp") if root.is_dir() else ():
        shutil.rmtree(left)


def _commit(root: Path, temporary: Path, step: int, keep: int) -> None:
    """Put a state in place, and delete the oldest ones: never the new one, whatever its number."""
    target = _path(root, step)
    if target.exists():
        _exchange(temporary, target)
        shutil.rmtree(temporary)
    else:
        temporary.rename(target)
    # the new state must be on the disk before an old one is deleted
    sync(root)
    others = [each for each in _steps(root) if each != step]
    if others and others[-1] > step:
        get_dist_logger().warning(
            "booster.load takes the state of the highest step, unless it is passed another. Found that step "
            f"{step} was saved to {root}, which has {listing([each for each in others if each > step])}, as after "
            "going back to an earlier step. Delete those, pass step, or save to another directory."
        )
    for old in others[: max(0, len(others) + 1 - keep)]:
        # renamed first: a crash in the middle must not leave half a state under a name that `load` takes
        gone = root / f".step-{old:08d}.tmp"
        _path(root, old).rename(gone)
        shutil.rmtree(gone)


def _exchange(first: Path, second: Path) -> None:
    """Swap two directories in one step of the file system, so that there is one under the second name at any time."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(first), os.fsencode(second)
    if rename is not None and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return
    spare = first.with_name(f"{first.name[: -len('.tmp')]}.old.tmp")
    second.rename(spare)  # a file system that cannot swap: for a moment only the earlier steps are there
    first.rename(second)
    spare.rename(first)


def random_state(streams: RandomStreams | None = None) -> dict[str, Any]:
    """Collect the states of the generators of Python, NumPy, torch and, where there is one, of the accelerator.

    With them where the streams of a model are, and the place in the mesh of the rank whose generators these are.
    """
    version, words, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - what transforms draw from
    state = {
        "python": [version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss],
        "numpy": {
            **numpy,
            "state": {**numpy["state"], "key": torch.from_numpy(numpy["state"]["key"].astype(np.int64))},
        },
        "torch": torch.get_rng_state(),
    }
    accelerator = get_accelerator()
    of_device = accelerator.get_rng_state()
    if streams is not None:
        state[_STREAMS] = streams.state_dict()
    return state | ({} if of_device is None else {accelerator.name: of_device})


def restore_random_state(states: list[dict[str, Any]], number: int, streams: RandomStreams | None = None) -> None:
    """Let the generators go on: on a mesh of the same sizes all of them, on another one those of each replica.

    Ranks of one replica see the same samples, and draw the same numbers for them. A replica that had no counterpart
    begins a stream of its own, drawn from that of another and from its place.
    """
    state, new_replica = _counterpart(states, number, streams)
    if streams is not None:
        streams.load_state_dict(state.get(_STREAMS, {}))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    numpy = state["numpy"]
    key = numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    accelerator = get_accelerator()
    if accelerator.name in state:
        accelerator.set_rng_state(state[accelerator.name])
    if new_replica is not None:
        _branch_off(new_replica)


def _counterpart(
    states: list[dict[str, Any]], number: int, streams: RandomStreams | None
) -> tuple[dict[str, Any], int | None]:
    """Find the state that a rank goes on from, and which replica it is of if there was none."""
    saved = [state.get(_STREAMS) for state in states]
    if streams is not None:
        for state, each in zip(states, saved, strict=True):
            if each is not None and (each["sizes"], each["place"]) == (streams.sizes, streams.place):
                return state, None
    # Without a mesh, each process is a replica.
    replicas = [place if each is None else each["place"][_DP] for place, each in enumerate(saved)]
    replica, there = number if streams is None else streams.place[_DP], sorted(set(replicas))
    state = states[replicas.index(there[replica % len(there)])]
    return state, replica if replica >= len(there) else None


def _branch_off(replica: int) -> None:
    seed = stream_seed(draw_number(), replica)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)
