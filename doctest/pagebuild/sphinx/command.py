"""`python docs_build.py sphinx`: the pages and the API reference as a Sphinx site, per language."""

import argparse
import sys
import time
from pathlib import Path

from pagebuild.api.command import library_of
from pagebuild.api.inventory import Inventory
from pagebuild.api.target import Resolver
from pagebuild.sphinx.site import SphinxSite
from pagebuild.sphinx.sources import Sources
from pagetest.tree import LANGUAGES, Tree


def configure(parser: argparse.ArgumentParser, root: Path) -> None:
    """Adds the options of the subcommand."""
    parser.add_argument("--source", type=Path, default=root / "docs" / "source", help="the tree of pages")
    parser.add_argument("--output", type=Path, default=root / "build" / "sphinx", help="where the sites are written")
    parser.add_argument("--lang", choices=LANGUAGES, action="append", help="which language (all)")


def run(options: argparse.Namespace, root: Path) -> int:
    """Builds the sites; any warning is a fault."""
    inventory = Inventory(Resolver(library_of(root)))
    sources = Sources(Tree(options.source.resolve()), inventory, root / "build" / "docs" / "sphinx")
    failed = 0
    for language in options.lang or LANGUAGES:
        start = time.monotonic()
        pages = sources.write(language)
        folder, output = sources.folder / language, options.output.resolve() / language
        site = SphinxSite(language, root / "docs" / "sphinx", folder, output, inventory.resolver)
        findings = site.build(pages)
        failed += len(findings)
        sys.stdout.writelines(f"{finding}\n" for finding in findings)
        seconds = time.monotonic() - start
        sys.stdout.write(f"{site.output}: {len(pages)} pages, {len(findings)} findings, {seconds:.1f} s\n")
        sys.stdout.flush()
    return 1 if failed else 0
