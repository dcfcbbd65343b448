"""One rank of a benchmark that the command starts by itself: ``cases`` or ``links``, then the settings."""

import sys
from dataclasses import asdict

from colossal._src.cli.benchmark.measure import measure_cases, measure_links
from colossal._src.cli.benchmark.settings import LinkSettings, Settings
from colossal._src.cli.ranks import follow_parent, say


def main() -> None:
    """Join the process group, measure, and let rank 0 report."""
    from colossal._src.cluster import launch_from_torch

    follow_parent()
    kind, word = sys.argv[1:]
    mesh = launch_from_torch(verbose=False)
    if kind == "cases":
        results = measure_cases(Settings.of_word(word), mesh.world_size)
        if mesh.global_rank == 0:
            say(results=[asdict(one) for one in results])
    else:
        measure_links(LinkSettings.of_word(word))


if __name__ == "__main__":
    main()
