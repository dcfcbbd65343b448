"""`python docs_build.py api`: writes api.json."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from pagebuild.api.library import Library
from pagebuild.api.reference import build_reference, statistics, write_reference
from pagebuild.api.stamp import Stamp, inputs_of
from pagetest.finding import with_count
from pagetest.model.page import Page
from pagetest.model.tree import Tree


def configure(parser: argparse.ArgumentParser, root: Path) -> None:
    """Adds the options of the subcommand."""
    parser.add_argument("--source", type=Path, default=root / "docs" / "source", help="the pages whose hooks count")
    parser.add_argument("--output", type=Path, default=root / "build" / "docs" / "api.json", help="where it is written")


def run(options: argparse.Namespace, root: Path) -> int:
    """Builds and writes the reference, unless it would be the same again; says what is wrong with it."""
    library, pages = library_of(root), list(pages_of(options.source.resolve()))
    stamp = Stamp(options.output, inputs_of(library, pages))
    if stamp.is_valid:
        sys.stdout.write(f"{options.output}: kept, for all that it was made from is the same; 0 findings\n")
        return 0
    stamp.remove()
    reference = build_reference(library, pages)
    write_reference(reference, options.output)
    if not reference.findings:
        stamp.write()
    counts = ", ".join(f"{count} {kind}" for kind, count in statistics(reference).items())
    sys.stdout.writelines(f"{finding}\n" for finding in reference.findings)
    findings = with_count(len(reference.findings), "finding")
    sys.stdout.write(f"{options.output}: {len(reference.objects)} names: {counts}; {findings}\n")
    return 1 if reference.findings else 0


def pages_of(source: Path) -> Iterator[Page]:
    """Every page of a tree, in all its languages."""
    tree = Tree(source)
    return (tree.page(name, language) for name in tree.names for language in tree.languages(name))


def library_of(root: Path) -> Library:
    """The project's own package, imported from its source tree."""
    source = root / "src"
    if str(source) not in sys.path:
        sys.path.insert(0, str(source))
    return Library(root, source / "colossal")
