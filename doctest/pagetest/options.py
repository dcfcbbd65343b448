"""The options of the command line."""

import argparse
from pathlib import Path

from pagetest.graph.changes import HEAD
from pagetest.limits import PAGE_SECONDS
from pagetest.model.tree import LANGUAGES
from pagetest.run.device import DEVICES


def make_parser(root: Path) -> argparse.ArgumentParser:
    """Makes the parser of `docs_test.py`."""
    parser = argparse.ArgumentParser("docs_test.py", description="Runs the Python of Markdown tutorials.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a page: booster_api, basics/booster_api, or its file")
    parser.add_argument("--lang", choices=[*LANGUAGES, "all"], default="all", help="which language (all)")
    parser.add_argument("--source", type=Path, default=root / "docs" / "source", help="the tree of pages (docs/source)")
    parser.add_argument("--build", type=Path, default=root / "build" / "docs" / "pages", help="where pages are run")
    _add_choices(parser)
    parser.add_argument("--jobs", type=_count, metavar="N", help="pages at a time (2 for many pages, 1 for named ones)")
    parser.add_argument(
        "--timeout", type=_seconds, default=PAGE_SECONDS, metavar="SECONDS", help="limit per page (600)"
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="",
        help="the device of all pages (the best there is); `pretend` refuses what a GPU refuses",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("-v", "--verbose", action="store_true", help="show what all processes of the pages print")
    shown.add_argument("-q", "--quiet", action="store_true", help="of one page in a terminal, show its lines alone too")
    return parser


def _add_choices(parser: argparse.ArgumentParser) -> None:
    """Which pages, and what is done with them."""
    parser.add_argument("--all", action="store_true", help="every page")
    parser.add_argument(
        "--affected",
        nargs="?",
        const=HEAD,
        metavar="REV",
        help="the pages that what differs from REV (HEAD) affects; REV... is where this branch left REV",
    )
    parser.add_argument(
        "--changed", action="store_true", help="the pages with other code than in their records; and those named"
    )
    parser.add_argument("--retry", action="store_true", help="run pages that failed once more, alone, after all others")
    parser.add_argument("--watch", action="store_true", help="run the pages again when they or their imports are saved")
    parser.add_argument("--list", action="store_true", help="show the pages, run nothing")
    parser.add_argument("--check", action="store_true", help="check all rules that need no run")
    parser.add_argument(
        "--translations", action="store_true", help="list the sections that are older than the original"
    )
    parser.add_argument("--ack", action="store_true", help="note that the translations say what the originals say now")
    parser.add_argument("--figures", action="store_true", help="take over what the named pages drew last")
    parser.add_argument("--tables", action="store_true", help="write the tables about plugins, from docs/plugins.toml")
    parser.add_argument("--record", action="store_true", help="keep the records in docs/verified; of every page")
    parser.add_argument("--update-outputs", action="store_true", help="rewrite the stale output blocks of what is run")


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"a number above 0 was expected, not {text}")
    return count


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"a number of seconds above 0 was expected, not {text}")
    return seconds
