"""Ports of this machine."""

import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port that nobody listens at now, nor will by chance: it is none of those that the kernel gives away."""
    first = int(_EPHEMERAL.read_text(encoding="ascii").split()[0]) if _EPHEMERAL.exists() else 32768
    draws = random.SystemRandom()  # tests that run beside this one and are seeded alike draw other ports
    while True:
        port = draws.randrange(10240, first) if first > 11000 else 0
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return probe.getsockname()[1]
