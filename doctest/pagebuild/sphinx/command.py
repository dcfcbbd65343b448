"""`python docs_build.py sphinx`: the pages and the API reference as a Sphinx site, per language."""

import argparse
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pagebuild.api.command import library_of
from pagebuild.api.contents import read_contents
from pagebuild.api.inventory import Inventory
from pagebuild.api.target import Resolver
from pagebuild.changes import BASE_HELP, changed_files_since_base
from pagebuild.runs import current_runs, record_folders
from pagebuild.sphinx.check_builder import BUILDER
from pagebuild.sphinx.site import SphinxSite
from pagebuild.sphinx.sources import SphinxSources
from pagetest.finding import Finding, UsageError, with_count
from pagetest.model.tree import LANGUAGES, Tree

OK, FAILED, USAGE = 0, 1, 2

_SHARED_INPUTS = (
    "src",
    "doctest",
    "docs/sphinx",
    "docs/api",
    "docs/verified",
    "docs/sidebars.json",
    "docs/glossary.json",
    "constraints.txt",
)

# [Note: one process for each language]
# Sphinx translates "Parameters" and its like when its modules are imported. A second site in the same process would
# be in the language of the first.


@dataclass(frozen=True)
class SiteBuild:
    """What is to be built."""

    root: Path
    source: Path
    output: Path
    work: Path  # where the sources that Sphinx reads are written
    language: str
    api_pages: tuple[str, ...]  # the pages of the reference that are built
    check: bool  # whether warnings are all that is wanted

    @property
    def target(self) -> Path:
        """The folder of the site; that of a check holds nothing for readers."""
        return self.work / f"check-{self.language}" if self.check else self.output / self.language


@dataclass(frozen=True)
class SiteResult:
    """What became of a build."""

    build: SiteBuild
    pages: int
    findings: tuple[Finding, ...]
    seconds: float


def configure(parser: argparse.ArgumentParser, root: Path) -> None:
    """Adds the options of the subcommand."""
    parser.add_argument("--source", type=Path, default=root / "docs" / "source", help="the tree of pages")
    parser.add_argument("--output", type=Path, default=root / "build" / "sphinx", help="where the sites are written")
    parser.add_argument("--work", type=Path, default=root / "build" / "docs" / "sphinx", help="for what Sphinx reads")
    parser.add_argument("--lang", choices=LANGUAGES, action="append", help="which language (all)")
    parser.add_argument("--check", action="store_true", help="look for faults only, in the languages a change reaches")
    parser.add_argument("--html", dest="check", action="store_false", help="build the HTML after all")
    parser.add_argument("--base", default="", help=BASE_HELP)
    parser.add_argument("--api-page", action="append", help="which page of the API reference is built (all)")


def run(options: argparse.Namespace, root: Path) -> int:
    """Builds the sites in parallel; any warning is a fault."""
    known = tuple(page.name for page in read_contents(library_of(root)).pages)
    api_pages = tuple(dict.fromkeys(options.api_page or known))
    if unknown := sorted(set(api_pages) - set(known)):
        sys.stderr.write(
            f"docs_build.py sphinx: {', '.join(unknown)} is no page of the reference; there are {', '.join(known)}\n"
        )
        return USAGE
    source, output, work = (path.resolve() for path in (options.source, options.output, options.work))
    try:
        languages = options.lang or (affected_languages(root, source, options.base) if options.check else LANGUAGES)
    except UsageError as error:
        sys.stderr.write(f"docs_build.py sphinx: {error}\n")
        return USAGE
    builds = [SiteBuild(root, source, output, work, language, api_pages, options.check) for language in languages]
    failed = False
    context = multiprocessing.get_context("spawn")  # see [Note: one process for each language]
    with ProcessPoolExecutor(len(builds), mp_context=context) as pool:
        for outcome in pool.map(build_site, builds):
            failed = failed or bool(outcome.findings)
            sys.stdout.writelines(f"{finding}\n" for finding in outcome.findings)
            where, counts = outcome.build.target, with_count(len(outcome.findings), "finding")
            sys.stdout.write(f"{where}: {with_count(outcome.pages, 'page')}, {counts}, {outcome.seconds:.1f} s\n")
    return FAILED if failed else OK


def affected_languages(root: Path, source: Path, base: str = "") -> tuple[str, ...]:
    """The languages whose site a change can break: always the original, and the others where their sources differ."""
    # All languages where git knows no base, or where something differs that all of them read: the code, the
    # configuration, the program.
    _, changed = changed_files_since_base(root, base)
    if changed is None or any(path.is_relative_to(root / part) for path in changed for part in _SHARED_INPUTS):
        return LANGUAGES
    original, *others = LANGUAGES
    return original, *(one for one in others if any(path.is_relative_to(source / one) for path in changed))


def build_site(site_build: SiteBuild) -> SiteResult:
    """Builds one site."""
    start = time.monotonic()
    inventory = Inventory(Resolver(library_of(site_build.root)))
    configuration = site_build.root / "docs" / "sphinx"
    tree = Tree(site_build.source)
    find = current_runs(site_build.root, tree, record_folders(site_build.root, site_build.source.parent))
    contents = read_contents(inventory.resolver.library).chosen(site_build.api_pages)
    sources = SphinxSources(tree, inventory, site_build.work, configuration / "locale", contents, find)
    pages = sources.write(site_build.language)
    site = SphinxSite(
        site_build.language,
        configuration,
        site_build.work / site_build.language,
        site_build.target,
        BUILDER if site_build.check else "html",
        inventory.resolver,
        [name for page in contents.pages for name in page.objects],
    )
    findings = site.build(pages)
    return SiteResult(site_build, len(pages), tuple(findings), time.monotonic() - start)
