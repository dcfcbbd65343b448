"""``python -m colossal.cli`` is the command ``colossal``, for launchers that start modules."""

from colossal.cli import main

if __name__ == "__main__":
    main()
