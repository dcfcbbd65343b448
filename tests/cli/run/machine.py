"""The first process of a machine that a test makes: it starts an SSH server, and ends when the test goes away.

It runs in namespaces of its own (network, mounts, host name, processes). When it exits, the kernel kills whatever else
runs in them and takes back the network.
"""

import os
import signal
import socket
import subprocess
import sys
import time


def reap(*_: object) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def main(name: str, hosts: str, config: str = "") -> None:
    socket.sethostname(name)
    for words in (["mount", "--bind", hosts, "/etc/hosts"], ["ip", "link", "set", "lo", "up"]):
        subprocess.run(words, check=True)
    if config:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, reap)
        os.system("mount -t tmpfs tmpfs /run && mkdir /run/sshd")  # noqa: S605
        subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", config], stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while not answers(22):
            assert time.monotonic() < deadline, "sshd does not answer"
            time.sleep(0.05)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
