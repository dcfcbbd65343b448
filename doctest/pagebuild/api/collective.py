"""The names of `torch.distributed` that communicate between ranks."""

import re

PACKAGE = "torch.distributed"
COMMUNICATION_MODULES = (
    f"{PACKAGE}._functional_collectives",
    f"{PACKAGE}.nn",
    "torch.ops._c10d_functional",
    "torch.ops.c10d",
)
COMMUNICATING = re.compile(
    r"(all_reduce|all_gather|reduce_scatter|broadcast|all_to_all)\w*|\w*_object(_list)?\w*"
    r"|send|recv|isend|irecv|batch_isend_irecv|P2POp|gather|scatter|reduce|barrier|monitored_barrier"
)
GROUP_CREATION = (f"{PACKAGE}.init_process_group", "torch.nn.parallel.DistributedDataParallel")
"""Calls that create process groups, or communicate from then on."""


def is_communication(name: str) -> bool:
    """Whether a full dotted name is one that sends or receives."""
    if any(name == prefix or name.startswith(f"{prefix}.") for prefix in COMMUNICATION_MODULES):
        return True
    module, _, last = name.rpartition(".")
    return (module == PACKAGE or module.startswith(f"{PACKAGE}.")) and COMMUNICATING.fullmatch(last) is not None
