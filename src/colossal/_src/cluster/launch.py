# pyright: reportPrivateImportUsage=false
"""Initialize the default process group and the ambient mesh."""

import argparse
import atexit
import os
import random
from collections.abc import Mapping
from typing import NamedTuple, final

import numpy as np
from torch import distributed as dist

from colossal._src.cluster.backends import check_backend, is_default
from colossal._src.cluster.config import ConfigSource, config_may_come_first, read_config, set_current_config
from colossal._src.cluster.config_mesh import form_own_mode, mesh_options
from colossal._src.cluster.mesh import DEFAULT_TIMEOUT_SECONDS, ParallelMesh, set_ambient_mesh
from colossal._src.cluster.process_spec import ProcessSpec
from colossal._src.cluster.rendezvous import (
    WorldSpec,
    bind_device,
    connect_to_store,
    connecting,
    find_local_rank,
    form_world,
    wait_for_all,
)
from colossal._src.cluster.schedulers import openmpi_host, openmpi_port, slurm_host, slurm_port
from colossal._src.cluster.teardown import leave
from colossal.accelerator import Accelerator, get_accelerator
from colossal.errors import ConfigError, LaunchError
from colossal.logging import get_dist_logger

DEFAULT_SEED = 1024


@config_may_come_first
def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int = DEFAULT_SEED,
    verbose: bool = True,
    timeout_seconds: float | None = None,
    *,
    config: ConfigSource | None = None,
) -> ParallelMesh:
    """Join the process group: find the other processes, bind this one to its device, and seed the random generators.

    Args:
        rank: This process's number, from 0 to ``world_size - 1``.
        world_size: Number of processes.
        host: Name or address of the host of rank 0; IPv6 addresses without brackets.
        port: A free port on that host, the same for all processes.
        backend: Communication backend, such as ``"gloo"`` or ``"nccl"``. By default that of the environment variable
            ``COLOSSAL_BACKEND``; else that of the accelerator, such as NCCL, and on CPUs shared memory (``"shm"``)
            if all processes are on one host, else gloo. ``"nccl"`` stands for that default too; on CPUs rank 0 logs
            a warning.
        local_rank: This process's number among those of its host; found out from the host names by default.
        seed: Seed of Python's, NumPy's and torch's generators, the same on all ranks, so that models start equal.
        verbose: Let rank 0 log the process group that was formed.
        timeout_seconds: How long to wait for a peer, at launch and in every later collective. By default the
            environment variable ``COLOSSAL_TIMEOUT_SECONDS``, else 600.
        config: The path of a Python file, or a dict: its entry ``parallel`` arranges the processes, and the rest is
            what `colossal.legacy` reads. It may also be the first argument.

    Returns:
        The ambient mesh, with all processes on its dp axis, or as the config arranges them.

    Raises:
        LaunchError: The numbers contradict each other, the port is taken, two processes have the same device, a peer
            did not come in time, or was started with another ``world_size``. Rank 0 waits for no peer if its own is 1;
            the others then learn of it.
        ConfigError: This machine lacks the backend or the device, the backend does not move tensors of the device, or
            the config cannot be read.
        MeshError: The sizes of the config do not multiply to the number of processes.

    Communication: every process contacts the store of rank 0, then opens connections to its peers, or its memory to
    them; no process returns before all are connected.

    Example:
        >>> import socket
        >>> from colossal.cluster import DistCoordinator, launch
        >>> with socket.create_server(("localhost", 0)) as server:
        ...     port = server.getsockname()[1]  # a free one
        >>> mesh = launch(rank=0, world_size=1, host="localhost", port=port, verbose=False)
        >>> mesh.world_size, mesh.global_rank, mesh.local_rank
        (1, 0, 0)
        >>> DistCoordinator().destroy()
    """
    member = ProcessSpec(rank, world_size, host, port, local_rank)
    return _join(member, _Options(backend, seed, verbose, timeout_seconds, config))


@config_may_come_first
def launch_from_torch(
    backend: str | None = None,
    seed: int = DEFAULT_SEED,
    verbose: bool = True,
    timeout_seconds: float | None = None,
    *,
    config: ConfigSource | None = None,
) -> ParallelMesh:
    """Join the process group that `torchrun` prepared; without `torchrun`, form one with a world size of 1.

    Args:
        backend: As in `launch`.
        seed: As in `launch`.
        verbose: As in `launch`.
        timeout_seconds: As in `launch`.
        config: As in `launch`.

    Returns:
        The ambient mesh, as in `launch`.

    Raises:
        LaunchError: Only some of torchrun's variables are set, or as in `launch`.

    Communication: as in `launch`; none in a world of one.

    Example:
        >>> from colossal.cluster import DistCoordinator, launch_from_torch
        >>> launch_from_torch(verbose=False)
        ParallelMesh(pp=1, dp=1, sp=1, tp=1)
        >>> DistCoordinator().destroy()
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if not any(name in os.environ for name in names):
        return _join(None, _Options(backend, seed, verbose, timeout_seconds, config))
    found = _read_environment(names, "torchrun --standalone --nproc_per_node=2 page.py")
    member = ProcessSpec(
        _parse_integer("RANK", found["RANK"]),
        _parse_integer("WORLD_SIZE", found["WORLD_SIZE"]),
        found["MASTER_ADDR"],
        _parse_integer("MASTER_PORT", found["MASTER_PORT"]),
        _parse_integer("LOCAL_RANK", found["LOCAL_RANK"]),
    )
    return _join(member, _Options(backend, seed, verbose, timeout_seconds, config))


@config_may_come_first
def launch_from_slurm(
    host: str | None = None,
    port: int | None = None,
    backend: str | None = None,
    seed: int = DEFAULT_SEED,
    verbose: bool = True,
    timeout_seconds: float | None = None,
    *,
    config: ConfigSource | None = None,
) -> ParallelMesh:
    """Join the world of the processes that `srun` started.

    Args:
        host: Name of the node of rank 0; by default the first one of ``SLURM_STEP_NODELIST``.
        port: A free port on that node; by default one that is derived from the numbers of job and step.
        backend: As in `launch`.
        seed: As in `launch`.
        verbose: As in `launch`.
        timeout_seconds: As in `launch`.
        config: As in `launch`.

    Returns:
        The ambient mesh, as in `launch`.

    Raises:
        LaunchError: SLURM_PROCID, SLURM_NPROCS or SLURM_LOCALID is not set, the list of nodes is needed and missing,
            or as in `launch`.

    Communication: as in `launch`.

    Example:
        >>> import os
        >>> from unittest import mock
        >>> from colossal.cluster import DistCoordinator, launch_from_slurm
        >>> own = dict(SLURM_PROCID="0", SLURM_NPROCS="1", SLURM_LOCALID="0")  # as srun does
        >>> job = dict(SLURM_JOB_ID=str(os.getpid()), SLURM_STEP_ID="0", SLURM_STEP_NODELIST="localhost")
        >>> with mock.patch.dict(os.environ, own | job):
        ...     launch_from_slurm(verbose=False)
        ParallelMesh(pp=1, dp=1, sp=1, tp=1)
        >>> DistCoordinator().destroy()
    """
    names = ("SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID")
    rank, world_size, local_rank = _read_numbers(names, "srun python train.py")
    meeting = (slurm_host() if host is None else host), (slurm_port() if port is None else port)
    member = ProcessSpec(rank, world_size, *meeting, local_rank)
    return _join(member, _Options(backend, seed, verbose, timeout_seconds, config))


@config_may_come_first
def launch_from_openmpi(
    host: str | None = None,
    port: int | None = None,
    backend: str | None = None,
    seed: int = DEFAULT_SEED,
    verbose: bool = True,
    timeout_seconds: float | None = None,
    *,
    config: ConfigSource | None = None,
) -> ParallelMesh:
    """Join the world of the processes that Open MPI's `mpirun` started.

    Args:
        host: Name of the host of rank 0; by default this host, if all processes are on it.
        port: A free port on that host; by default one that is derived from the name of the job.
        backend: As in `launch`.
        seed: As in `launch`.
        verbose: As in `launch`.
        timeout_seconds: As in `launch`.
        config: As in `launch`.

    Returns:
        The ambient mesh, as in `launch`.

    Raises:
        LaunchError: A variable ``OMPI_COMM_WORLD_*`` is not set, no host is passed and there are several, or as in
            `launch`.

    Communication: as in `launch`.

    Example:
        >>> import os
        >>> from unittest import mock
        >>> from colossal.cluster import DistCoordinator, launch_from_openmpi
        >>> world = {"RANK": "0", "SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
        >>> variables = {f"OMPI_COMM_WORLD_{name}": value for name, value in world.items()}  # as mpirun does
        >>> with mock.patch.dict(os.environ, variables, PMIX_NAMESPACE=str(os.getpid())):
        ...     launch_from_openmpi(verbose=False)
        ParallelMesh(pp=1, dp=1, sp=1, tp=1)
        >>> DistCoordinator().destroy()
    """
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    rank, world_size, local_rank = _read_numbers(names, "mpirun -np 2 python train.py")
    meeting = (openmpi_host() if host is None else host), (openmpi_port() if port is None else port)
    member = ProcessSpec(rank, world_size, *meeting, local_rank)
    return _join(member, _Options(backend, seed, verbose, timeout_seconds, config))


def get_default_parser() -> argparse.ArgumentParser:
    """Make a command-line parser for the arguments of `launch`, to which a program adds its own.

    Returns:
        A parser with ``--config``, ``--host``, ``--port``, ``--world_size``, ``--rank``, ``--local_rank``,
        ``--backend`` and ``--seed``.

    Example:
        >>> from colossal.cluster import get_default_parser
        >>> parser = get_default_parser()
        >>> _ = parser.add_argument("--batch_size", type=int, default=32)
        >>> arguments = parser.parse_args(["--host", "node0", "--port", "29500"])
        >>> arguments.host, arguments.port, arguments.seed, arguments.batch_size
        ('node0', 29500, 1024, 32)
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="path of a config file")
    parser.add_argument("--host", help="name or address of the host of rank 0")
    parser.add_argument("--port", type=int, help="a free port on that host")
    parser.add_argument("--world_size", type=int, help="number of processes")
    parser.add_argument("--rank", type=int, help="number of this process, from 0")
    parser.add_argument("--local_rank", type=int, help="number of this process on its host, from 0")
    parser.add_argument("--backend", help="communication backend; chosen from the device by default")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="seed of the random generators")
    return parser


@final
class _Options(NamedTuple):
    """What all ways to launch have in common."""

    backend: str | None
    seed: int
    verbose: bool
    timeout_seconds: float | None
    config: ConfigSource | None


def _join(member: ProcessSpec | None, options: _Options) -> ParallelMesh:
    """Form the process group; `member` is None for a world size of 1, which needs no address."""
    if dist.is_initialized():
        raise LaunchError(
            f"A process joins one job. Found that it is rank {dist.get_rank()} of {dist.get_world_size()} already. "
            "Launch once, or call torch.distributed.destroy_process_group() in between."
        )
    from colossal._src._error_file import report_uncaught_errors
    from colossal._src.cluster.link_cost import link_cost_from_environment

    report_uncaught_errors()
    seconds, link_cost = _check_timeout(options.timeout_seconds), link_cost_from_environment()
    config = None if options.config is None else read_config(options.config)
    sizes = {} if config is None else mesh_options(config, 1 if member is None else member.world_size)
    accelerator = get_accelerator()
    asked = options.backend or os.environ.get("COLOSSAL_BACKEND") or None
    wanted = None if is_default(asked, accelerator) else asked
    check_backend(wanted or accelerator.communication_backend, accelerator)
    if member is None:
        world = WorldSpec(dist.HashStore(), 0, 1, seconds)
    else:
        world = WorldSpec(connect_to_store(member, seconds), member.rank, member.world_size, seconds)
    with connecting(world):
        local_rank = _find_local_rank(member, world)
        # Before the group is formed: collectives of objects take the current device.
        bind_device(world, accelerator, local_rank, allow_same_device=accelerator.is_cpu or wanted is not None)
        chosen, remark = form_world(world, wanted)
        _seed_everything(options.seed, accelerator)
        mesh = ParallelMesh(
            local_rank=local_rank, timeout_seconds=seconds, device=accelerator.name, link_cost=link_cost, **sizes
        )
        wait_for_all(world)
    set_ambient_mesh(mesh)
    set_current_config(config)
    if config is not None:
        form_own_mode(config, options.seed)
    # A process may launch again after it has left: one registration is enough.
    atexit.unregister(leave)
    atexit.register(leave)
    if asked != wanted and accelerator.is_cpu:
        get_dist_logger().warning(
            f"The backend {asked!r} moves tensors of GPUs. Found the device 'cpu', and uses {chosen!r}.", ranks=[0]
        )
    if options.verbose:
        get_dist_logger().info(
            f"{world.size} process(es), {accelerator.name}, {chosen}, seed {options.seed}{remark}", ranks=[0]
        )
    return mesh


def _find_local_rank(member: ProcessSpec | None, world: WorldSpec) -> int:
    if member is None:
        return 0
    return find_local_rank(member, world.store) if member.local_rank is None else member.local_rank


def _seed_everything(seed: int, accelerator: Accelerator) -> None:
    random.seed(seed)
    # NumPy takes 32 bits, torch 64.
    np.random.seed(seed % 2**32)  # noqa: NPY002 (user code draws from the legacy generator)
    accelerator.manual_seed(seed)


def _check_timeout(seconds: float | None) -> float:
    value = os.environ.get("COLOSSAL_TIMEOUT_SECONDS", DEFAULT_TIMEOUT_SECONDS) if seconds is None else seconds
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not number > 0:
        raise ConfigError(
            f"The timeout is a number of seconds greater than 0. Found {value!r}. "
            "Pass timeout_seconds, or set COLOSSAL_TIMEOUT_SECONDS."
        )
    return number


def _read_environment(names: tuple[str, ...], command: str) -> Mapping[str, str]:
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise LaunchError(
            f"The launcher sets {', '.join(names)}. Found no {', '.join(missing)}. "
            f"Start the program with its launcher, for example: {command}"
        )
    return {name: os.environ[name] for name in names}


def _read_numbers(names: tuple[str, ...], command: str) -> tuple[int, ...]:
    return tuple(_parse_integer(name, value) for name, value in _read_environment(names, command).items())


def _parse_integer(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise LaunchError(
            f"The environment variable {name} is an integer. Found {value!r}. Let the launcher set it."
        ) from None
