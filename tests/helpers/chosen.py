"""Long lists of cases: an ordinary run takes some of them, always the same; ``nox -s exhaustive`` takes all.

Where every case is a product of things that other tests look at one by one, some are enough to see that the product
works. A test that takes only some of its cases is marked ``chosen``.
"""

import os
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, TypeVar

from pagetest.results.sample import sample

Case = TypeVar("Case")

ALL = os.environ.get("COLOSSAL_CASES") == "all"


def chosen(cases: Sequence[Case], count: int, what: str) -> list[Case]:
    """Return some of the cases in their order, or all.

    Args:
        cases: All of them; each has a text of its own.
        count: How many an ordinary run takes.
        what: What they are cases of; other tests take others.
    """
    if ALL:
        return list(cases)
    names = sample(map(repr, cases), what, count)
    return [case for case in cases if repr(case) in names]


def crossed(*factors: Iterable[Any], one_in: int) -> list[tuple[Any, ...]]:
    """Return one in so many cases of a product, spread as in a Latin square, or all.

    Args:
        factors: What is crossed. Each value occurs if another factor has at least ``one_in`` of them; all pairs of two
            factors occur if a third has.
        one_in: Of how many cases an ordinary run takes one.
    """
    cases = [
        (sum(at for at, _ in case), tuple(value for _, value in case)) for case in product(*map(enumerate, factors))
    ]
    return [values for place, values in cases if ALL or place % one_in == 0]
