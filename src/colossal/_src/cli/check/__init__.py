"""``colossal check``: check whether this machine can train, and show what is missing."""

from colossal._src.cli.check.command import command

__all__: list[str] = []  # the command line is the interface; its help and its page describe it

assert command
