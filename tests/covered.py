"""How many of the library's lines the tests ran, by package: from what `coverage json` wrote.

python tests/covered.py FILE
"""

import json
import sys
from collections import Counter
from pathlib import Path, PurePath

PACKAGE = PurePath("src/colossal/_src")


def covered(files: dict[str, dict[str, dict[str, int]]]) -> dict[str, tuple[int, int]]:
    """Return lines that ran, and all lines, of each package, and of the whole."""
    ran: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for name, found in files.items():
        path = PurePath(name)
        parts = path.relative_to(PACKAGE).parts if path.is_relative_to(PACKAGE) else ()
        for key in (parts[0] if len(parts) > 1 else "top level", "colossal"):
            ran[key] += found["summary"]["covered_lines"]
            lines[key] += found["summary"]["num_statements"]
    return {key: (ran[key], lines[key]) for key in sorted(lines, key=lambda key: (key == "colossal", key))}


def main() -> None:
    """Print a line for each package."""
    files = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["files"]
    for name, (ran, lines) in covered(files).items():
        sys.stdout.write(f"{name:<16}{ran:>7} of {lines:>6} lines{100 * ran / max(lines, 1):>7.1f} %\n")


if __name__ == "__main__":
    main()
