"""How ranks talk to each other here."""

import os
import socket
from collections.abc import Iterator

from colossal._src.cli.check.report import Row, Section

TITLE = "communication"
_NEEDED_FOR = {"gloo": "cpu", "nccl": "cuda"}


def look() -> Iterator[Row]:
    """Look at the backends of torch, and at the name of this host, by which gloo finds its network interface."""
    from torch import distributed as dist

    if not dist.is_available():
        advice = "Install a build of torch with torch.distributed."
        yield Row(TITLE, "torch.distributed", "problem", "not in this torch", False, advice)
        return
    device = _device()
    needed = _NEEDED_FOR | {_backend_of(device): device}
    for name, user in needed.items():
        yield _backend(name, user, built=dist.is_backend_available(name), device=device)
    yield _host_name()
    yield _link_cost()


def _device() -> str:
    from colossal.accelerator import get_accelerator
    from colossal.errors import ConfigError

    try:
        return get_accelerator().name
    except ConfigError:  # reported by the section of the devices
        return "cpu"


def _backend_of(device: str) -> str:
    from colossal.accelerator import get_accelerator

    return get_accelerator(device).communication_backend


def _backend(name: str, user: str, *, built: bool, device: str) -> Row:
    if built:
        return Row(TITLE, name, "ok", f"built into torch, for {user}", True)
    if user != device:
        return Row(TITLE, name, "ok", f"not in this torch; not needed on {device}", False)
    return Row(TITLE, name, "problem", "not in this torch", False, f"Install a build of torch with {name}.")


def _host_name() -> Row:
    name = socket.gethostname()
    forced = os.environ.get("GLOO_SOCKET_IFNAME")
    if forced:
        there = {interface for _, interface in socket.if_nameindex()}
        absent = [one for one in forced.split(",") if one not in there]
        if absent:
            advice = f"Set it to one of {', '.join(sorted(there))}, or unset it."
            return Row(
                TITLE, "host name", "problem", f"GLOO_SOCKET_IFNAME names no interface: {absent[0]}", name, advice
            )
        return Row(TITLE, "host name", "ok", f"{name}; gloo uses the interface {forced}", name)
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(name, None)}
    except OSError:
        advice = "Add it to /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface that leads to the other nodes."
        return Row(TITLE, "host name", "note", f"{name}, which has no address; gloo uses the loopback", name, advice)
    return Row(TITLE, "host name", "ok", f"{name} is {', '.join(sorted(map(str, addresses)))}", name)


def _link_cost() -> Row:
    from colossal._src.cluster import ENVIRONMENT_VARIABLE, link_cost_from_environment
    from colossal.errors import ConfigError

    try:
        costs = link_cost_from_environment()
    except ConfigError as error:
        advice = f"Unset {ENVIRONMENT_VARIABLE}, or let it name another file: no mesh can be made with this one."
        return Row(TITLE, "cost of links", "problem", str(error), None, advice)
    if costs is None:
        return Row(TITLE, "cost of links", "ok", "not measured; colossal benchmark --collectives would")
    axes = ", ".join(f"{axis} {cost.size}" for axis, cost in costs.axes.items())
    where = f"{costs.origin.backend} on {', '.join(costs.origin.hosts)}" if costs.origin else "assumed"
    return Row(TITLE, "cost of links", "ok", f"{axes}, {where}", sorted(costs.axes))


SECTION = Section(TITLE, look)
