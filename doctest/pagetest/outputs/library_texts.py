"""Pages that train on files of Python's standard library, whose texts another release of Python changes."""

import platform

from pagetest.model.page import Page

RECORDED_PYTHON = "3.11.7"
"""The Python that the outputs on such pages are from."""

_READERS = (
    'get_path("stdlib")',
    "argparse.__file__",
    "inspect.getsource(textwrap)",
    "make_finetuning_inputs",
    "os.__file__",
    "pydoc_data",
)


def has_other_texts(page: Page) -> bool:
    """Whether what a page prints may differ here from what it shows, since its data are those of another Python."""
    return platform.python_version() != RECORDED_PYTHON and any(
        reader in block.source for block in page.executed for reader in _READERS
    )


def why_not_compared(page: Page, count: int) -> str:
    """What the report says of the outputs that differ; empty if there are none, or the page fails for them."""
    if not count or not has_other_texts(page):
        return ""
    here = platform.python_version()
    return f", {count} not compared: files of Python {here} train it, and it shows results of {RECORDED_PYTHON}"
