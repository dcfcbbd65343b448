"""Objects that adjacent ranks of a pipeline send to each other, for schedules of a program's own."""

import json
from typing import Any, final

import torch
from torch import distributed as dist

from colossal._src.comm import Channel
from colossal._src.legacy.mesh import RankGrid, form_further_group
from colossal._src.legacy.notice import superseded
from colossal._src.legacy.pipeline.packing import pack, unpack
from colossal._src.legacy.pipeline.stage_manager import GridStageManager
from colossal.accelerator import get_accelerator
from colossal.errors import ConfigError

Handles = list[dist.Work]
Received = tuple[Any, Handles]


@final
class PipelineP2PCommunication:
    """Sends objects with tensors in them to the ranks before and after; nothing is pickled.

    Superseded by ``booster.execute_pipeline``, which sends what a schedule needs.

    Objects are tensors, numbers, texts, None, and lists, tuples and dicts of them. A send does not wait: before a
    program ends, it waits for the last ones. What a receive returns is there. Every message describes itself, whatever
    is passed for metadata.

    Args:
        stage_manager: The position of this rank.
        overlap_p2p: Whether a send returns before its message has left.

    Communication: a group of each two adjacent ranks is formed for each direction; all ranks of the pipeline must call.
    Messages are broadcasts in these groups.

    Example:
        >>> import torch
        >>> from colossal.legacy.cluster import ProcessGroupMesh
        >>> from colossal.legacy.pipeline import PipelineP2PCommunication, GridStageManager
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     manager = GridStageManager(ProcessGroupMesh(2), 0)
        ...     p2p = PipelineP2PCommunication(manager)
        ...     if manager.is_first_stage():
        ...         for work in p2p.send_forward({"hidden": torch.arange(3)}):
        ...             work.wait()
        ...         return None
        ...     return p2p.recv_forward()[0]["hidden"].tolist()
        >>> run_threads(program, 2)
        [None, [0, 1, 2]]
    """

    def __init__(self, stage_manager: GridStageManager, overlap_p2p: bool = True) -> None:
        superseded("PipelineP2PCommunication", "booster.execute_pipeline(...)")
        self.stage_manager, self.overlap_p2p = stage_manager, overlap_p2p
        ranks = stage_manager.get_ranks()
        # One group for each direction: a broadcast back must not be taken for one forward. The last rank and the first
        # are adjacent too, as in an interleaved pipeline.
        rounds = zip(ranks, ranks[1:] + ranks[:1], strict=True) if len(ranks) > 1 else ()
        pairs = [pair for first, second in rounds for pair in ((first, second), (second, first))]
        self._channels = {pair: _channel_of(pair) for pair in sorted({*pairs})}
        self._pending: list[tuple[dist.Work, torch.Tensor]] = []

    def send_forward(self, output_object: Any, next_rank: int | None = None, send_metadata: bool = True) -> Handles:  # noqa: ARG002
        """Send to the next rank.

        Args:
            output_object: What is sent.
            next_rank: The global rank; the next one by default.
            send_metadata: Accepted for programs that pass it.

        Returns:
            What can be waited for.

        Raises:
            UnsupportedError: The object holds something else than a message can.

        Communication: broadcast, pp.
        """
        return self._settle(self._send(output_object, self._next(next_rank)))

    def send_backward(self, input_object: Any, prev_rank: int | None = None, send_metadata: bool = True) -> Handles:  # noqa: ARG002
        """Send to the rank before.

        Args:
            input_object: What is sent.
            prev_rank: The global rank; the one before by default.
            send_metadata: Accepted for programs that pass it.

        Returns:
            What can be waited for.

        Raises:
            UnsupportedError: The object holds something else than a message can.

        Communication: broadcast, pp.
        """
        return self._settle(self._send(input_object, self._prev(prev_rank)))

    def recv_forward(self, prev_rank: int | None = None, metadata_recv: Any = None) -> Received:  # noqa: ARG002
        """Receive from the rank before.

        Args:
            prev_rank: The global rank; the one before by default.
            metadata_recv: Accepted for programs that pass it.

        Returns:
            The object, and an empty list: there is nothing left to wait for.

        Communication: broadcast, pp.
        """
        return self._recv(self._prev(prev_rank)), []

    def recv_backward(self, next_rank: int | None = None, metadata_recv: Any = None) -> Received:  # noqa: ARG002
        """Receive from the next rank.

        Args:
            next_rank: The global rank; the next one by default.
            metadata_recv: Accepted for programs that pass it.

        Returns:
            The object, and an empty list: there is nothing left to wait for.

        Communication: broadcast, pp.
        """
        return self._recv(self._next(next_rank)), []

    def send_forward_recv_backward(self, input_object: Any, next_rank: int | None = None, **_options: Any) -> Received:
        """Send to the next rank and receive from it.

        Args:
            input_object: What is sent.
            next_rank: The global rank; the next one by default.
            **_options: ``send_metadata``, ``metadata_recv`` and others, accepted for programs that pass them.

        Returns:
            What was received, and what can be waited for.

        Communication: broadcast, pp, both ways.
        """
        handles = self._send(input_object, self._next(next_rank))
        return self._recv(self._next(next_rank)), self._settle(handles)

    def send_backward_recv_forward(self, input_object: Any, prev_rank: int | None = None, **_options: Any) -> Received:
        """Send to the rank before and receive from it.

        Args:
            input_object: What is sent.
            prev_rank: The global rank; the one before by default.
            **_options: ``send_metadata``, ``metadata_recv`` and others, accepted for programs that pass them.

        Returns:
            What was received, and what can be waited for.

        Communication: broadcast, pp, both ways.
        """
        handles = self._send(input_object, self._prev(prev_rank))
        return self._recv(self._prev(prev_rank)), self._settle(handles)

    def send_forward_recv_forward(
        self, input_object: Any, prev_rank: int | None = None, next_rank: int | None = None, **_options: Any
    ) -> Received:
        """Send to the next rank and receive from the one before.

        Args:
            input_object: What is sent.
            prev_rank: The global rank that sends; the one before by default.
            next_rank: The global rank that receives; the next one by default.
            **_options: ``send_metadata``, ``metadata_recv`` and others, accepted for programs that pass them.

        Returns:
            What was received, and what can be waited for.

        Communication: broadcast, pp, both ways.
        """
        handles = self._send(input_object, self._next(next_rank))
        return self._recv(self._prev(prev_rank)), self._settle(handles)

    def send_backward_recv_backward(
        self, input_object: Any, prev_rank: int | None = None, next_rank: int | None = None, **_options: Any
    ) -> Received:
        """Send to the rank before and receive from the next one.

        Args:
            input_object: What is sent.
            prev_rank: The global rank that receives; the one before by default.
            next_rank: The global rank that sends; the next one by default.
            **_options: ``send_metadata``, ``metadata_recv`` and others, accepted for programs that pass them.

        Returns:
            What was received, and what can be waited for.

        Communication: broadcast, pp, both ways.
        """
        handles = self._send(input_object, self._prev(prev_rank))
        return self._recv(self._next(next_rank)), self._settle(handles)

    def _prev(self, rank: int | None) -> int:
        return self.stage_manager.get_prev_rank() if rank is None else rank

    def _next(self, rank: int | None) -> int:
        return self.stage_manager.get_next_rank() if rank is None else rank

    def _channel(self, source: int, target: int) -> Channel:
        if (source, target) not in self._channels:
            raise ConfigError(
                "A rank of a pipeline sends to the one before and the one after it. Found a message of rank "
                f"{source} to rank {target} of the ranks {self.stage_manager.get_ranks()}. Send it from rank to "
                "rank."
            )
        return self._channels[source, target]

    def _send(self, value: Any, target: int) -> Handles:
        channel = self._channel(self.stage_manager.get_rank(), target)
        device = get_accelerator().get_current_device()
        text, *tensors = pack(value, torch.device("cpu"))
        kinds = [(str(each.dtype).partition(".")[2], list(each.shape), each.requires_grad) for each in tensors]
        header = list(json.dumps([text.tolist(), kinds]).encode())
        sent = [torch.tensor([len(header)], device=device), torch.tensor(header, dtype=torch.uint8, device=device)]
        # As bytes, which every backend carries.
        sent += [each.detach().to(device).contiguous().reshape(-1).view(torch.uint8) for each in tensors]
        self._pending = [each for each in self._pending if not each[0].is_completed()]
        works: Handles = []
        for each in sent:
            work = channel.start_broadcast(each, 0)
            if work is not None:
                works.append(work)
                # The backend reads the tensor later: it must not be freed before.
                self._pending.append((work, each))
        return works

    def _settle(self, works: Handles) -> Handles:
        """Wait until a message has left, after what comes meanwhile was received; with overlap, do not."""
        for work in () if self.overlap_p2p else works:
            work.wait()
        return works

    def _recv(self, source: int) -> Any:
        channel = self._channel(source, self.stage_manager.get_rank())
        device = get_accelerator().get_current_device()

        def receive(length: int, dtype: torch.dtype) -> torch.Tensor:
            buffer = torch.empty(length, dtype=dtype, device=device)
            work = channel.start_broadcast(buffer, 0)
            if work is not None:
                work.wait()
            return buffer

        length = int(receive(1, torch.int64).item())
        text, kinds = json.loads(bytes(receive(length, torch.uint8).tolist()))
        tensors: list[torch.Tensor] = []
        for name, shape, requires_grad in kinds:
            dtype: torch.dtype = getattr(torch, name)
            received = receive(torch.Size(shape).numel() * dtype.itemsize, torch.uint8)
            tensors.append(received.view(dtype).reshape(shape).requires_grad_(requires_grad))
        return unpack([torch.tensor(text, dtype=torch.uint8, device="cpu"), *tensors])


def _channel_of(pair: tuple[int, int]) -> Channel:
    """Form the group of two ranks, the sender first; other ranks of the pipeline call as well."""
    grid = RankGrid(torch.tensor(pair, device="cpu").reshape(2, 1, 1))
    grid.set_group("pp", form_further_group(pair))
    return Channel("pp", grid.as_mesh())
