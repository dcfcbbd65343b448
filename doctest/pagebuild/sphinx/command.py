"""`python docs_build.py sphinx`: the pages and the API reference as a Sphinx site, per language."""

import argparse
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pagebuild.api.command import library_of
from pagebuild.api.inventory import Inventory
from pagebuild.api.target import Resolver
from pagebuild.sphinx.site import SphinxSite
from pagebuild.sphinx.sources import Sources
from pagetest.finding import Finding, counted
from pagetest.model.tree import LANGUAGES, Tree

OK, FAILED, USAGE = 0, 1, 2

# [Note: one process for each language]
# Sphinx translates "Parameters" and its like when its modules are imported. A second site in the same process would
# speak the language of the first.


@dataclass(frozen=True)
class Order:
    """What is to be built.

    Attributes:
        root: The project's root.
        source: The tree of pages.
        output: Where the sites are written, each in a folder of its own.
        work: Where the sources that Sphinx reads are written.
        language: The language of the site.
        modules: The modules that the reference describes.
    """

    root: Path
    source: Path
    output: Path
    work: Path
    language: str
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    order: Order
    pages: int
    findings: tuple[Finding, ...]
    seconds: float


def configure(parser: argparse.ArgumentParser, root: Path) -> None:
    """Adds the options of the subcommand."""
    parser.add_argument("--source", type=Path, default=root / "docs" / "source", help="the tree of pages")
    parser.add_argument("--output", type=Path, default=root / "build" / "sphinx", help="where the sites are written")
    parser.add_argument("--work", type=Path, default=root / "build" / "docs" / "sphinx", help="for what Sphinx reads")
    parser.add_argument("--lang", choices=LANGUAGES, action="append", help="which language (all)")
    parser.add_argument("--module", action="append", help="which module the reference describes (all public ones)")


def run(options: argparse.Namespace, root: Path) -> int:
    """Builds the sites side by side; any warning is a fault."""
    public = tuple(library_of(root).modules)
    modules = tuple(dict.fromkeys(options.module or public))
    if unknown := sorted(set(modules) - set(public)):
        sys.stderr.write(
            f"docs_build.py sphinx: {', '.join(unknown)} is no public module; there are {', '.join(public)}\n"
        )
        return USAGE
    source, output, work = (path.resolve() for path in (options.source, options.output, options.work))
    orders = [Order(root, source, output, work, language, modules) for language in options.lang or LANGUAGES]
    failed = False
    context = multiprocessing.get_context("spawn")  # see [Note: one process for each language]
    with ProcessPoolExecutor(len(orders), mp_context=context) as pool:
        for outcome in pool.map(build, orders):
            failed = failed or bool(outcome.findings)
            sys.stdout.writelines(f"{finding}\n" for finding in outcome.findings)
            where, counts = outcome.order.output / outcome.order.language, counted(len(outcome.findings), "finding")
            sys.stdout.write(f"{where}: {counted(outcome.pages, 'page')}, {counts}, {outcome.seconds:.1f} s\n")
    return FAILED if failed else OK


def build(order: Order) -> Outcome:
    """Builds one site."""
    start = time.monotonic()
    inventory = Inventory(Resolver(library_of(order.root)))
    configuration = order.root / "docs" / "sphinx"
    sources = Sources(Tree(order.source), inventory, order.work, configuration / "locale", order.modules)
    pages = sources.write(order.language)
    site = SphinxSite(
        order.language,
        configuration,
        order.work / order.language,
        order.output / order.language,
        inventory.resolver,
        order.modules,
    )
    findings = site.build(pages)
    return Outcome(order, len(pages), tuple(findings), time.monotonic() - start)
