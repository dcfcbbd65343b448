# pyright: reportArgumentType=false
"""Machines in network namespaces, each with an SSH server, for the tests of ``colossal run``.

    head   node1   node2   node3        one network namespace each; the nodes also have processes of their own
      └──────┴───────┴───────┘
              switch                    a bridge in a namespace of its own

Nothing leaves them, and they vanish with the process that made them: the first process of each reads a pipe from here.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from ports import free_port

MACHINE = Path(__file__).with_name("machine.py")
SOURCE = Path(__file__).parents[3] / "src"
NETWORK = "10.213.7"
SSHD = "/usr/sbin/sshd"
TOOLS = ("ip", "bridge", "unshare", "nsenter", "mount", "ssh-keygen", SSHD)

SSHD_CONFIG = """
Port 22
ListenAddress 0.0.0.0
HostKey {folder}/{name}.key
AuthorizedKeysFile {folder}/user.key.pub
StrictModes no
UsePAM no
UseDNS no
PermitRootLogin prohibit-password
PasswordAuthentication no
PidFile none
"""


def missing() -> str:
    """Why machines cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"needs {', '.join(lacking)}, from Debian's iproute2, util-linux and openssh-server"
    probe = subprocess.run(["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "true"], check=False)
    return "" if probe.returncode == 0 else "needs network namespaces, which this sandbox forbids"


def restore_interrupt() -> None:
    """Let a child take Ctrl-C, even where this process was started with it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Machine:
    """One namespace, and its first process."""

    name: str
    number: int
    process: "subprocess.Popen[bytes]"

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    @property
    def port(self) -> str:
        """Its end of the cable, at the switch."""
        return f"port{self.number}"

    def all_processes(self) -> dict[int, str]:
        """Everything that runs in its network, by number."""
        found, network = {}, Path(f"/proc/{self.process.pid}/ns/net").readlink()
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                if (entry / "ns/net").readlink() == network:
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    @property
    def first(self) -> int:
        """The process that holds the namespaces: the child of unshare where processes have one of their own."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children and self.name.startswith("node") else self.process.pid

    def processes(self) -> dict[int, str]:
        """What runs there besides its SSH server, by number."""
        own = {self.process.pid, self.first}
        return {
            pid: text for pid, text in self.all_processes().items() if pid not in own and text and "sshd" not in text
        }

    def wait_until_empty(self, seconds: float = 20.0) -> dict[int, str]:
        """Return what still runs there when nothing should any more."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


@dataclass
class Cluster:
    """The machines, and ways to use and to hurt them."""

    machines: dict[str, Machine]
    folder: Path

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    @property
    def nodes(self) -> list[Machine]:
        return [machine for name, machine in self.machines.items() if name.startswith("node")]

    @property
    def known_hosts(self) -> Path:
        return self.folder / "home/.ssh/known_hosts"

    @property
    def ssh_config(self) -> Path:
        return self.folder / "home/.ssh/config"

    def switch(self, *words: str) -> None:
        """Run a command at the switch."""
        enter = ["nsenter", f"--target={self['switch'].first}", "--net"]
        subprocess.run([*enter, *words], check=True, capture_output=True)

    def spawn(
        self, *words: str, folder: Path, at: str = "head", env: dict[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """Start Python on a machine."""
        own = ["--pid"] if at != "head" else []
        enter = ["nsenter", f"--target={self[at].first}", "--net", "--mount", "--uts", *own, f"--wd={folder}", "--"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COLOSSAL_")}
        environment |= {"HOME": str(self.folder / "home"), "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        environment |= {"GLOO_SOCKET_IFNAME": "eth0", **(env or {})}
        environment.pop("SSH_AUTH_SOCK", None)
        return subprocess.Popen(
            [*enter, sys.executable, *words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=restore_interrupt,  # noqa: PLW1509 (it takes no lock)
        )

    def start(
        self, *words: str, folder: Path, at: str = "head", env: dict[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """Start ``colossal run`` on a machine."""
        return self.spawn("-m", "colossal.cli", "run", *words, folder=folder, at=at, env=env)

    def run(
        self, *words: str, folder: Path, at: str = "head", env: dict[str, str] | None = None
    ) -> tuple[int, str, str]:
        """Run it to its end; return exit code, output and errors."""
        process = self.start(*words, folder=folder, at=at, env=env)
        try:
            output, errors = process.communicate(timeout=120)
        finally:
            process.kill()
        return process.returncode, output, errors


def make_machine(stack: ExitStack, name: str, number: int, folder: Path) -> Machine:
    own = ["--pid", "--fork", "--kill-child", "--mount-proc"] if name.startswith("node") else []
    config = folder / f"{name}.sshd"
    if own:
        config.write_text(SSHD_CONFIG.format(folder=folder, name=name))
    words = [name, str(folder / "hosts"), *([str(config)] if own else [])]
    log = stack.enter_context((folder / f"{name}.log").open("wb"))
    process = subprocess.Popen(
        ["unshare", "--net", "--mount", "--uts", *own, sys.executable, str(MACHINE), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
    )
    stack.callback(process.wait, 20)
    stack.enter_context(process.stdout)
    stack.enter_context(process.stdin)  # closed first, which ends it
    return Machine(name, number, process)


def connect(cluster: Cluster, machine: Machine) -> None:
    """Lay a cable from the switch to the machine."""
    cluster.switch(
        "ip", "link", "add", machine.port, "type", "veth", "peer", "name", "eth0", "netns", str(machine.first)
    )
    cluster.switch("ip", "link", "set", machine.port, "master", "br0", "up")
    enter = ["nsenter", f"--target={machine.first}", "--net", "ip"]
    subprocess.run([*enter, "address", "add", f"{machine.address}/24", "dev", "eth0"], check=True)
    subprocess.run([*enter, "link", "set", "eth0", "up"], check=True)


def write_files(folder: Path, names: dict[str, int]) -> None:
    """Names, keys, and the user's SSH configuration."""
    home = folder / "home/.ssh"
    home.mkdir(parents=True)
    hosts = [f"{NETWORK}.{number} {name}" for name, number in names.items()]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
    for name in ["user", *names]:
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / f"{name}.key")]
        subprocess.run(words, check=True)
    (home / "config").write_text(f"User root\nIdentityFile {folder}/user.key\n")
    known = []
    for name, number in names.items():
        kind, key, _ = (folder / f"{name}.key.pub").read_text().split()
        known.append(f"{name},{NETWORK}.{number} {kind} {key}\n")
    (home / "known_hosts").write_text("".join(known))


@pytest.fixture(scope="session")
def machines(tmp_path_factory) -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("machines")
    names = {"head": 1, "node1": 11, "node2": 12, "node3": 13}
    write_files(folder, names)
    with ExitStack() as stack:
        made = {name: make_machine(stack, name, number, folder) for name, number in {"switch": 0, **names}.items()}
        for machine in made.values():
            assert machine.process.stdout.readline() == b"ready\n", (folder / f"{machine.name}.log").read_text()
        cluster = Cluster(made, folder)
        cluster.switch("ip", "link", "add", "br0", "type", "bridge")
        cluster.switch("ip", "link", "set", "br0", "up")
        for name in names:
            connect(cluster, made[name])
        yield cluster


@pytest.fixture
def cluster(machines) -> Iterator[Cluster]:
    """The machines, as they were made, and empty again afterwards."""
    files = {path: path.read_text() for path in (machines.known_hosts, machines.ssh_config)}
    yield machines
    for path, text in files.items():
        path.write_text(text)
    for node in machines.nodes:
        machines.switch("ip", "link", "set", node.port, "up")
        machines.switch("bridge", "link", "set", "dev", node.port, "isolated", "off")
    left = {node.name: found for node in machines.nodes if (found := node.wait_until_empty())}
    for found in left.values():
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert not left, f"A job must leave nothing behind. Found {left}."


@pytest.fixture
def program(tmp_path) -> Callable[[str], Path]:
    """Writes a program of a test, and returns its file."""

    def write(text: str, name: str = "program.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture(name="free_port")
def _free_port() -> int:
    return free_port()
