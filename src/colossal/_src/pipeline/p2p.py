"""Messages from one rank of a pipeline to another, in the order in which the sender works.

See [Note: order of messages] in `colossal._src.pipeline.schedule.p2p_messages`.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import distributed as dist

from colossal._src.comm import LostPeerGuard, count_collective
from colossal._src.pipeline.schedule import P2PMessage
from colossal._src.pipeline.schedule.p2p_messages import RecvOrder
from colossal.errors import ShapeError

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
_SUPPORTED_DTYPES = {*_DTYPES} - {torch.int16, torch.bool}  # by every backend; the bytes of the others are sent
_HEADER_LENGTH = 64


class TensorMeta(NamedTuple):
    """What a receiver must know of a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool  # whether its gradient goes back

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorMeta":
        """Describe a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def encode_metas(metas: Iterable[TensorMeta]) -> torch.Tensor:
    """Write metas into a tensor that has the same length whatever they are."""
    numbers = [0]
    for shape, dtype, requires_grad in metas:
        if dtype not in _DTYPES:
            raise ShapeError(
                f"Stages of a pipeline send tensors of {', '.join(map(str, _DTYPES))}. Found {dtype}. Convert it "
                "at the end of the stage."
            )
        numbers += [_DTYPES.index(dtype), requires_grad, len(shape), *shape]
        numbers[0] += 1
    if len(numbers) > _HEADER_LENGTH:
        raise ShapeError(
            f"What a stage sends is described by {_HEADER_LENGTH} numbers. Found {numbers[0]} tensors that need "
            f"{len(numbers)}. Split the model where fewer tensors pass."
        )
    return torch.tensor(numbers + [0] * (_HEADER_LENGTH - len(numbers)))


def decode_metas(header: torch.Tensor) -> tuple[TensorMeta, ...]:
    """Read what `encode_metas` wrote."""
    count, *numbers = header.tolist()
    found, place = [], 0
    for _ in range(count):
        dtype, requires_grad, length = numbers[place : place + 3]
        shape = tuple(numbers[place + 3 : place + 3 + length])
        found.append(TensorMeta(shape, _DTYPES[dtype], bool(requires_grad)))
        place += 3 + length
    return tuple(found)


@final
@dataclass
class P2PLink:
    """Both directions between this rank and another one of the pp axis."""

    peer: int  # the global rank of the other one
    sending: dist.ProcessGroup  # the group of messages to it
    receiving: dist.ProcessGroup  # the group of messages from it
    device: torch.device  # where tensors are
    num_sent: int = 0  # messages that were sent, which number them
    num_received: int = 0  # messages for which a receive was posted
    _pending_sends: deque[tuple[dist.Work | None, torch.Tensor]] = field(default_factory=deque)

    def send(self, tensor: torch.Tensor) -> None:
        """Send, without waiting."""
        tensor = tensor.detach().contiguous()
        count_collective("send", "pp", tensor.nbytes)
        with LostPeerGuard():
            work = dist.isend(_as_supported_dtype(tensor), self.peer, self.sending, tag=self.num_sent)
        self._pending_sends.append((work, tensor))
        self.num_sent += 1
        while len(self._pending_sends) > 1 and _is_completed(self._pending_sends[0][0]):
            self._pending_sends.popleft()

    def post(self, tensor: torch.Tensor) -> dist.Work | None:
        """Post a receive."""
        with LostPeerGuard():
            work = dist.irecv(_as_supported_dtype(tensor), self.peer, self.receiving, tag=self.num_received)
        self.num_received += 1
        return work

    def drain(self) -> None:
        """Wait until everything has left."""
        while self._pending_sends:
            wait(self._pending_sends.popleft()[0])


def wait(work: dist.Work | None) -> None:
    """Wait for a message."""
    if work is not None:
        with LostPeerGuard():
            work.wait()


def _as_supported_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, in a dtype that every backend carries."""
    return tensor if tensor.dtype in _SUPPORTED_DTYPES else tensor.view(-1).view(torch.uint8)


def _is_completed(work: dist.Work | None) -> bool:
    return work is None or work.is_completed()


@final
class RecvQueue:
    """What comes from one rank in one step."""

    def __init__(self, link: P2PLink, order: Iterable[P2PMessage], known: dict[int, tuple[TensorMeta, ...]]) -> None:
        self._link, self._order, self._known = link, RecvOrder(order), known
        self._posted: dict[P2PMessage, list[tuple[dist.Work | None, torch.Tensor]]] = {}

    def take(self, message: P2PMessage) -> list[torch.Tensor]:
        """Wait for a message."""
        for each in self._order.take(message, self._known):
            self._post(each)
        parts = self._posted.pop(message)
        for work, _ in parts:
            wait(work)
        return [tensor for _, tensor in parts]

    def _post(self, message: P2PMessage) -> None:
        if message.stage not in self._known:
            header = torch.empty(_HEADER_LENGTH, dtype=torch.int64, device=self._link.device)
            wait(self._link.post(header))
            self._known[message.stage] = decode_metas(header)
        parts: list[tuple[Any, torch.Tensor]] = []
        for shape, dtype, requires_grad in self._known[message.stage]:
            if requires_grad or not message.is_grad:
                tensor = torch.empty(shape, dtype=dtype, device=self._link.device)
                parts.append((self._link.post(tensor), tensor))
        self._posted[message] = parts
