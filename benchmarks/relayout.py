"""How long it takes to find the cheapest way between two layouts: at first, and when it is remembered.

Every pair of layouts is searched in a new order, after the caches were emptied; the bars are 1 ms and 5 us.

    python benchmarks/relayout.py
"""

import argparse
import itertools
import random
import statistics
import time

from colossal._src.tensor import relayout_path, relayout_step
from colossal.tensor import Layout, greedy_path, one_step_layouts, plan_relayout

CASES = (((2, 2), 2), ((2, 2), 3), ((2, 4), 3), ((2, 2, 2), 2), ((2, 2, 2), 3))
REPEATS = 20


def all_layouts(dims: int, grid: tuple[int, ...]) -> list[Layout]:
    """Every layout without partial sums."""
    found = {Layout((16,) * dims, grid=grid): None}
    waiting = list(found)
    while waiting:
        for _, layout in one_step_layouts(waiting.pop()):
            if layout not in found:
                found[layout] = None
                waiting.append(layout)
    return list(found)


def microseconds(source: Layout, target: Layout) -> float:
    """Time one call."""
    started = time.perf_counter()
    plan_relayout(source, target, itemsize=4)
    return 1e6 * (time.perf_counter() - started)


def main() -> None:
    """Print a line for each grid."""
    parser = argparse.ArgumentParser(description="Time the search for ways between layouts.")
    parser.add_argument("--pairs", type=int, default=2000, help="of layouts, at most, for each grid")
    most_pairs = parser.parse_args().pairs
    random.seed(0)
    print(
        f"{'grid':<12}{'dims':>5}{'pairs':>7}{'first of all':>14}{'cold':>8}{'p99':>8}{'cached':>8}{'greedy/best':>13}"
    )
    for grid, dims in CASES:
        layouts = all_layouts(dims, grid)
        pairs = list(itertools.product(layouts, layouts))
        pairs = random.sample(pairs, min(most_pairs, len(pairs)))
        first = []
        for source, target in random.sample(pairs, min(REPEATS, len(pairs))):
            relayout_path._PATHS.clear()  # noqa: SLF001 (a cold start is measured)
            relayout_step.neighbor_specs.cache_clear()
            first.append(microseconds(source, target))
        relayout_path._PATHS.clear()  # noqa: SLF001 (a cold start is measured)
        cold = [microseconds(source, target) for source, target in pairs]
        cached = [microseconds(source, target) for source, target in pairs]
        greedy, best = (
            sum(search(source, target, 4).num_bytes for source, target in pairs)
            for search in (greedy_path, plan_relayout)
        )
        assert greedy >= best, "the cheapest way costs more than a greedy one"
        tail = statistics.quantiles(cold, n=100)[-1]
        print(
            f"{grid!s:<12}{dims:>5}{len(pairs):>7}{statistics.median(first):>11.0f} us{statistics.median(cold):>8.0f}"
            f"{tail:>8.0f}{statistics.median(cached):>8.1f}{greedy / best:>13.2f}"
        )


if __name__ == "__main__":
    main()
