"""The names of `torch.distributed` that communicate between ranks."""

import re

HOME = "torch.distributed"
COMMUNICATION_MODULES = (
    f"{HOME}._functional_collectives",
    f"{HOME}.nn",
    "torch.ops._c10d_functional",
    "torch.ops.c10d",
)
COMMUNICATING = re.compile(
    r"(all_reduce|all_gather|reduce_scatter|broadcast|all_to_all)\w*|\w*_object(_list)?\w*"
    r"|send|recv|isend|irecv|batch_isend_irecv|P2POp|gather|scatter|reduce|barrier|monitored_barrier"
)
GROUP_CREATION = (f"{HOME}.init_process_group", "torch.nn.parallel.DistributedDataParallel")
"""Calls that create process groups, or communicate from then on."""


def is_communication(name: str) -> bool:
    """Tells whether a full dotted name is one that sends or receives."""
    if any(name == module or name.startswith(f"{module}.") for module in COMMUNICATION_MODULES):
        return True
    home, _, last = name.rpartition(".")
    return (home == HOME or home.startswith(f"{HOME}.")) and COMMUNICATING.fullmatch(last) is not None
