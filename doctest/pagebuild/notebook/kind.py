"""What kind of notebook a page needs, which its command decides."""

import re
import shlex

from pagetest.page import Page

NOTHING, ONE, SEVERAL = "nothing", "one", "several"

_RANKS = re.compile(r"--nproc[_-]per[_-]node(?:=(.*))?")


def kind_of(page: Page) -> str:
    """Whether the page has nothing to run, or a program of one rank, or one of several."""
    if not page.runnable:
        return NOTHING
    return ONE if num_ranks(page.command) == "1" else SEVERAL


def num_ranks(command: str) -> str:
    """The number of ranks that a command starts, as it is written: it may also be a word such as `gpu`."""
    words = shlex.split(command)
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if match := _RANKS.fullmatch(word):
            return match.group(1) or following
    return "1"
