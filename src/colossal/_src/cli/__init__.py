"""The command line: ``colossal check``, ``run``, ``benchmark``, ``estimate`` and ``serve``.

Nothing heavy is imported before a command needs it, so that ``colossal --help`` answers at once.
"""

import sys
from collections.abc import Sequence

__all__ = ["main"]

_NEEDED = ("click", "rich", "fabric")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command ``colossal``; what its entry point calls.

    Args:
        arguments: The arguments after the command's name; those of this process by default.

    Raises:
        SystemExit: Always, at the end: 0 for success, 1 for a failure, 2 for a command line that cannot be read.

    Example:
        >>> from colossal.cli import main
        >>> try:
        ...     main(["--version"])
        ... except SystemExit as end:
        ...     print(end.code)
        colossal 0.1.0.dev0
        0
    """
    try:
        from colossal._src.cli.group import colossal

        colossal.main(args=None if arguments is None else list(arguments), prog_name="colossal")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        message = (
            "The command line needs click, rich and fabric, which the extra `cli` brings. "
            f"Found no {error.name}. In the clone, run: pip install -e '.[cli]'"
        )
        sys.exit(message)
