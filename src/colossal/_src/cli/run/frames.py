"""The frames that a node's supervisor sends, taken apart again."""

from collections.abc import Iterator
from typing import final

from colossal._src.cli.run import supervisor

_NOISE_BYTES = 65536


@final
class Frames:
    """Splits a stream of bytes into frames.

    What comes before the first one is noise: a login shell's greeting, or a complaint that there is no Python.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._begun = False

    @property
    def begun(self) -> bool:
        """Whether the supervisor has answered."""
        return self._begun

    @property
    def noise(self) -> str:
        """What came instead of an answer."""
        return "" if self._begun else self._rest.decode(errors="replace").strip()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Add received bytes; yield letter and content of each complete frame."""
        self._rest += data
        if not self._begun and not self._begin():
            return
        head = supervisor.FRAME.size
        while len(self._rest) >= head:
            letter, length = supervisor.FRAME.unpack_from(self._rest)
            if len(self._rest) < head + length:
                return
            content, self._rest = self._rest[head : head + length], self._rest[head + length :]
            yield letter, content

    def _begin(self) -> bool:
        noise, magic, rest = self._rest.partition(supervisor.MAGIC)
        self._begun = bool(magic)
        self._rest = rest if magic else noise[-_NOISE_BYTES:]
        return self._begun
