"""One process of a process group that is being formed."""

from dataclasses import dataclass
from numbers import Integral
from typing import final

from colossal.errors import LaunchError


@final
@dataclass(frozen=True)
class ProcessSpec:
    """The rank of a process, the world size, and the address of the rendezvous."""

    rank: int
    world_size: int
    host: str
    port: int
    local_rank: int | None

    def __post_init__(self) -> None:
        for name in ("rank", "world_size", "port"):
            if not isinstance(number := getattr(self, name), Integral):
                raise LaunchError(
                    f"{name} is an integer. Found {number!r}. Pass one; get_default_parser() reads it as --{name}."
                )
        if self.world_size < 1:
            raise LaunchError(f"A job has at least 1 process. Found world_size={self.world_size}. Pass 1 or more.")
        if not 0 <= self.rank < self.world_size:
            raise LaunchError(
                f"The rank of a process is between 0 and world_size - 1. Found rank={self.rank} in a world of "
                f"{self.world_size}. Number the processes from 0, or raise world_size."
            )
        if not 0 < self.port < 2**16:
            raise LaunchError(f"A port is between 1 and 65535. Found port={self.port}. Pick a free one, such as 29500.")
        if not self.host:
            raise LaunchError(
                "All processes meet at the host of rank 0. Found an empty host. Pass its name or address."
            )

    @property
    def address(self) -> str:
        """Host and port, an IPv6 address in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"
