"""Checks types of the files that changed and runs the tests nearest to them: ``python tests/quick.py [REVISION]``.

Changed is what differs from the revision, HEAD unless another one is given; ``main...`` means the point where this
branch left main.
"""

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "doctest"), str(ROOT / "tests" / "helpers")]

from durations import read_durations  # noqa: E402
from nearest import NearestTests  # noqa: E402

from pagetest.graph.changes import HEAD, changed_files  # noqa: E402

BUDGET_SECONDS = 90.0
"""Of tests, which two workers share."""

TYPED = ("src", "doctest", "benchmarks", "examples", "tests")


def say(title: str, names: list[str]) -> None:
    """Print a title and the names under it."""
    text = textwrap.fill(", ".join(names), 116, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    sys.stdout.write(f"{title}\n{text}\n" if names else "")
    sys.stdout.flush()


def main(revision: str = HEAD) -> int:
    """Run the checks, and return the exit status of the first that failed."""
    changed = changed_files(ROOT, revision)
    names = sorted(path.relative_to(ROOT).as_posix() for path in changed)
    say(f"{len(names)} files differ from {revision}.", names)
    typed = [name for name in names if name.endswith(".py") and name.startswith(TYPED) and (ROOT / name).is_file()]
    if typed:
        pyright = Path(sys.executable).with_name("pyright")
        status = subprocess.run([pyright, "--pythonpath", sys.executable, *typed], cwd=ROOT, check=False).returncode
        if status:
            return status
    tests = NearestTests(ROOT, changed, read_durations())
    run, left_out = tests.within(BUDGET_SECONDS)
    run_seconds, left_out_seconds = (sum(map(tests.seconds_of, files)) for files in (run, left_out))
    say(f"Runs the {len(run)} nearest test files, {run_seconds:.0f} s of work, two at a time:", run)
    say(f"Leaves out {len(left_out)} that the change can reach too, {left_out_seconds:.0f} s of work:", left_out)
    if not run:
        return 0
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *run]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
