"""The requests of an engine that are not finished."""

from collections.abc import Iterable

from colossal._src.inference.preparation import Request
from colossal._src.inference.requests import RequestOutput, Sequence
from colossal._src.inference.text import TextStream
from colossal.errors import ConfigError

RequestId = int | str


class RequestTable:
    """Finds requests by their ids, and by their sequences."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, Request] = {}
        self._owner: dict[Sequence, RequestId] = {}
        self._next_id = 0

    def __len__(self) -> int:
        """How many there are."""
        return len(self._requests)

    def ids(self) -> list[RequestId]:
        """Those of all requests, in the order in which they came."""
        return list(self._requests)

    def get(self, request_id: RequestId) -> Request | None:
        """Return a request, or None if there is none of this id."""
        return self._requests.get(request_id)

    def owner(self, sequence: Sequence) -> RequestId:
        """Return the id of the request that a sequence answers."""
        return self._owner[sequence]

    def stream(self, sequence: Sequence) -> TextStream:
        """Return the text of a sequence."""
        return self._requests[self._owner[sequence]].sequences[sequence]

    def add(self, request_id: RequestId | None, request: Request) -> RequestId:
        """Add a request; without an id it gets a number."""
        if request_id in self._requests:
            raise ConfigError(
                f"Each request that is not finished has an id of its own. Found {request_id!r}, which is in use. Pass "
                "another one, or none."
            )
        found = self._new_id() if request_id is None else request_id
        self._requests[found] = request
        self._owner |= dict.fromkeys(request.sequences, found)
        return found

    def collect(self, request_ids: Iterable[RequestId]) -> list[RequestOutput]:
        """What there is of requests; those that are finished are forgotten."""
        outputs = [self._requests[request_id].output(request_id) for request_id in request_ids]
        for output in outputs:
            if output.is_finished:
                for sequence in self._requests.pop(output.request_id).sequences:
                    del self._owner[sequence]
        return outputs

    def _new_id(self) -> int:
        while self._next_id in self._requests:
            self._next_id += 1
        self._next_id += 1
        return self._next_id - 1
