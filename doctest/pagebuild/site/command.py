"""`docs_build.py site`: writes what the website is built from, and on request builds, tests and serves it."""

import argparse
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from pagebuild.changes import BASE_HELP
from pagebuild.site.coverage import current_coverage
from pagebuild.site.edition import BrokenInputError, current_edition
from pagebuild.site.project import read_project
from pagebuild.site.publish import publish
from pagebuild.site.render.npm import MissingToolError, quiet_environment
from pagebuild.site.render.site import Website
from pagebuild.site.touched import find_touched_pages
from pagebuild.site.website import OWNED, website_files
from pagetest.finding import UsageError, display_path, with_count
from pagetest.model.tree import LANGUAGES
from pagetest.suite import Suite

OK, FAILED, USAGE = 0, 1, 2


def configure(parser: argparse.ArgumentParser, root: Path) -> None:
    """Adds the options."""
    website = root / "docs" / "website"
    parser.add_argument("--website", type=Path, default=website, help="the Docusaurus project (docs/website)")
    parser.add_argument("--build", action="store_true", help="build all languages into build/site")
    parser.add_argument("--test", action="store_true", help="run the website's own tests, in Chromium if there is one")
    parser.add_argument("--full", action="store_true", help="with --test: in the browser, open every page")
    parser.add_argument("--base", default="", help=BASE_HELP)
    parser.add_argument("--serve", action="store_true", help="serve what was built; do nothing else")
    parser.add_argument("--port", type=int, default=3000, help="where to serve; 0 for any free port (3000)")


def run(options: argparse.Namespace, root: Path) -> int:
    """Runs the subcommand; returns 0 if the site is there, 1 if its sources are wrong, 2 if a program is missing."""
    site = Website(root, options.website, quiet_environment(os.environ))
    try:
        if options.serve:
            return site.serve(options.port)
        if not write_inputs(root, options.website):
            return FAILED
        built = not options.build or site.build()
        return OK if built and (not options.test or _test_website(site, options, root)) else FAILED
    except (MissingToolError, UsageError) as error:
        sys.stderr.write(f"docs_build.py site: {error}\n")
        return USAGE


def _test_website(site: Website, options: argparse.Namespace, root: Path) -> bool:
    """Runs the website's tests, after writing which pages the browser opens."""
    if options.full:
        return site.test()
    touched = find_touched_pages(root, options.base)
    number = "all" if touched.pages is None else len(touched.pages)
    sys.stdout.write(f"the browser opens one page of each template, and {number} more: {touched.reason}\n")
    path = root / "build" / "docs" / "touched.json"
    touched.write(path)
    return site.test(path)


def write_inputs(root: Path, website: Path) -> bool:
    """Writes all files that the website is built from; returns False, with nothing changed, if a source is wrong."""
    try:
        files = _make_files(root)
    except BrokenInputError as error:
        found = with_count(len(error.findings), "finding")
        sys.stdout.write(f"{error}\n{found}; the website's inputs stay as they were\n")
        return False
    change = publish(files, website, OWNED)
    counts = f"{len(change.written)} written, {len(change.removed)} removed, {change.kept} kept"
    sys.stdout.write(f"{display_path(website)}: {len(files)} files: {counts}\n")
    without = _without_notebook(root, files)
    if without:
        sys.stdout.write(
            f"{without} pages offer no notebook, which `nox -s notebooks` would make of them as they are\n"
        )
    return True


def _without_notebook(root: Path, files: Mapping[str, bytes]) -> int:
    edition = current_edition(root)
    places = (f"static/{edition.downloads}/{language}/{name}" for name in edition.tree.names for language in LANGUAGES)
    return sum(f"{place}.ipynb" not in files for place in places)


def _make_files(root: Path) -> dict[str, bytes]:
    tree = current_edition(root).tree
    if findings := Suite(tree, LANGUAGES, root / "src").check(tree.names):
        raise BrokenInputError(*findings)
    return website_files(root, read_project(root, datetime.now(UTC).date().isoformat()), current_coverage(root))
