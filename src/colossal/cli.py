"""The command line: ``colossal check``, ``colossal run`` and ``colossal benchmark``.

``python -m colossal.cli`` is the command ``colossal``, for launchers that start modules.
"""

from colossal._src.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
