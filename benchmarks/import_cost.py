"""What importing the library costs over importing torch: processor time, in fresh interpreters.

Every interpreter imports torch, and then times one import. At most 100 ms are meant to be spent on either; a test
counts the lines of Python that they run.

    python benchmarks/import_cost.py --turns 20
"""

import argparse
import statistics
import subprocess
import sys

STATEMENTS = ("import colossal", "import colossal.booster", "import colossal.nn", "import colossal.tensor")
PROGRAM = "import time\nimport torch\nstart = time.process_time()\n{}\nprint(time.process_time() - start)"


def milliseconds(statement: str) -> float:
    """Processor time of one import in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(statement)], capture_output=True, text=True, check=True, timeout=120
    )
    return 1000 * float(done.stdout)


def main() -> None:
    """Print a line for each import."""
    parser = argparse.ArgumentParser(description="Time the imports of the library.")
    parser.add_argument("--turns", type=int, default=11, help="interpreters for each import")
    turns = parser.parse_args().turns
    seen: dict[str, list[float]] = {statement: [] for statement in STATEMENTS}
    for _ in range(turns):
        for statement in STATEMENTS:
            seen[statement].append(milliseconds(statement))
    print(f"{'':<26}{'least':>9}{'median':>9}")
    for statement, found in seen.items():
        print(f"{statement:<26}{min(found):>6.1f} ms{statistics.median(found):>6.1f} ms")


if __name__ == "__main__":
    main()
