"""Asks for a backend that knows nothing of the device: prints the refusal."""

import sys

import colossal
from colossal.errors import ConfigError


def main() -> None:
    try:
        colossal.launch_from_torch(backend="gloo")
    except ConfigError as error:
        sys.stdout.write(f"{error}\n")


if __name__ == "__main__":
    main()
