"""What the static checks of the pages cost: the whole of `docs_test.py --check`, and the fingerprints of all pages.

python benchmarks/docs_check.py
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FINGERPRINTS = """
import sys
from pathlib import Path
from pagetest.graph.fingerprint import fingerprint
from pagetest.graph.imports import ImportGraph
from pagetest.model.tree import Tree

tree, graph = Tree(Path("docs/source")), ImportGraph(Path("src"))
found = [fingerprint(tree.page(name, language), graph) for name in tree.names for language in tree.languages(name)]
assert any(found)
"""
COMMANDS = {
    "docs_test.py --check": [sys.executable, "docs_test.py", "--check"],
    "all fingerprints": [sys.executable, "-c", FINGERPRINTS],
}


def cost_of(command: list[str]) -> tuple[float, float]:
    """Return the wall and the processor seconds of a command, and fail if it fails."""
    before, started = os.times(), time.perf_counter()
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": "doctest"}, check=True, capture_output=True)
    after, wall = os.times(), time.perf_counter() - started
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args()
    for name, command in COMMANDS.items():
        walls, cpus = zip(*(cost_of(command) for _ in range(args.runs)), strict=True)
        wall, cpu = statistics.median(walls), statistics.median(cpus)
        print(f"{name:<22} wall {wall:.2f} s   processor {cpu:.2f} s   (median of {args.runs}, start included)")


if __name__ == "__main__":
    main()
