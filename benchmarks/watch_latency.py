"""How soon after a save `docs_test.py --watch` shows the result of a small page, and what the same run costs cold.

The page has two processes that import torch, form a world and meet once. It is saved again and again; each save is
answered by a fork of a process that has torch loaded.

    python benchmarks/watch_latency.py
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
PAGE = """# A small page

```python
import torch
from torch import distributed as dist

dist.init_process_group("gloo")
total = torch.ones(3)
dist.all_reduce(total)
assert total.tolist() == [2, 2, 2]
dist.destroy_process_group()
number = {number}
```

<!-- doc-test-command: torchrun --standalone --nproc_per_node=2 small.py -->
"""


def save(page: Path, number: int) -> None:
    """Write the page in one step, as editors do."""
    fresh = page.with_suffix(".new")
    fresh.write_text(PAGE.format(number=number), encoding="utf-8")
    fresh.replace(page)


def wait_for(output: IO[str], words: str) -> str:
    """Return the first line that holds the words, and fail if a page failed before."""
    for line in output:
        if " FAIL " in line:
            raise RuntimeError(line)
        if words in line:
            return line
    raise RuntimeError(f"the watch ended without {words!r}")


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--saves", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        page = Path(name) / "source" / "en" / "small.md"
        page.parent.mkdir(parents=True)
        save(page, 0)
        words = ["--lang", "en", "--source", str(page.parents[1]), "--build", str(Path(name) / "build")]
        harness = [sys.executable, "-u", str(ROOT / "docs_test.py"), *words]
        cold = []
        for _ in range(5):
            started = time.perf_counter()
            subprocess.run([*harness, "small"], check=True, capture_output=True)
            cold.append(time.perf_counter() - started)
        command = [*harness, "--watch", "small"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as watch:
            assert watch.stdout
            wait_for(watch.stdout, "Ctrl-C ends")
            taken = []
            for number in range(1, args.saves + 1):
                time.sleep(1)
                started = time.perf_counter()
                save(page, number)
                line = wait_for(watch.stdout, "PASS")
                taken.append(time.perf_counter() - started)
                assert "warm" in line, line
            watch.send_signal(signal.SIGINT)
    first, _, third = statistics.quantiles(taken, n=4)
    print(f"cold  {statistics.median(cold):.2f} s (median of {len(cold)})")
    print(f"warm  {statistics.median(taken):.2f} s (median of {len(taken)}; quartiles {first:.2f} and {third:.2f})")


if __name__ == "__main__":
    main()
