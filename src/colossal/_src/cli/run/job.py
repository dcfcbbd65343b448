"""What runs on every node: torchrun, the program, and the environment that they get."""

import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from colossal._src.cli.run.hosts import Host
from colossal.errors import ConfigError

DEFAULT_PORT = 29500
"""Where the nodes of a job meet, unless something else is asked for."""

OWN = {
    "nnodes": "--host or --hostfile",
    "node_rank": "the order of the hosts",
    "nproc_per_node": "--nproc_per_node",
    "master_addr": "--master_addr",
    "master_port": "--master_port",
    "module": "-m",
    "m": "-m",
}
"""Arguments of torchrun that are decided here, and by what."""

_PASSED_ON = ("PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")
_PASSED_ON_PREFIXES = ("COLOSSAL_", "GLOO_", "NCCL_", "TORCH_")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)(?:=(.*))?", re.DOTALL)
_RENDEZVOUS_OPTIONS = ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "standalone")


@final
@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks find each other: an address of the first node, as all the others see it."""

    address: str
    port: int

    @property
    def endpoint(self) -> str:
        """Host and port, an IPv6 address in brackets."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


@final
@dataclass(frozen=True)
class Job:
    """A program and how it is to be started, the same for all nodes."""

    program: str
    arguments: Sequence[str] = ()
    is_module: bool = False
    nproc_per_node: str | None = None
    torchrun: Mapping[str, str | None] = field(default_factory=dict)
    python: str = "python"
    folder: str = "."
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, rank: int, num_nodes: int, host: Host, meeting: Rendezvous, name: str) -> list[str]:
        """Return the command that starts torchrun on a node."""
        nproc = self.nproc_per_node or str(host.slots or 1)
        command = [self.python, "-m", "torch.distributed.run", f"--nnodes={num_nodes}", f"--nproc_per_node={nproc}"]
        command += self._meet(rank, num_nodes, meeting, name)
        command += [f"--{key}" if value is None else f"--{key}={value}" for key, value in self.torchrun.items()]
        return [*command, *(["-m"] if self.is_module else []), self.program, *self.arguments]

    def _meet(self, rank: int, num_nodes: int, meeting: Rendezvous, name: str) -> list[str]:
        if any(key in self.torchrun for key in _RENDEZVOUS_OPTIONS):
            return [f"--node_rank={rank}", f"--local_addr={name}"] if num_nodes > 1 else []
        if num_nodes > 1 and self.torchrun.get("max_restarts", "0") != "0":
            # [Note: restarts need a meeting that repeats] torchrun's static meeting takes place once: a node that
            # restarts its ranks waits there for others that never come. The c10d one is held again for every start.
            conf = ",".join([f"is_host={int(rank == 0)}", *filter(None, [self.torchrun.get("rdzv_conf")])])
            meet = {"backend": "c10d", "endpoint": meeting.endpoint, "id": "colossal", "conf": conf}
            return [*(f"--rdzv_{key}={value}" for key, value in meet.items()), f"--local_addr={name}"]
        return [f"--node_rank={rank}", f"--master_addr={meeting.address}", f"--master_port={meeting.port}"]


def parse_extra(texts: Iterable[str], num_nodes: int) -> dict[str, str | None]:
    """Read more arguments of torchrun: ``"max_restarts=3,no_python"`` is ``--max_restarts=3 --no_python``."""
    found: dict[str, str | None] = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        if not part:
            continue
        key, equals, value = part.lstrip("-").partition("=")
        key = key.replace("-", "_")
        if not re.fullmatch(r"[a-z]\w*", key):
            raise ConfigError(
                f"--extra_launch_args are names or name=value with commas between them. Found {part!r}. "
                'Write for example --extra_launch_args "max_restarts=3,tee=3".'
            )
        if key in OWN:
            raise ConfigError(
                f"--extra_launch_args pass on what colossal run does not decide. Found {key}. Use {OWN[key]}."
            )
        if key == "standalone" and num_nodes > 1:
            raise ConfigError(
                f"torchrun's standalone is for one node. Found {num_nodes} nodes. Drop standalone: they meet at "
                "--master_addr."
            )
        found[key] = value if equals else None
    return found


def parse_environment(texts: Iterable[str], own: Mapping[str, str]) -> dict[str, str]:
    """Return what a node's processes get: variables known to matter, and those asked for as NAME or NAME=VALUE."""
    found = {name: value for name, value in own.items() if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)}
    for text in texts:
        match = _VARIABLE.fullmatch(text)
        if match is None:
            raise ConfigError(f"--env is NAME or NAME=VALUE. Found {text!r}. Write for example --env HF_HOME=/data.")
        name, value = match[1], own.get(match[1]) if match[2] is None else match[2]
        if value is None:
            raise ConfigError(
                f"--env {name} passes on a variable of this shell. Found that it is not set. "
                f"Set it, or write --env {name}=VALUE."
            )
        found[name] = value
    return found


def parse_nproc(text: str | None) -> str | None:
    """Check the number of processes of a node, or torchrun's keyword for it."""
    if text is None or text in {"auto", "cpu", "gpu", "xpu"} or re.fullmatch(r"[1-9]\d*", text):
        return text
    raise ConfigError(
        f"--nproc_per_node is a number from 1, or auto, cpu, gpu or xpu. Found {text!r}. "
        "Pass the number of processes, usually that of the GPUs."
    )


def choose_rendezvous(
    hosts: Sequence[Host], address: str | None, port: int | None
) -> tuple[tuple[Host, ...], Rendezvous | None]:
    """Decide who is node 0, and where the nodes meet.

    The first host is node 0, unless the address is the name of another one: then that one is. Its name is where the
    nodes meet, unless an address is given; None stands for what SSH's configuration says about the first host.
    """
    # the sort is stable: the named host comes first, the others keep their order
    ordered = tuple(sorted(hosts, key=lambda host: host.name != address))
    if len(ordered) == 1 and ordered[0].is_local:
        return ordered, Rendezvous(address or "127.0.0.1", port or free_port())
    if address is None and ordered[0].is_loopback and not all(host.is_local for host in ordered):
        raise ConfigError(
            f"All nodes meet at an address of the first one. Found the first host {ordered[0].name}, under which each "
            "machine finds itself. Pass --master_addr with an address of this machine that the others can reach."
        )
    if address is None and not ordered[0].is_local:
        return ordered, None
    return ordered, Rendezvous(address or ordered[0].name, port or DEFAULT_PORT)


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def program_file(job: Job) -> str:
    """Return the file that must exist on a node before anything is started there; empty if there is none to check."""
    runs_a_file = not job.is_module and not {"no_python", "run_path"} & set(job.torchrun)
    return job.program if runs_a_file else ""


def python_folder(python: str) -> str:
    """Return the folder that belongs first on a node's PATH, so that the programs of the environment are found."""
    return str(Path(python).parent) if os.sep in python else ""
