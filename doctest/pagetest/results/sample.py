"""A sample of names, the same on every machine and at every commit."""

import hashlib
from collections.abc import Iterable


def sample(names: Iterable[str], what: str, size: int) -> frozenset[str]:
    """Some of the names; another purpose takes others of the same names."""
    return frozenset(sorted(names, key=lambda name: hashlib.sha256(f"{what}\0{name}".encode()).digest())[:size])
