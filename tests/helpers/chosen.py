"""Long lists of cases: an ordinary run takes some of them, always the same; ``nox -s exhaustive`` takes all.

Where every case is a product of things that other tests look at one by one, some are enough to see that the product
works. A test that takes only some of its cases is marked ``chosen``.
"""

import os
from collections.abc import Sequence
from typing import TypeVar

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
