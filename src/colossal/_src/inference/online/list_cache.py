"""Results of queries that were served lately."""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any

from colossal.errors import ConfigError


class MissCacheError(LookupError):
    """A `ListCache` has not enough results for a query.

    Example:
        >>> from colossal.inference import MissCacheError
        >>> issubclass(MissCacheError, LookupError)
        True
    """


class ListCache:
    """Keeps several results for each of some queries, and forgets the query that was longest not asked for.

    A query is a hit when all its results are there: until then each answer adds one, so that what is picked of them
    varies as much as answers without a cache do.

    Args:
        cache_size: How many queries are kept.
        list_size: How many results are kept of each.
        fixed_keys: Queries that are never forgotten; they count among those that are kept.

    Raises:
        ConfigError: A size is below 1, or there are more fixed keys than queries that are kept.

    Source: the documented OPT service.

    Example:
        >>> from colossal.inference import ListCache
        >>> cache = ListCache(cache_size=1, list_size=2)
        >>> cache.add("a", 1)
        >>> cache.add("a", 2)
        >>> cache.get("a")
        [1, 2]
    """

    def __init__(self, cache_size: int, list_size: int, fixed_keys: Iterable[Hashable] = ()) -> None:
        self._fixed = frozenset(fixed_keys)
        if cache_size < 1 or list_size < 1:
            raise ConfigError(
                f"A cache keeps at least one query, and one result of each. Found cache_size={cache_size} and "
                f"list_size={list_size}. Raise them, or use no cache."
            )
        if len(self._fixed) > cache_size:
            raise ConfigError(
                f"A cache keeps all fixed keys. Found {len(self._fixed)} of them for cache_size={cache_size}. Raise "
                "cache_size, or fix fewer keys."
            )
        self._cache_size = cache_size
        self._list_size = list_size
        self._results: OrderedDict[Hashable, list[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> list[Any]:
        """Return all results of a query.

        Args:
            key: The query.

        Returns:
            `list_size` results, in the order in which they were added.

        Raises:
            MissCacheError: There are fewer.
        """
        with self._lock:
            results = self._results.get(key, [])
            if len(results) < self._list_size:
                raise MissCacheError(f"{key!r} has {len(results)} of {self._list_size} results")
            self._results.move_to_end(key)
            return list(results)

    def add(self, key: Hashable, value: Any) -> None:
        """Add a result of a query; beyond `list_size` it takes the place of the oldest one.

        Args:
            key: The query.
            value: The result.
        """
        with self._lock:
            if key not in self._results and not self._make_room(key):
                return
            results = self._results.setdefault(key, [])
            results.append(value)
            del results[: -self._list_size]
            self._results.move_to_end(key)

    def __len__(self) -> int:
        """How many queries have results."""
        return len(self._results)

    def _make_room(self, key: Hashable) -> bool:
        """Forget queries, the one first that was longest not asked for; False if all places are for fixed ones."""
        own_places = self._cache_size - len(self._fixed)
        if key in self._fixed:
            return True
        others = [each for each in self._results if each not in self._fixed]
        if not own_places:
            return False
        for each in others[: max(len(others) - own_places + 1, 0)]:
            del self._results[each]
        return True
