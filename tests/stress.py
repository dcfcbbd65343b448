"""Runs all tests and all pages where a fault of their own would show: ``python tests/stress.py [TEST ...]``.

A test that depends on the order, on the load or on the vector width of the processor fails somewhere else than where it
was written. So everything runs once with each width that the processor has, the tests in random order, and all of it
beside one busy loop for each core.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTHS = ("default", "avx2", "avx512")
"""The values of ATEN_CPU_CAPABILITY; ``default`` is code without vectors."""

TESTS = ("-q", "-n", "3", "--dist", "loadfile", "--random-order")
PAGES = ("--all", "--timeout", "900")
REFUSED = "pack_vnni2"
"""What torch's attention in bfloat16 says where a width is forced that its tables do not have: no fault of a page."""


@contextmanager
def busy_loops() -> Iterator[None]:
    """Keep every core busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def has(width: str) -> bool:
    """Return whether the processor has a width. What torch is told to use it uses, and dies where that is missing."""
    program = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    environment = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return WIDTHS.index(width) <= WIDTHS.index(done.stdout.strip().lower())


def run(what: str, width: str, *command: str) -> bool:
    """Run a command beside the busy loops, show what it prints, and add a line to the summary."""
    start, last = time.monotonic(), ""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": width}
    with busy_loops():
        words = [sys.executable, *command]
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        for line in process.stdout or ():
            sys.stdout.write(line)
            sys.stdout.flush()
            last = line.strip() or last
        status = process.wait()
    refused = refused_pages() if what == "pages" else []
    if refused:
        last += f"; torch refuses this width on {', '.join(refused)}"
    failed = int(match[1]) if (match := re.search(r"(\d+) failed", last)) else 0
    SUMMARY.append(f"{width:8}  {what:6} {time.monotonic() - start:6.0f} s  {last}")
    return status == 0 or (bool(refused) and failed == len(refused))


def refused_pages() -> list[str]:
    """Return the pages that failed because torch itself refuses the width."""
    records = [json.loads(file.read_text()) for file in (ROOT / "build/docs/verified/cpu").rglob("*.json")]
    failed = [record for record in records if record["status"] == "FAIL"]
    return [f"{one['page']} ({one['lang']})" for one in failed if REFUSED in json.dumps(one["error"])]


SUMMARY: list[str] = []


def main(words: Sequence[str]) -> int:
    """Run everything with every width, and return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", choices=WIDTHS, action="append", help="only this one; may be given again")
    parser.add_argument("--seed", default=f"{time.time_ns() % 10**6}", help="of the order; printed in the summary")
    parser.add_argument("tests", nargs="*", help="only these tests, and no pages")
    options = parser.parse_args(words)
    good = []
    for width in options.width or WIDTHS:
        if not has(width):
            SUMMARY.append(f"{width:8}  this processor does not have it")
            continue
        seed = ("--random-order-seed", options.seed)
        good.append(run("tests", width, "-m", "pytest", *TESTS, *seed, *options.tests))
        if not options.tests:
            good.append(run("pages", width, "docs_test.py", *PAGES))
    sys.stdout.write("\n".join([f"order: --seed {options.seed}", *SUMMARY]) + "\n")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
