"""The order in which a pass uses the chunks, which is recorded once and then predicts the next passes."""

from bisect import bisect_right
from typing import final

_NEVER = 1 << 60


@final
class AccessTrace:
    """The chunks that a forward and a backward pass use, one after the other.

    The first pass is recorded. While the next one follows the same order, the trace predicts what comes next; as soon
    as it does not, nothing is known until a pass has been recorded again. Consecutive uses of one chunk count once.

    Attributes:
        period: How many uses this pass has seen.
        is_known: Whether the pass has followed the recorded order so far.
        activations: For each period of the recorded pass, the most bytes of non-model data that were there.

    Source: Fang et al., "Parallel Training of Pre-Trained Models via Chunk-Based Dynamic Memory Management", 2021,
    https://arxiv.org/abs/2108.05818, section 8.

    Example:
        >>> from colossal.zero.gemini import AccessTrace
        >>> trace = AccessTrace()
        >>> for chunk in (0, 1, 0):
        ...     trace.visit(chunk)
        >>> trace.begin()
        >>> trace.visit(0)
        >>> [trace.next_use(chunk) for chunk in (0, 1)]
        [2, 1]
    """

    def __init__(self) -> None:
        self.period = 0
        self.is_known = False
        self.activations: list[int] = []
        self._order: list[int] = []
        self._places: dict[int, list[int]] = {}
        self._seen: list[int] = []
        self._peaks: list[int] = []
        self._last_use: dict[int, int] = {}
        self._clock = 0

    @property
    def recorded(self) -> list[int]:
        """The chunks of the recorded pass, in order."""
        return list(self._order)

    @property
    def peaks(self) -> list[int]:
        """For each period of the running pass, the most bytes of non-model data that were seen."""
        return list(self._peaks)

    def begin(self) -> None:
        """Begin a pass; the one before becomes what is known, unless it is so already."""
        if self._seen and self._seen != self._order:
            self._order, self.activations = self._seen, self._peaks
            self._places = {}
            for place, chunk in enumerate(self._order):
                self._places.setdefault(chunk, []).append(place)
        elif self._seen:
            self.activations = [max(pair) for pair in zip(self.activations, self._peaks, strict=True)]
        self._seen, self._peaks, self.period = [], [], 0
        self.is_known = bool(self._order)

    def visit(self, chunk: int) -> None:
        """Note that a chunk is used.

        Args:
            chunk: Its number.
        """
        self._clock += 1
        self._last_use[chunk] = self._clock
        if self._seen and self._seen[-1] == chunk:
            return
        self.is_known = self.is_known and self.period < len(self._order) and self._order[self.period] == chunk
        self._seen.append(chunk)
        self._peaks.append(0)
        self.period += 1

    def note_activations(self, num_bytes: int) -> None:
        """Note how much non-model data there is.

        Args:
            num_bytes: Its bytes.
        """
        if self._peaks:
            self._peaks[-1] = max(self._peaks[-1], num_bytes)

    def next_use(self, chunk: int) -> int:
        """Return how far ahead the next use of a chunk is.

        Args:
            chunk: Its number.

        Returns:
            A number of periods, counted into the next pass if need be. If the way is not known, a number that is the
            larger, the longer ago the last use is.
        """
        if not self.is_known:
            return _NEVER - self._last_use.get(chunk, 0)
        places = self._places.get(chunk, [])
        if not places:
            return _NEVER
        now = self.period - 1
        at = bisect_right(places, now)
        return places[at] - now if at < len(places) else len(self._order) + places[0] - now

    def coming(self, number: int) -> list[int]:
        """Return which chunks are used next in this pass.

        Args:
            number: How many different ones at most.

        Returns:
            Their numbers, the next first; none if the way is not known.
        """
        if not self.is_known:
            return []
        now = self._seen[-1] if self._seen else None
        found: dict[int, None] = {}
        for chunk in self._order[self.period :]:
            if len(found) == number:
                break
            if chunk != now:
                found[chunk] = None
        return list(found)

    def expected_activations(self) -> int:
        """Return how much non-model data there is going to be until the next use of another chunk.

        Returns:
            Bytes; 0 if the way is not known.
        """
        if not self.is_known or not self.activations:
            return 0
        place = max(self.period - 1, 0)
        return max(self.activations[place : place + 2], default=0)
