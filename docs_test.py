"""Runs the tutorials: `python docs_test.py booster_api`. All of it lives in `doctest/pagetest`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
NEEDED = ("markdown_it", "psutil")
USAGE = 2


def main() -> int:
    """Runs the harness with `doctest/` on the path, not the root: that must not shadow what is installed."""
    sys.path[:] = [str(ROOT / "doctest"), *(entry for entry in sys.path if entry not in {"", str(ROOT)})]
    try:
        from pagetest import cli

        return cli.main(sys.argv[1:], ROOT)
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        sys.stderr.write(
            f"docs_test.py: the harness needs the package {error.name}, and {sys.executable} has none: "
            "pip install -c constraints.txt -e '.[docs]'\n"
        )
        return USAGE


if __name__ == "__main__":
    sys.exit(main())
