"""The warnings of Python among what a program printed."""

import re
from collections.abc import Iterator

from pagetest.finding import Finding
from pagetest.model.page import Page

WARNING = re.compile(r"(?:^|\s)(\S+):(\d+): (\w*Warning: .*)", re.MULTILINE)


def python_warnings(log: str, page: Page) -> Iterator[Finding]:
    """The warnings that readers of the page would see, each at the page's own line, or at that of its command."""
    for file, line, message in WARNING.findall(log):
        is_own = file.rpartition("/")[2] == f"{page.stem}.py"
        yield Finding(page.path, int(line) if is_own else page.command_line, f"{message}: correct what causes it")
