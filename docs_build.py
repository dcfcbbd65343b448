"""Turns tutorials and docstrings into documentation: `python docs_build.py api`. It lives in `doctest/pagebuild`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def main() -> int:
    """Runs the emitters with `doctest/` on the path, not the root: that must not shadow what is installed."""
    sys.path[:] = [str(ROOT / "doctest"), *(entry for entry in sys.path if entry not in {"", str(ROOT)})]
    from pagebuild import cli

    return cli.main(sys.argv[1:], ROOT)


if __name__ == "__main__":
    sys.exit(main())
