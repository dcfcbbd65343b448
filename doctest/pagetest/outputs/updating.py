"""Updating: a result of a run becomes the new text of the page's output blocks."""

from collections.abc import Mapping
from dataclasses import replace

from pagetest.model.page import Block, Page
from pagetest.model.reader import read_page
from pagetest.outputs.rewriting import OutputUpdateError, updated_texts, write_outputs
from pagetest.outputs.shown import outputs_of, stale_outputs
from pagetest.results.result import FAIL, PASS, Result


def update_outputs(page: Page, result: Result, original: Page, before: Result | None) -> tuple[Result, Page]:
    """Rewrites the stale output blocks of a page that ran, or whose original did; any other failure forbids it.

    Args:
        page: The page.
        result: Its result.
        original: The page of the same name that ran first, as it is now; for that page itself, the page.
        before: The result of that page; none for that page itself.

    Returns:
        The result that the page has now, and the page as it is now.
    """
    ran = before if before and result.is_shared else result
    if ran.failure or not ran.log:
        return result, page
    texts = _texts_from_original(original, page) if result.is_shared else updated_texts(page, result.printed)
    return _rewrite(page, texts, result) if texts else (result, page)


def _texts_from_original(original: Page, page: Page) -> dict[Block, str]:
    """What the output blocks of a translation with the same code must say where they do not."""
    pairs = zip(outputs_of(original), outputs_of(page), strict=True)
    return {theirs.block: ours.block.source for ours, theirs in pairs if ours.block.source != theirs.block.source}


def _rewrite(page: Page, texts: Mapping[Block, str], result: Result) -> tuple[Result, Page]:
    try:
        write_outputs(page, texts)
    except OutputUpdateError as error:
        return replace(result, status=FAIL, findings=(error.finding, *result.findings)), page
    new, count = read_page(page.path, page.language, page.name), len(texts)
    if result.is_shared:
        return replace(result, outputs_rewritten=count), new
    stale = tuple(stale_outputs(new, _printed_by_new_line(page, new, result.printed)))
    matched = result.outputs_total - len(stale)
    status = FAIL if stale else PASS
    return replace(result, status=status, findings=stale, outputs_matched=matched, outputs_rewritten=count), new


def _printed_by_new_line(page: Page, new: Page, printed: Mapping[int, str]) -> dict[int, str]:
    """What each block printed, by its line in the rewritten page."""
    pairs = zip(page.runnable, new.runnable, strict=True)
    return {after.line: printed[before.line] for before, after in pairs if before.line in printed}
