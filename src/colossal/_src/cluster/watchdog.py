"""Settings of torch's watchdog of an accelerator's collectives, made before there is a process group."""

import os
from collections.abc import Mapping

# [Note: peers that are lost on an accelerator]
# On GPUs a stream waits for a collective: `Work.wait` returns at once, and no code is left to raise a later error.
# torch's watchdog ends the process instead (SIGABRT). What can be had is a record of what each rank did last: of
# the last 2,000 calls, written out when the watchdog ends a process, if it has a buffer and DUMP_ON_TIMEOUT is set.
# 3 is torch's default way to end a process: without waiting for connections that may hang. torchrun gives its workers
# 1, which is left as it is here: torchrun's choice cannot be distinguished from the user's. A blocking wait
# (TORCH_NCCL_BLOCKING_WAIT) would raise in Python, and make the host wait in each collective; with it set, the error
# is a CommunicationError.

_OF_NCCL = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
_BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the second is the older name
_NUM_CALLS = "2000"


def watchdog_settings(backend: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Choose variables for the watchdog of a backend; none of those that are set already."""
    if "nccl" not in backend.lower():
        return {}
    wanted = dict(_OF_NCCL) if any(name in environment for name in _BUFFER) else {**_OF_NCCL, _BUFFER[0]: _NUM_CALLS}
    return {name: value for name, value in wanted.items() if name not in environment}


def set_watchdog(backend: str) -> None:
    """Set these variables, before the first group of a process is made."""
    os.environ.update(watchdog_settings(backend, os.environ))
