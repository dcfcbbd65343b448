"""`docs_build.py freeze VERSION`: keeps the present documentation as that of a released version."""

import argparse
import sys
from pathlib import Path

from pagebuild.site.edition import BrokenInputError
from pagebuild.site.freeze import DocumentationFreezer
from pagebuild.site.coverage import current_coverage
from pagetest.finding import display_path, with_count


def configure(parser: argparse.ArgumentParser, root: Path) -> None:
    """Adds the options.

    Args:
        parser: The parser of the subcommand.
        root: The project's root.
    """
    del root
    parser.add_argument("version", metavar="VERSION", help="the version that is released, such as 0.1.0")


def run(options: argparse.Namespace, root: Path) -> int:
    """Runs the subcommand.

    Args:
        options: What the command line says.
        root: The project's root.

    Returns:
        0 if the version is frozen, 1 if it may not be.
    """
    try:
        folder = DocumentationFreezer(root, current_coverage(root)).freeze(options.version)
    except BrokenInputError as error:
        sys.stdout.write(f"{error}\n{with_count(len(error.findings), 'finding')}; nothing was frozen\n")
        return 1
    sys.stdout.write(f"{display_path(folder)}: commit it with docs/versions.json\n")
    return 0
