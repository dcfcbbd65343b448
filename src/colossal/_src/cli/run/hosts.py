"""The machines of a job: named one by one or in a file, then chosen from."""

import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from colossal._src._closest import closest_name
from colossal.errors import ConfigError

_ENTRY = re.compile(
    r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<v6>[0-9a-fA-F:.%\w]+)\]|(?P<name>[^\s@:\[\]]+))(?::(?P<port>\d+))?"
)
_BARE_V6 = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?P<name>[0-9a-fA-F]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.%\w]*)")
_MAX_PORT = 65535


@final
@dataclass(frozen=True)
class Host:
    """One machine, as the user wrote it."""

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None

    @property
    def is_local(self) -> bool:
        """Whether this is the machine that the command runs on, to be reached without SSH.

        A user or a port in the entry asks for SSH in any case.
        """
        return self.user is None and self.port is None and _is_own_address(self.name)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine itself finds itself under that name."""
        return self.is_local and (self.name == "localhost" or self.name.startswith("127.") or self.name == "::1")


def parse_host(text: str, slots: int | None = None) -> Host:
    """Read ``host``, ``user@host``, ``host:port`` or all three; an IPv6 address with a port stands in brackets."""
    text = text.strip()
    match = _BARE_V6.fullmatch(text) or _ENTRY.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"A host is written as host, user@host, host:port or user@host:port. Found {text!r}. "
            "Write one of these, an IPv6 address with a port as [address]:port."
        )
    parts = match.groupdict()
    port = int(parts["port"]) if parts.get("port") else None
    if port is not None and not 0 < port <= _MAX_PORT:
        raise ConfigError(f"A port is between 1 and {_MAX_PORT}. Found {text!r}. Write the port of its SSH server.")
    return Host(parts.get("v6") or parts["name"], parts["user"], port, slots)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read hosts with commas between them."""
    entries = [entry for entry in text.split(",") if entry.strip()]
    if not entries:
        raise ConfigError("--host names at least one machine. Found none. Write for example --host node1,node2.")
    return _without_duplicates([parse_host(entry) for entry in entries], "--host")


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Read a file with one host a line: ``user@host:port slots=4  # comment``, of which only the host is needed."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"A hostfile is a text file with one host a line. Found that {path} cannot be read: {reason}. "
            "Check the path."
        ) from error
    hosts = [
        _read_line(words, f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if (words := line.partition("#")[0].split())
    ]
    if not hosts:
        raise ConfigError(f"A hostfile names at least one host. Found none in {path}. Write one host a line.")
    return _without_duplicates(hosts, str(path))


def _read_line(words: Sequence[str], where: str) -> Host:
    slots = None
    for word in words[1:]:
        match = re.fullmatch(r"slots=([1-9]\d*)", word)
        if match is None:
            raise ConfigError(
                f"After a host, only slots=N, the number of its processes, and a comment after # are valid. "
                f"Found {word!r} in {where}. Write, for example, node1 slots=4."
            )
        slots = int(match[1])
    try:
        return parse_host(words[0], slots)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _without_duplicates(hosts: Iterable[Host], where: str) -> tuple[Host, ...]:
    seen: dict[str, Host] = {}
    for host in hosts:
        if host.name in seen:
            raise ConfigError(
                f"A machine is one node. Found {host.name} twice in {where}. "
                "Name it once, and start more processes there with --nproc_per_node or slots=N."
            )
        seen[host.name] = host
    return tuple(seen.values())


def select(
    hosts: tuple[Host, ...], include: str | None = None, exclude: str | None = None, num_nodes: int | None = None
) -> tuple[Host, ...]:
    """Choose from the hosts, in their order."""
    if include is not None and exclude is not None:
        raise ConfigError(
            "Either the wanted hosts are named or the unwanted ones. Found both --include and --exclude. Drop one."
        )
    if include is not None:
        chosen = _named(include, hosts, "--include")
        hosts = tuple(host for host in hosts if host.name in chosen)
    if exclude is not None:
        chosen = _named(exclude, hosts, "--exclude")
        hosts = tuple(host for host in hosts if host.name not in chosen)
    if not hosts:
        raise ConfigError("A job needs at least one host. Found none left. Exclude fewer, or include one.")
    if num_nodes is not None and num_nodes > len(hosts):
        raise ConfigError(
            f"--num_nodes takes the first of the hosts. Found --num_nodes {num_nodes} and {len(hosts)} host(s). "
            "Name more hosts, or lower it."
        )
    return hosts[:num_nodes]


def _named(text: str, hosts: tuple[Host, ...], option: str) -> set[str]:
    names = [host.name for host in hosts]
    wanted = [parse_host(entry).name for entry in text.split(",") if entry.strip()]
    if not wanted:
        raise ConfigError(f"{option} names at least one host. Found none. Write for example {option} {names[0]}.")
    for name in wanted:
        if name not in names:
            near = closest_name(name, names)
            advice = f"Did you mean {near}?" if near else f"The hosts are {', '.join(names)}."
            raise ConfigError(f"{option} names hosts of the list. Found {name!r}, which is not there. {advice}")
    return set(wanted)


def _is_own_address(name: str) -> bool:
    """Whether a socket can be bound to the address of the name, which only works on the host that has it."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, kind, address) for family, kind, _, _, address in found)


def _can_bind(family: int, kind: int, address: tuple[str | int, ...] | tuple[int, bytes]) -> bool:
    try:
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
