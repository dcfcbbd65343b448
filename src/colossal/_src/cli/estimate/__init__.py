"""``colossal estimate``: plan a training step, and show what each rank holds and sends."""

from colossal._src.cli.estimate.command import command

__all__: list[str] = []  # the command line is the interface; its help and its page describe it

assert command
