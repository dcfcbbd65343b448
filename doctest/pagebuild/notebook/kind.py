"""What kind of notebook a page needs, which its command and its code decide."""

import shlex

from pagetest.model.page import Page
from pagetest.warm.launch import read_launch

NO_CODE, ONE_RANK, SEVERAL_RANKS = "nothing", "one", "several"


def notebook_kind(page: Page) -> str:
    """Whether the page has nothing to run, or a program of one rank, or one of several; a shell alone is one rank."""
    if not page.runnable:
        return ONE_RANK if page.shell else NO_CODE
    return ONE_RANK if read_launch(shlex.split(page.command)).ranks <= 1 else SEVERAL_RANKS


def script_arguments(page: Page) -> list[str]:
    """The script of the page's command, and what it is called with."""
    return list(read_launch(shlex.split(page.command)).arguments)
