"""`docs_build.py site`: writes what the website is built from, and on request builds, tests and serves it."""

import argparse
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from pagebuild.site.edition import BrokenInputError
from pagebuild.site.project import read_project
from pagebuild.site.publish import publish
from pagebuild.site.website import OWNED, Insight, website_files
from pagetest.fingerprint import fingerprint
from pagetest.imports import ImportGraph

OK, FAILED = 0, 1


def configure(parser: argparse.ArgumentParser, root: Path) -> None:
    """Adds the options.

    Args:
        parser: The parser of the subcommand.
        root: The project's root.
    """
    website = root / "docs" / "website"
    parser.add_argument("--website", type=Path, default=website, help="the Docusaurus project (docs/website)")


def run(options: argparse.Namespace, root: Path) -> int:
    """Runs the subcommand.

    Args:
        options: What the command line says.
        root: The project's root.

    Returns:
        0 if the site is there, 1 if something is wrong with its sources.
    """
    graph = ImportGraph(root / "src")
    insight = Insight(lambda page: fingerprint(page, graph), lambda _: ())
    project = read_project(root, os.environ, datetime.now(UTC).date().isoformat())
    try:
        files = website_files(root, project, insight)
    except BrokenInputError as error:
        sys.stdout.write(f"{error}\n{len(error.findings)} findings; the website's inputs stay as they were\n")
        return FAILED
    change = publish(files, options.website, OWNED)
    counts = f"{len(change.written)} written, {len(change.removed)} removed, {change.kept} kept"
    sys.stdout.write(f"{options.website}: {len(files)} files: {counts}\n")
    return OK
