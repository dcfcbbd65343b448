"""The pool of pages that hold keys and values: who owns each, and which prefix of tokens it can serve again.

[Note: owners and the prefix index]
A page is owned by the sequences whose tables have it. A page that is full enters the prefix index under a hash of its
tokens and of the hash of the page before it, so that one look-up answers for the whole prefix. Tables only grow at the
end and the number of a page in them never changes: two sequences that compute the same tokens in the same step keep
their own copies, of which the index has the first. A page without owners keeps its place in the index until it is
allocated again, the least recently released first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from colossal.errors import ConfigError

NULL_PAGE = 0
"""Never allocated: positions that hold no token read it, and nothing writes it."""

ROOT_HASH = b""
"""The hash before the first page of a sequence."""


def hash_page(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash the tokens of a page together with all before it."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class PagePool:
    """Counts the owners of each page, and finds pages by the prefix that they hold."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ConfigError(
                "A pool has at least one page of at least one token. "
                f"Found num_pages={num_pages}, page_size={page_size}. Raise num_blocks or block_size."
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self._owners = [0] * (num_pages + 1)
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        # The first is allocated next: pages that hold no prefix, then those that do, the least recently released first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_pages + 1))

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages without an owner that hold a prefix."""
        return sum(page in self._hash_of for page in self._free)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages this many tokens take."""
        return -(-num_tokens // self.page_size)

    def can_allocate(self, count: int, shared: Iterable[int] = ()) -> bool:
        """Whether this many pages are free, besides those among `shared`."""
        return count <= len(self._free) - sum(not self._owners[page] for page in shared)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Find the pages of the longest prefix that the pool holds."""
        pages: list[int] = []
        for digest in hashes:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def allocate(self, count: int) -> list[int]:
        """Give pages to one owner; what they held is lost."""
        if not self.can_allocate(count):
            raise ConfigError(
                f"{count} pages are to be allocated. Found {self.num_free} of {self.num_pages} free. "
                "Ask can_allocate first."
            )
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
            digest = self._hash_of.pop(page, None)
            if digest is not None:
                del self._page_of[digest]
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add an owner to pages that were matched."""
        for page in pages:
            if not self._owners[page]:
                del self._free[page]
            self._owners[page] += 1

    def register(self, page: int, digest: bytes) -> None:
        """Let a page that is full be found by its prefix, unless another one is already."""
        if not self._owners[page]:
            raise ConfigError(f"A page is registered by its owner. Found page {page}, which has none.")
        if digest not in self._page_of and page not in self._hash_of:
            self._page_of[digest] = page
            self._hash_of[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """Remove an owner from each page of a table."""
        for page in reversed(pages):  # the end of a prefix is of use only while its beginning is there: it goes first
            if not self._owners[page]:
                raise ConfigError(f"A page is released by its owner. Found page {page}, which has none.")
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free[page] = None
                if page not in self._hash_of:
                    self._free.move_to_end(page, last=False)

    def forget_prefixes(self) -> None:
        """Empty the index: after the weights have changed, no page holds what they would compute."""
        self._page_of.clear()
        self._hash_of.clear()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare owner counts, free pages and index with the tables of all sequences."""
        owners = [0] * (self.num_pages + 1)
        for page in (page for table in tables for page in table):
            owners[page] += 1
        free = {page for page in range(1, self.num_pages + 1) if not owners[page]}
        inverse = {page: digest for digest, page in self._page_of.items()}
        if owners != self._owners or free != set(self._free) or inverse != self._hash_of or owners[NULL_PAGE]:
            raise ConfigError(
                f"Every page is free or in the tables of its owners. Found owners {self._owners} for tables that "
                f"count {owners}, and free pages {sorted(self._free)}."
            )
