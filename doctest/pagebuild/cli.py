"""The command line: `python docs_build.py api|sphinx ...`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

OK, FAILED, USAGE = 0, 1, 2


class Subcommand(NamedTuple):
    """One subcommand."""

    # `module` is imported only when the subcommand is called. It defines `configure(parser, root)`, which adds
    # the options, and `run(options, root)`, which returns the exit status. `session` is the nox session that
    # installs what it `needs`.

    module: str
    summary: str
    session: str
    needs: tuple[str, ...] = ()


SUBCOMMANDS = {
    "api": Subcommand("pagebuild.api.command", "docstrings -> build/docs/api.json", "api", ("sphinx", "myst_parser")),
    "freeze": Subcommand("pagebuild.site.freeze", "the present documentation -> docs/versioned", "site"),
    "notebooks": Subcommand(
        "pagebuild.notebook.command",
        "pages and their records -> build/docs/notebooks",
        "notebooks",
        ("jupytext", "nbclient", "ipykernel"),
    ),
    "sphinx": Subcommand(
        "pagebuild.sphinx.command",
        "pages and docstrings -> build/sphinx",
        "api",
        ("sphinx", "myst_parser", "sphinx_design", "furo", "jieba"),
    ),
    "site": Subcommand("pagebuild.site.command", "pages -> docs/website", "site", ("torch", "colossal")),
}


def main(arguments: Sequence[str], root: Path) -> int:
    """Runs one subcommand; returns 0 if all is well, 1 for a fault in the documents, 2 for a wrong call."""
    parser = argparse.ArgumentParser("docs_build.py", description="Builds the documentation from its sources.")
    choices = parser.add_subparsers(dest="emitter", metavar="|".join(SUBCOMMANDS), required=True)
    parsers = {name: choices.add_parser(name, help=emitter.summary) for name, emitter in SUBCOMMANDS.items()}
    name = next((word for word in arguments if word in SUBCOMMANDS), "")
    if not name:
        parser.parse_args(arguments)
    emitter = SUBCOMMANDS[name]
    if missing := [package for package in emitter.needs if find_spec(package) is None]:
        sys.stderr.write(
            f"docs_build.py: `{name}` needs the package {' and '.join(missing)}, and {sys.executable} has none: "
            f"run `nox -s {emitter.session}`, or install the dependency group `{emitter.session}` of pyproject.toml\n"
        )
        return USAGE
    module = import_module(emitter.module)
    configure: Callable[[argparse.ArgumentParser, Path], None] = module.configure
    configure(parsers[name], root)
    run: Callable[[argparse.Namespace, Path], int] = module.run
    return run(parser.parse_args(arguments), root)
