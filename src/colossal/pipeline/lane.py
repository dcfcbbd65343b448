"""Messages from one rank of a pipeline to another, in the order in which the sender works.

[Note: order of messages] Both sides know the schedule of every rank, so both know the order of all messages between two
ranks. The receiver posts its receives in that order, some of them ahead. Messages to later ranks and to earlier ones
have groups of their own where a backend carries out the messages between two ranks one after the other.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import distributed as dist

from colossal.cluster import ParallelMesh
from colossal.comm import count
from colossal.errors import ShapeError
from colossal.pipeline.placement import StagePlacement
from colossal.pipeline.schedule import Orders

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_HEADER_LENGTH = 64
_AHEAD = 2


class Description(NamedTuple):
    """What a receiver must know of a tensor before it comes.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        requires_grad: Whether its gradient goes back.

    Example:
        >>> import torch
        >>> from colossal.pipeline.lane import Description
        >>> Description.of(torch.ones(2, 3)).shape
        (2, 3)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Description":
        """Describe a tensor.

        Args:
            tensor: The tensor.

        Returns:
            Its description.
        """
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


class Message(NamedTuple):
    """Hidden states, or their gradients, of one micro-batch between two neighbouring stages.

    Attributes:
        is_grad: Whether it goes back.
        stage: The earlier of the two stages.
        microbatch: The micro-batch.

    Example:
        >>> from colossal.pipeline import Message
        >>> Message(False, stage=0, microbatch=1).stage
        0
    """

    is_grad: bool
    stage: int
    microbatch: int


def messages_between(orders: Orders, placement: StagePlacement, source: int, target: int) -> Iterator[Message]:
    """Go through the messages of a step from one rank to another, in the order of the sender.

    See [Note: order of messages].

    Args:
        orders: What each rank of the pp axis does.
        placement: Which rank has which stage.
        source: The rank that sends.
        target: The rank that receives.

    Yields:
        The messages.

    Example:
        >>> from colossal.pipeline import SCHEDULES, StagePlacement
        >>> from colossal.pipeline.lane import messages_between
        >>> place = StagePlacement(2)
        >>> [message.microbatch for message in messages_between(SCHEDULES["1f1b"](place, 3), place, 0, 1)]
        [0, 1, 2]
    """
    for kind, stage, microbatch in orders[source]:
        if kind == "F" and stage < placement.num_stages - 1 and placement.rank_of(stage + 1) == target:
            yield Message(False, stage, microbatch)
        if kind in "BI" and stage > 0 and placement.rank_of(stage - 1) == target:
            yield Message(True, stage - 1, microbatch)


def pack(descriptions: Iterable[Description]) -> torch.Tensor:
    """Write descriptions into a tensor that has the same length whatever they are.

    Args:
        descriptions: Of the tensors of a message.

    Returns:
        64 integers, of int64.

    Raises:
        ShapeError: They do not fit, or a dtype is not among those that are sent.

    Example:
        >>> import torch
        >>> from colossal.pipeline.lane import Description, pack, unpack
        >>> unpack(pack([Description((2, 3), torch.float32, True)]))
        (Description(shape=(2, 3), dtype=torch.float32, requires_grad=True),)
    """
    numbers = [0]
    for shape, dtype, requires_grad in descriptions:
        if dtype not in _DTYPES:
            raise ShapeError(
                f"Stages of a pipeline hand over tensors of {', '.join(map(str, _DTYPES))}. Found {dtype}. Convert it "
                "at the end of the stage."
            )
        numbers += [_DTYPES.index(dtype), requires_grad, len(shape), *shape]
        numbers[0] += 1
    if len(numbers) > _HEADER_LENGTH:
        raise ShapeError(
            f"What a stage hands over is described by {_HEADER_LENGTH} numbers. Found {numbers[0]} tensors that need "
            f"{len(numbers)}. Cut the model where fewer tensors pass."
        )
    return torch.tensor(numbers + [0] * (_HEADER_LENGTH - len(numbers)))


def unpack(header: torch.Tensor) -> tuple[Description, ...]:
    """Read what `pack` wrote.

    Args:
        header: 64 integers, of int64.

    Returns:
        The descriptions.
    """
    count, *numbers = header.tolist()
    found, place = [], 0
    for _ in range(count):
        dtype, requires_grad, length = numbers[place : place + 3]
        shape = tuple(numbers[place + 3 : place + 3 + length])
        found.append(Description(shape, _DTYPES[dtype], bool(requires_grad)))
        place += 3 + length
    return tuple(found)


@final
@dataclass
class Link:
    """Both directions between this rank and another one of the pp axis.

    Args:
        peer: The global rank of the other one.
        sending: The group of messages to it.
        receiving: The group of messages from it.
        device: Where tensors are.

    Attributes:
        num_sent: Messages that were sent, which number them.
        num_received: Messages for which a receive was posted.
    """

    peer: int
    sending: dist.ProcessGroup
    receiving: dist.ProcessGroup
    device: torch.device
    num_sent: int = 0
    num_received: int = 0
    _on_the_way: deque[tuple[dist.Work | None, torch.Tensor]] = field(default_factory=deque)

    def send(self, tensor: torch.Tensor) -> None:
        """Send, without waiting.

        Args:
            tensor: Any shape; kept until it has left.
        """
        tensor = tensor.detach().contiguous()
        count("send", "pp", tensor.nbytes)
        self._on_the_way.append((dist.isend(tensor, self.peer, self.sending, tag=self.num_sent), tensor))
        self.num_sent += 1
        while len(self._on_the_way) > 1 and _is_completed(self._on_the_way[0][0]):
            self._on_the_way.popleft()

    def post(self, tensor: torch.Tensor) -> dist.Work | None:
        """Post a receive.

        Args:
            tensor: Gets what is received.

        Returns:
            What to wait for.
        """
        work = dist.irecv(tensor, self.peer, self.receiving, tag=self.num_received)
        self.num_received += 1
        return work

    def drain(self) -> None:
        """Wait until everything has left."""
        while self._on_the_way:
            wait(self._on_the_way.popleft()[0])


def wait(work: dist.Work | None) -> None:
    """Wait for a message.

    Args:
        work: What `torch.distributed` returned; None where this rank is not concerned.
    """
    if work is not None:
        work.wait()


def _is_completed(work: dist.Work | None) -> bool:
    return work is None or work.is_completed()


def make_links(mesh: ParallelMesh) -> dict[int, Link]:
    """Make the links between this rank and all others of the pp axis.

    Args:
        mesh: The mesh.

    Returns:
        By the rank on the pp axis.
    """
    down = up = mesh.group("pp")
    if mesh.size("pp") > 1 and not mesh.accelerator.is_cpu:
        up, _ = mesh.blocks("pp", mesh.size("pp"))
    own, device = mesh.rank("pp"), mesh.accelerator.get_current_device()
    return {
        rank: Link(peer, *((down, up) if rank > own else (up, down)), device)
        for rank, peer in enumerate(mesh.ranks("pp"))
        if rank != own
    }


@final
class Inbox:
    """What comes from one rank in one step.

    Args:
        link: The link to it.
        order: The messages that it sends to this rank, in its order.
        known: Descriptions of hidden states, by the stage that makes them; those that come are added.
    """

    def __init__(self, link: Link, order: Iterable[Message], known: dict[int, tuple[Description, ...]]) -> None:
        self._link, self._order, self._known = link, deque(order), known
        self._posted: dict[Message, list[tuple[dist.Work | None, torch.Tensor]]] = {}

    def take(self, message: Message) -> list[torch.Tensor]:
        """Wait for a message.

        Args:
            message: Which one.

        Returns:
            Its tensors.
        """
        while message not in self._posted:
            self._post()
        parts = self._posted.pop(message)
        while self._order and len(self._posted) < _AHEAD and self._order[0].stage in self._known:
            self._post()
        for work, _ in parts:
            wait(work)
        return [tensor for _, tensor in parts]

    def _post(self) -> None:
        message = self._order.popleft()
        if message.stage not in self._known:
            header = torch.empty(_HEADER_LENGTH, dtype=torch.int64, device=self._link.device)
            wait(self._link.post(header))
            self._known[message.stage] = unpack(header)
        parts: list[tuple[Any, torch.Tensor]] = []
        for shape, dtype, requires_grad in self._known[message.stage]:
            if requires_grad or not message.is_grad:
                tensor = torch.empty(shape, dtype=dtype, device=self._link.device)
                parts.append((self._link.post(tensor), tensor))
        self._posted[message] = parts
