"""A sample chosen by the hash of the commit, so that the next commit gets another one."""

import hashlib
from collections.abc import Iterable


def sample(names: Iterable[str], commit: str, size: int) -> frozenset[str]:
    """A sample of names, the same for the same commit."""
    return frozenset(sorted(names, key=lambda name: hashlib.sha256(f"{commit}\0{name}".encode()).digest())[:size])
