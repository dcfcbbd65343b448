"""The example of the landing page: the README's program, which is part of a page that runs."""

from pathlib import Path

from pagebuild.site.edition import BrokenInputError
from pagetest.finding import Finding
from pagetest.model.page import Page
from pagetest.model.reader import read_page

PAGE = "concepts/colossal_overview"


def landing_example(readme: Path, page: Page) -> dict[str, str]:
    """Takes the first program of the README, after making sure that the page runs it.

    Args:
        readme: The README.
        page: The page that holds the same lines.

    Raises:
        BrokenInputError: The README has no program, or the page runs another one.
    """
    program = next(iter(read_page(readme, page.language, "README").python), None)
    if program is None:
        raise BrokenInputError(Finding(readme, 1, "the README shows no program: take one from a page"))
    if not any(program.source in block.source for block in page.runnable):
        message = f"this program is not part of {page.path}, where it would be run: make both agree"
        raise BrokenInputError(Finding(readme, program.line, message))
    return {"source": program.source.rstrip("\n"), "page": page.name, "command": page.command}
