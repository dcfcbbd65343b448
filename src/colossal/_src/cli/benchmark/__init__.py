"""``colossal benchmark``: measure linear layers in parallel, or the links between ranks."""

from colossal._src.cli.benchmark.command import command

__all__: list[str] = []  # the command line is the interface; its help and its page describe it

assert command
