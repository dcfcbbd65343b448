"""The command ``colossal`` and the table of its subcommands, each imported when it is asked for."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import click

from colossal._src.cli.common import SETTINGS, VERSION


@final
@dataclass(frozen=True)
class Subcommand:
    """Where a subcommand is defined, and what the list of commands says about it."""

    module: str
    help: str


COMMANDS: Mapping[str, Subcommand] = {
    "benchmark": Subcommand(
        "colossal._src.cli.benchmark", "Measure linear layers in parallel, or the links between ranks."
    ),
    "check": Subcommand("colossal._src.cli.check", "Check whether this machine can train, and show what is missing."),
    "estimate": Subcommand("colossal._src.cli.estimate", "Show what each rank of a training step would hold and send."),
    "run": Subcommand("colossal._src.cli.run", "Start a training program on one node or many."),
    "serve": Subcommand("colossal._src.cli.serve", "Answer requests over HTTP with a language model."),
}


@final
class LazyGroup(click.Group):
    """A group that knows its subcommands by name and imports one when it is used: ``module:command``."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """Name the subcommands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a subcommand."""
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(COMMANDS[cmd_name].module).command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table, which needs no import."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].help) for name in self.list_commands(ctx)])


@click.group(cls=LazyGroup, context_settings=SETTINGS)
@click.version_option(VERSION, message="%(prog)s %(version)s")
def colossal() -> None:
    """Train PyTorch models on one process or many, and serve them."""
