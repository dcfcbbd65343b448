"""How the first rank tells the others what to compute.

The first rank schedules and samples. What the others have to do comes in messages, which it broadcasts: one for each
step. A message is an array of integers, in a buffer of a fixed size, which the records of most steps fit.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from colossal._src.cluster import ParallelMesh, ambient_mesh
from colossal._src.comm import Channel, gather_objects
from colossal._src.inference.config import InferenceConfig
from colossal._src.inference.step_record import Integers
from colossal.errors import CommunicationError, ConfigError

_HEADER = 2  # kind and length


class Message(IntEnum):
    """What the first rank is about to do."""

    STEP = 0  # compute a step; with its record
    LOGITS = 1  # compute all logits of a prompt; with its tokens
    GENERATE = 2  # generate for prompts that all ranks have
    OUTPUTS = 3  # return from that
    END = 4  # take no more requests
    FAILURE = 5  # raise; with what the first rank has raised


def form_mesh(config: InferenceConfig) -> ParallelMesh | None:
    """Arrange the ranks that shard a model; None for a single one."""
    if config.num_ranks == 1:
        return None
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size % config.num_ranks:
        raise ConfigError(
            f"A model is sharded over ranks that have found each other: their number is a multiple of tp_size times "
            f"pp_size. Found tp_size={config.tp_size}, pp_size={config.pp_size} and {world_size} rank(s). Call "
            f"colossal.launch_from_torch() first, in a program that `colossal run --nproc_per_node {config.num_ranks}` "
            "starts, or pass other sizes."
        )
    mesh = ambient_mesh()
    sizes = (config.tp_size, config.pp_size)
    if mesh is not None and mesh.tp_mode == "1d" and (mesh.size("tp"), mesh.size("pp")) == sizes:
        return mesh
    return ParallelMesh(tp=config.tp_size, pp=config.pp_size)


class Peers:
    """The ranks that shard a model, as its engine sees them."""

    def __init__(self, mesh: ParallelMesh, config: InferenceConfig) -> None:
        self.mesh = mesh
        self.is_first = mesh.rank("tp") == mesh.rank("pp") == 0
        # from the first rank to the first one of each stage, and from there to the others of the stage
        self._channels = [Channel(axis, mesh) for axis in ("pp", "tp") if axis == "tp" or mesh.rank("tp") == 0]
        self._groups = [mesh.group(axis) for axis in ("tp", "pp") if mesh.size(axis) > 1]
        size = _HEADER + 16 * config.max_batch_size + config.step_tokens
        self._buffer = torch.zeros(size, dtype=torch.int64, device="cpu")

    def send(self, kind: Message, values: Integers | Iterable[int] = ()) -> None:
        """On the first rank: broadcast a message."""
        array = values if isinstance(values, np.ndarray) else np.array(list(values), dtype=np.int64)
        content = torch.from_numpy(array)
        room = len(self._buffer) - _HEADER
        self._buffer[0], self._buffer[1] = int(kind), len(content)
        self._buffer[_HEADER : _HEADER + len(content)] = content[:room]
        self._broadcast(self._buffer)
        if len(content) > room:
            self._broadcast(content[room:].contiguous())

    def receive(self) -> tuple[Message, Integers]:
        """On another rank: wait for a message."""
        self._broadcast(self._buffer)
        kind, length = self._buffer[:_HEADER].tolist()
        values = self._buffer[_HEADER : _HEADER + length].clone()
        if missing := length - len(values):
            rest = values.new_zeros(missing)
            self._broadcast(rest)
            values = torch.cat([values, rest])
        return Message(kind), values.numpy()

    @contextmanager
    def telling_failures(self) -> Iterator[None]:
        """On the first rank: let the others, which wait for a message, raise too."""
        try:
            yield
        except BaseException as error:
            with suppress(CommunicationError):  # of a rank that is lost as well
                self.send(Message.FAILURE, list(f"{type(error).__name__}: {error}".encode()))
            raise

    def check_prompts(self, requests: str | None) -> None:
        """On all ranks: reject prompts that are not the same on all of them; None on a rank that takes any."""
        texts = [text for text in gather_objects(requests, self._groups) if text is not None]
        if len(set(texts)) > 1:
            raise ConfigError(
                "All ranks that shard a model pass generate the same prompts and parameters. Found different ones. "
                "Pass the same, or call generate on the first rank only, and follow on the others."
            )

    def share(self, outputs: Any) -> Any:
        """On all ranks: return what the first one passes."""
        return gather_objects(outputs, self._groups)[0]

    def _broadcast(self, values: torch.Tensor) -> None:
        for channel in self._channels:
            channel.broadcast([values])


def failure_of(values: Integers) -> CommunicationError:
    """What a rank raises that does not compute on, since the first one has failed."""
    reason = bytes(values.astype(np.uint8)).decode(errors="replace")
    return CommunicationError(
        f"The ranks that shard a model compute every step together. Found that the first one has failed: {reason}. "
        "Look for its error."
    )
