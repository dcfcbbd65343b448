"""What the page harness costs beside the bare command of a page.

A page of two processes that imports torch is run by the harness and by its own command, in turns whose order
alternates; each pair of runs gives one difference.

    python benchmarks/page_overhead.py
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "torchrun --standalone --nproc_per_node=2 small.py"
PAGE = f"""# A small page

```python
import torch
from torch import distributed as dist

dist.init_process_group("gloo")
total = torch.ones(3)
dist.all_reduce(total)
assert total.tolist() == [2, 2, 2]
dist.destroy_process_group()
```

<!-- doc-test-command: {COMMAND} -->
"""


def seconds_of(command: list[str], folder: Path, environment: dict[str, str]) -> float:
    """Return the time of a command from start to end, and fail if it fails."""
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    """Print the medians and the difference."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=15)
    args = parser.parse_args()
    bin_folder = Path(sys.executable).parent
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "source" / "en").mkdir(parents=True)
        (folder / "source" / "en" / "small.md").write_text(PAGE, encoding="utf-8")
        words = ["small", "--lang", "en", "--source", str(folder / "source"), "--build", str(folder / "build")]
        ways = {
            "harness": [sys.executable, str(ROOT / "docs_test.py"), *words],
            "bare": [str(bin_folder / "torchrun"), *COMMAND.split()[1:]],
        }
        subprocess.run(ways["harness"], env=environment, check=True, capture_output=True)
        (folder / "small.py").write_bytes((folder / "build" / "en" / "small" / "small.py").read_bytes())
        times: dict[str, list[float]] = {way: [] for way in ways}
        for pair in range(args.pairs):
            for way in sorted(ways, reverse=pair % 2 == 0):
                times[way].append(seconds_of(ways[way], folder, environment))
    differences = [ours - bare for ours, bare in zip(times["harness"], times["bare"], strict=True)]
    low, middle, high = statistics.quantiles(differences, n=4)
    print(f"{args.pairs} pairs of runs of a page with 2 processes")
    for way, values in times.items():
        print(f"{way:<11} median {statistics.median(values):6.3f} s")
    print(f"difference  median {middle:+.3f} s   quartiles {low:+.3f} to {high:+.3f}   (bar: 0.5)")


if __name__ == "__main__":
    main()
