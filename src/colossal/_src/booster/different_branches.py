"""Parameters that tensor-parallel ranks replicate, and that one of them leaves out while others train them."""

from collections.abc import Sequence
from itertools import count

from colossal._src.cluster import ParallelMesh
from colossal._src.comm import equal_on_all_ranks
from colossal._src.interface import ModelWrapper, OptimizerWrapper, unwrap_model
from colossal._src.tensor import grad_of, local_operations, placement_of
from colossal.errors import ConfigError

_FIRST_STEPS = 8
_INTERVAL = 32  # steps, of which an integer has a bit each
_NAMES_SHOWN = 3


def refuse_different_branches(model: ModelWrapper, optimizer: OptimizerWrapper, mesh: ParallelMesh) -> None:
    """Reject steps of ranks that hold the same activations and train different parameters.

    Nothing reduces the gradients of what tensor-parallel ranks replicate, as all of them compute the same: without this
    check the replicas of a module that one rank leaves out would drift apart. Which parameters got a gradient is
    compared in each of the first steps, and then for several steps at once: the host waits for the answer.

    Communication: all_reduce, tp, 16 bytes for each replicated parameter, in steps 1 to 8, 16, and each 32nd; not
    counted.
    """
    named = unwrap_model(model).named_parameters()
    replicated = {each: name for name, each in named if not placement_of(each).shard_groups}
    if not replicated:
        return
    masters, groups, steps = optimizer.masters, [mesh.group("tp")], count(1)
    used: list[list[bool]] = []

    def check() -> None:
        # not the optimizer: it holds this function, and would be freed by the garbage collector only
        with local_operations():
            if masters is None:
                used.append([grad_of(each) is not None for each in replicated])
            else:
                used.append([grad_of(each) is not None or masters.holds_grad(each) for each in replicated])
        step = next(steps)
        if step > _FIRST_STEPS and step != 2 * _FIRST_STEPS and step % _INTERVAL:
            return
        # of each parameter one number, whose bits are the steps since the last comparison
        histories = [sum(bit << at for at, bit in enumerate(bits)) for bits in zip(*used, strict=True)]
        num_steps = len(used)
        used.clear()
        equal = equal_on_all_ranks(histories, groups)
        if not all(equal):
            different = [name for name, same in zip(replicated.values(), equal, strict=True) if not same]
            _refuse(different, num_steps, mesh.global_rank)

    optimizer.register_step_check(check)


def _refuse(names: Sequence[str], num_steps: int, rank: int) -> None:
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    raise ConfigError(
        "Ranks of the tp axis hold the same activations, and train the same parameters in each step. Found that rank "
        f"{rank} and others differ in {'this step' if num_steps == 1 else f'one of the last {num_steps} steps'}: only "
        f"some of them have gradients of {shown}, whose replicas drift apart. Choose a branch by what is equal on all "
        "of them, such as the activations, or torch's random numbers inside of the forward pass, and not by the rank; "
        "or call the module on all ranks, and multiply by 0 what one does not need. Continue from an earlier file."
    )
