"""Connections to the nodes of a job: this machine, or one over SSH."""

import base64
import hashlib
import logging
import os
import select
import shlex
import socket
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, final

from colossal._src.cli.run.hosts import Host
from colossal.errors import LaunchError

BOOT = "import sys;source=sys.stdin.buffer;exec(compile(source.read(int(source.readline())),'supervisor','exec'))"
"""What the node's Python does first: it reads the supervisor, its length in front."""

_CHUNK_BYTES = 65536
_END_SECONDS = 20.0


class NodeConnection(Protocol):
    """How the launcher talks to one supervisor."""

    @property
    def name(self) -> str:
        """Under which name the other nodes find this one."""
        ...

    def open(self) -> None:
        """Start the node's Python; raise LaunchError if the node cannot be reached."""

    def send(self, data: bytes) -> None:
        """Send bytes; OSError if the link is down."""

    def receive(self, seconds: float | None) -> bytes | None:
        """Return what came: None if nothing did for that long, nothing (``b""``) if the link is down."""

    def complaint(self) -> str:
        """Return what the node's shell or Python wrote to its standard error, once the link is down."""
        ...

    def close(self) -> None:
        """Hang up, which ends a job that still runs."""


@final
class LocalConnection:
    """A supervisor on this machine, a session of its own, so that Ctrl-C reaches the launcher alone."""

    def __init__(self, name: str, streams: Sequence[int] = ()) -> None:
        self._name, self._streams = name, streams
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """The name by which the user called this machine."""
        return self._name

    def open(self) -> None:
        """Start the supervisor's Python."""
        self._process = subprocess.Popen(  # noqa: S603 (our own command)
            # isolated: variables of the environment must not change what the supervisor imports
            [sys.executable, "-I", "-c", BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=tuple(self._streams),
            start_new_session=True,
            bufsize=0,
        )

    def send(self, data: bytes) -> None:
        """Write to its standard input."""
        assert self._process is not None
        assert self._process.stdin is not None
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._process.stdin.fileno(), rest) :]

    def receive(self, seconds: float | None) -> bytes | None:
        """Read from its standard output."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, _CHUNK_BYTES) if ready else None

    def complaint(self) -> str:
        """Read what it wrote to its standard error."""
        assert self._process is not None
        assert self._process.stderr is not None
        return self._process.stderr.read().decode(errors="replace").strip()

    def close(self) -> None:
        """Close its standard input, and wait until it has ended what it started."""
        process = self._process
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            with suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.stderr.close()  # type: ignore[union-attr]


_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
_ALL_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
_CLOSE_SECONDS = 2.0


@final
class SSHSession:
    """A supervisor on another machine.

    Of ``~/.ssh/config`` hold HostName, User, Port, IdentityFile, ProxyJump, ProxyCommand, ConnectTimeout,
    UserKnownHostsFile, GlobalKnownHostsFile and StrictHostKeyChecking; keys of the agent are tried first. A host whose
    key is not known is refused, unless the configuration says ``accept-new`` or ``no``; one whose key has changed is
    refused always.
    """

    def __init__(self, host: Host, python: str, port: int | None, timeout: float) -> None:
        from fabric import Connection

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._connection: Any = Connection(host.name, user=host.user, port=host.port or port)
        logging.getLogger("paramiko").addHandler(logging.NullHandler())  # its errors come to us as exceptions
        self._host, self._python, self._timeout = host, python, timeout
        self._channel: Any = None

    @property
    def name(self) -> str:
        """The host's name or address, as SSH's configuration has it."""
        return self._connection.host

    @property
    def _address(self) -> str:
        return f"{self._connection.user}@{self._connection.host}:{self._connection.port}"

    def open(self) -> None:
        """Connect, check the host's key, prove who we are, and start the supervisor's Python."""
        _check_host_keys(self._connection)
        settings = {"banner_timeout": self._timeout, "auth_timeout": self._timeout}
        self._connection.connect_kwargs.update(settings)
        self._connection.connect_timeout = self._connection.connect_timeout or self._timeout
        try:
            self._connection.open()
            self._channel = self._connection.create_session()
            # exec: no shell stays between the channel and the supervisor
            self._channel.exec_command("exec " + shlex.join([self._python, "-I", "-c", BOOT]))
        except Exception as error:
            self.close()
            raise LaunchError(_explain(error, self._address, self._host.name, self._timeout)) from error

    def send(self, data: bytes) -> None:
        """Write to the supervisor's standard input."""
        from paramiko import SSHException

        try:
            self._channel.sendall(data)
        except (SSHException, EOFError) as error:
            raise OSError(str(error)) from error

    def receive(self, seconds: float | None) -> bytes | None:
        """Read from its standard output."""
        self._channel.settimeout(seconds)
        try:
            return self._channel.recv(_CHUNK_BYTES)
        except TimeoutError:
            return None
        except OSError:
            return b""

    def complaint(self) -> str:
        """Read what came on its standard error."""
        self._channel.settimeout(_CLOSE_SECONDS)
        text = b""
        with suppress(OSError):
            while chunk := self._channel.recv_stderr(_CHUNK_BYTES):
                text += chunk
        return text.decode(errors="replace").strip()

    def close(self) -> None:
        """Close the connection; the supervisor sees its standard input end."""
        transport = self._connection.transport
        if transport is not None and transport.sock is not None:
            with suppress(OSError):  # the socket is closed already
                transport.sock.settimeout(_CLOSE_SECONDS)
        with suppress(Exception):
            self._connection.close()


def _check_host_keys(connection: Any) -> None:
    """Make a connection, and those that it goes through, check the host's key, which fabric alone does not."""
    from paramiko import RejectPolicy, WarningPolicy

    settings, client = connection.ssh_config, connection.client
    own = _files(settings.get("userknownhostsfile"), _KNOWN_HOSTS)
    for path in _files(settings.get("globalknownhostsfile"), _ALL_KNOWN_HOSTS) + own:
        if path.is_file():
            client.load_system_host_keys(str(path))
    policies: dict[str, Any] = {"no": WarningPolicy(), "off": WarningPolicy()}
    if own:
        policies["accept-new"] = _AcceptNew(own[0])
    strict = settings.get("stricthostkeychecking", "ask").lower()
    client.set_missing_host_key_policy(policies.get(strict, RejectPolicy()))
    if hasattr(connection.gateway, "ssh_config"):
        _check_host_keys(connection.gateway)


class _AcceptNew:
    """Takes the key of a host that shows one for the first time, and writes it down."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:  # noqa: ARG002 (paramiko's signature)
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{hostname} {key.get_name()} {key.get_base64()}\n")


def _files(setting: str | None, default: tuple[str, ...]) -> list[Path]:
    names = default if setting is None else tuple(shlex.split(setting))
    return [Path(name).expanduser() for name in names if name != "none"]


def _explain(error: Exception, address: str, name: str, timeout: float) -> str:
    """Say in sentences of our own why a connection failed."""
    from paramiko.ssh_exception import NoValidConnectionsError

    if isinstance(error, socket.gaierror):
        return f"The host {name} must have an address. Found that it has none: {error.strerror}. Check its name."
    if isinstance(error, NoValidConnectionsError):
        reasons = {os.strerror(cause.errno or 0) for cause in error.errors.values() if isinstance(cause, OSError)}
        return (
            f"{address} must run an SSH server. Found: {', '.join(sorted(reasons))}. "
            "Check the name and the port, --ssh-port if all hosts use another one."
        )
    if isinstance(error, (TimeoutError, EOFError)):
        return f"{address} must answer within {timeout:g} s. Found no answer. Check that it runs, or raise --timeout."
    return _explain_refusal(error, address, name)


def _explain_refusal(error: Exception, address: str, name: str) -> str:
    """Explain what went wrong once the server answered: keys, ours or its own."""
    from paramiko import AuthenticationException, BadHostKeyException, SSHException

    if isinstance(error, BadHostKeyException):
        key = _fingerprint(error.key.asbytes())
        return (
            f"{address} must show the key that is known of it. Found another one, {key}: the machine was set up anew, "
            f"or another one answers. If that is right, forget the old key: ssh-keygen -R {name}"
        )
    if isinstance(error, AuthenticationException) or "authentication methods" in str(error):
        return (
            f"{address} must let this user in without a password. Found that it does not: {error} "
            f"Try ssh {name}; ssh-copy-id {name} brings your key there."
        )
    if isinstance(error, SSHException) and "not found in known_hosts" in str(error):
        return (
            f"{address} must be a machine whose key is known. Found none in known_hosts. "
            f"Connect once by ssh {name} and compare its key, or set StrictHostKeyChecking accept-new for it."
        )
    return f"{address} must be reached over SSH. Found: {error or type(error).__name__}. Try ssh {name}."


def _fingerprint(key: bytes) -> str:
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")
