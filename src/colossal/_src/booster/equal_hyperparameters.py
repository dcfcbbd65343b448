"""All ranks step with the same hyperparameters: a schedule of what one rank measures would move replicas apart."""

from collections.abc import Sequence
from functools import partial
from typing import Any, final
from weakref import ref

from colossal._src.booster.cross_rank_check import describe_groups
from colossal._src.cluster import Axis, ParallelMesh
from colossal._src.comm import CallOfAllRanks, equal_text_on_all_ranks, gather_objects
from colossal._src.interface import OptimizerWrapper
from colossal.errors import ConfigError

_INTERVAL = 64


@final
class HyperparameterCheck:
    """Compares the hyperparameters of ranks in steps 1, 2, 4, ... of an optimizer, in each 64th, and in saves.

    [Note: when] A rank whose learning rate has changed cannot ask others that have not noticed anything. So all of them
    ask after the same numbers of steps, which are few, as they wait for the answer.
    """

    def __init__(self, optimizer: OptimizerWrapper, mesh: ParallelMesh, axes: Sequence[Axis]) -> None:
        self._optimizer = ref(optimizer)  # whose list of groups is another one after load_state_dict
        self._axes = [mesh.group(axis) for axis in axes if mesh.size(axis) > 1]
        self._num_steps = 0

    def before_update(self, *_step: Any) -> None:
        """Compare before some of the updates, when gradients are reduced already."""
        self._num_steps += 1
        if self._num_steps % _INTERVAL == 0 or not self._num_steps & (self._num_steps - 1):  # a power of two
            self.compare("step an optimizer equally often")

    def compare(self, purpose: str) -> None:
        """Compare what the groups have besides parameters.

        Communication: all_reduce, all axes, 16 bytes; not counted.
        """
        optimizer = self._optimizer()
        own = dict(describe_groups(() if optimizer is None else optimizer.param_groups))
        with CallOfAllRanks(purpose):
            is_equal = equal_text_on_all_ranks(repr(own), self._axes)
        if is_equal:
            return
        found = gather_objects(own, self._axes, "compares hyperparameters")
        names = dict.fromkeys(name for each in found for name in each)
        name = next(name for name in names if len({each.get(name) for each in found}) > 1)
        values = ", ".join(str(each.get(name, "none")) for each in found)
        raise ConfigError(
            f"All ranks step with the same hyperparameters. Found that {name} differs between ranks: {values}. "
            "Reduce what a schedule is given, such as the loss of ReduceLROnPlateau, over ranks first, by "
            "dist.all_reduce(loss) and loss / dist.get_world_size(), or set the same values on all ranks."
        )


def watch_hyperparameters(optimizer: OptimizerWrapper, mesh: ParallelMesh, axes: Sequence[Axis]) -> None:
    """Compare the hyperparameters of a boosted optimizer on all ranks that update the same model."""
    if any(mesh.size(axis) > 1 for axis in axes):
        check = HyperparameterCheck(optimizer, mesh, axes)
        optimizer.register_step_pre_hook(check.before_update)
        optimizer.register_save_check(partial(check.compare, "save an optimizer"))
