"""The host of rank 0, as Slurm and Open MPI name it to the processes that they start."""

import os
import re
import zlib

from colossal.errors import LaunchError

_FIRST_PORT, _PORTS = 20000, 10000
"""Below the ports that Linux hands out by itself, and above those of most services."""


def first_node(node_list: str) -> str:
    """Return the first host of a list as Slurm writes it: ``node[003-007,9],gpu1`` begins with node003."""
    name = re.match(r"(?:[^\[\],]|\[[^\]]*\])*", node_list.strip())
    assert name  # it matches nothing, too
    return re.sub(r"\[([^\]]*)\]", lambda brackets: re.split(r"[-,]", brackets.group(1))[0], name.group())


def slurm_host() -> str:
    """Find the node of rank 0, the first one of the step."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    lists = [os.environ[name] for name in names if os.environ.get(name)]
    host = first_node(lists[0]) if lists else ""
    if not host:
        raise LaunchError(
            f"The processes meet at the first node of the step, which {names[0]} names. Found "
            f"{f'{names[0]}={lists[0]!r}' if lists else f'no {names[0]}'}. Pass the host, or start with srun."
        )
    return host


def slurm_port() -> int:
    """Derive a port from the numbers of job and step: the same in all processes, another one in other steps."""
    return _port_of("slurm", os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_STEP_ID", ""))


def openmpi_host() -> str:
    """Return the host of rank 0, which Open MPI names only where all processes are on one host."""
    here, everywhere = (os.environ.get(f"OMPI_COMM_WORLD_{name}SIZE", "") for name in ("LOCAL_", ""))
    if here != everywhere:
        raise LaunchError(
            "The processes meet at the host of rank 0, which Open MPI does not name where there are several hosts. "
            f"Found {here or 'an unknown number'} of {everywhere} processes on this one. Pass the host: the first one "
            "of the hostfile."
        )
    return "localhost"


def openmpi_port() -> int:
    """Derive a port from the name of the job: the same in all processes, another one in other jobs."""
    return _port_of("openmpi", os.environ.get("PMIX_NAMESPACE", ""))


def _port_of(*names: str) -> int:
    return _FIRST_PORT + zlib.crc32("/".join(names).encode()) % _PORTS
