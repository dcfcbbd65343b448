"""The options of ``colossal run``, and what they mean together."""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import click

from colossal._src._error_file import ERROR_FILE, read_error_file
from colossal._src.cli.run.connection import LocalConnection, NodeConnection, SSHSession
from colossal._src.cli.run.hosts import Host, parse_hosts, read_hostfile, select
from colossal._src.cli.run.job import (
    DEFAULT_PORT,
    Job,
    Rendezvous,
    choose_rendezvous,
    parse_environment,
    parse_extra,
    parse_nproc,
    program_file,
    python_folder,
)
from colossal._src.cli.run.launcher import Launcher, connect_nodes
from colossal._src.cli.run.node import Node
from colossal._src.cli.run.outcome import Ending, report
from colossal._src.cli.run.output import Printer
from colossal._src.cli.watchdog import HINT
from colossal.errors import ColossalError, ConfigError

_MIN_TIMEOUT_SECONDS = 3.0


@click.command(
    name="run",
    context_settings={
        "ignore_unknown_options": False,
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("-", "_"),
        "help_option_names": ["-h", "--help"],
    },
)
@click.option("-H", "--host", help="Hosts with commas between them; the first one is node 0.")
@click.option("--hostfile", type=click.Path(path_type=Path), help="A file with one host a line instead.")
@click.option("--include", help="Only these of the hosts.")
@click.option("--exclude", help="None of these hosts.")
@click.option("--num_nodes", type=click.IntRange(min=1), help="Only the first ones of the hosts.")
@click.option(
    "--nproc_per_node", help="Processes a node: a number, auto, cpu or gpu. Default: slots of the host, or 1."
)
@click.option("--master_addr", help="Where the nodes meet: name of one of the hosts, or an address of the first one.")
@click.option("--master_port", type=click.IntRange(1, 65535), help=f"Default: {DEFAULT_PORT}; one node: a free one.")
@click.option("--ssh-port", type=click.IntRange(1, 65535), help="Port of the SSH servers, where a host has none.")
@click.option("-m", "is_module", is_flag=True, help="The program is a module, as in python -m.")
@click.option("--extra_launch_args", multiple=True, help='More for torchrun: "max_restarts=3,no_python".')
@click.option("--env", "variables", multiple=True, help="NAME passes on, NAME=VALUE sets a variable on all nodes.")
@click.option("--python", default=sys.executable, help="The nodes' Python. Default: the path of this one.")
@click.option("--workdir", help="The nodes' working folder. Default: the path of this one.")
@click.option(
    "--timeout", type=click.FloatRange(min=_MIN_TIMEOUT_SECONDS), default=30.0, show_default=True,
    help="Seconds after which a node that does not answer is lost.",
)  # fmt: skip
@click.option("--dry_run", is_flag=True, help="Only print what would be started.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(context: click.Context, **options: Any) -> None:
    """Start PROGRAM with its ARGUMENTS under torchrun, on this machine or on all the given hosts.

    A host that is this machine is used as it is; all others are reached over SSH, with the keys, names and settings
    of your SSH configuration. Options of this command come before the program, which gets all arguments after it.
    """
    try:
        context.exit(_run(Options(**options)))
    except ConfigError as error:
        raise click.UsageError(str(error), context) from None
    except ColossalError as error:
        raise click.ClickException(str(error)) from None


@final
@dataclass(frozen=True)
class Options:
    """The options as they were given."""

    host: str | None
    hostfile: Path | None
    include: str | None
    exclude: str | None
    num_nodes: int | None
    nproc_per_node: str | None
    master_addr: str | None
    master_port: int | None
    ssh_port: int | None
    is_module: bool
    extra_launch_args: Sequence[str]
    variables: Sequence[str]
    python: str
    workdir: str | None
    timeout: float
    dry_run: bool
    program: str
    arguments: Sequence[str]

    def hosts(self) -> tuple[Host, ...]:
        """Return the chosen hosts: this machine if none is named."""
        if self.host is not None and self.hostfile is not None:
            raise ConfigError("The hosts stand in one place. Found both --host and --hostfile. Drop one.")
        if self.host is not None:
            return select(parse_hosts(self.host), self.include, self.exclude, self.num_nodes)
        if self.hostfile is not None:
            return select(read_hostfile(self.hostfile), self.include, self.exclude, self.num_nodes)
        if self.include or self.exclude or (self.num_nodes or 1) > 1:
            raise ConfigError(
                "--include, --exclude and --num_nodes choose from hosts. Found no hosts. Pass --host or --hostfile."
            )
        return (Host("localhost"),)

    def job(self, num_nodes: int) -> Job:
        """Return what is to run on that many nodes."""
        return Job(
            program=self.program,
            arguments=self.arguments,
            is_module=self.is_module,
            nproc_per_node=parse_nproc(self.nproc_per_node),
            torchrun=parse_extra(self.extra_launch_args, num_nodes),
            python=self.python,
            folder=str(Path(self.workdir or Path.cwd()).absolute()),
            environment=parse_environment(self.variables, os.environ),
        )


def _run(options: Options) -> int:
    hosts = options.hosts()
    job = options.job(len(hosts))
    hosts, meeting = choose_rendezvous(hosts, options.master_addr, options.master_port)
    is_local = len(hosts) == 1 and hosts[0].is_local
    with _own_streams() if is_local else _no_streams() as streams:
        links = [_link(host, options, streams) for host in hosts]
        if meeting is None:
            meeting = Rendezvous(links[0].name, options.master_port or DEFAULT_PORT)
        commands = [
            job.command(rank, len(hosts), host, meeting, link.name)
            for rank, (host, link) in enumerate(zip(hosts, links, strict=True))
        ]
        if options.dry_run:
            _show(hosts, commands, job)
            return 0
        nodes = [
            Node(rank, host.name, link, None if host.is_local else options.timeout)
            for rank, (host, link) in enumerate(zip(hosts, links, strict=True))
        ]
        connect_nodes(nodes)
        launcher = Launcher(nodes, Printer([host.name for host in hosts]))
        with _error_file(is_local=is_local) as variables:
            details = _details(job, streams, variables)
            code = launcher.run(lambda node: node.order(commands[node.number], details))
            message = read_error_file(Path(variables.get(ERROR_FILE, os.devnull)))
    if not is_local or launcher.interrupted or any(end.left or end.ending is Ending.LOST for end in launcher.ends):
        _print_error(report(launcher.ends, launcher.interrupted))
    elif code and (message or _has_accelerator()):
        _print_error(message or HINT)
    return code


def _has_accelerator() -> bool:
    """Whether a watchdog may end ranks of this machine; asked only once a job has failed."""
    from colossal.accelerator import get_accelerator

    try:
        return not get_accelerator().is_cpu
    except ColossalError:
        return False


@contextmanager
def _error_file(*, is_local: bool) -> Iterator[dict[str, str]]:
    """Where torchrun copies the error of the rank that failed first, as its own report is long.

    Several nodes print through this process, which reads what they say; what starts this one may want the file itself.
    """
    if not is_local or os.environ.get(ERROR_FILE):
        yield {}
        return
    with TemporaryDirectory() as folder:
        yield {ERROR_FILE: str(Path(folder, "error.json"))}


def _details(job: Job, streams: Sequence[int], variables: Mapping[str, str]) -> dict[str, Any]:
    return {
        "folder": job.folder,
        "program": program_file(job),
        "environment": {**job.environment, **variables},
        "path": python_folder(job.python),
        "streams": list(streams),
    }


def _link(host: Host, options: Options, streams: Sequence[int]) -> NodeConnection:
    if host.is_local:
        return LocalConnection(host.name, streams)
    return SSHSession(host, options.python, options.ssh_port, options.timeout)


def _show(hosts: Sequence[Host], commands: Sequence[list[str]], job: Job) -> None:
    for host, words in zip(hosts, commands, strict=True):
        variables = [f"{name}={value}" for name, value in job.environment.items()]
        click.echo(f"{host.name}: {shlex.join(['cd', job.folder])} && {shlex.join(['env', *variables, *words])}")


def _print_error(text: str) -> None:
    if text:
        first, _, rest = text.partition("\n")
        click.secho(f"colossal run: {first}", fg="red", bold=True, err=True)
        click.echo(rest, err=True, nl=bool(rest))


@contextmanager
def _own_streams() -> Iterator[Sequence[int]]:
    """Copies of this process's standard streams, for a job that has this terminal to itself."""
    copies = [_copy(number) for number in range(3)]
    try:
        yield copies
    finally:
        for number in copies:
            os.close(number)


@contextmanager
def _no_streams() -> Iterator[Sequence[int]]:
    yield ()


def _copy(number: int) -> int:
    try:
        return os.dup(number)
    except OSError:  # closed, as in some daemons
        return os.open(os.devnull, os.O_RDWR)
