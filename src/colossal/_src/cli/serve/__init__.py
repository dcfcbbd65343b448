"""``colossal serve``: answer requests over HTTP."""

from colossal._src.cli.serve.command import command

__all__: list[str] = []  # the command line is the interface; its help and its page describe it

assert command
