"""From the page model to MyST, the Markdown that Sphinx reads. Author files hold none of it."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from pagebuild.runs import machine_name, make_fence, shown_outputs
from pagebuild.sphinx.texts import texts_of
from pagetest.checks.figures import own_address
from pagetest.model.page import CHECK, FIGURE, Alert, Block, Page, Tabs
from pagetest.results.run_finder import RecordedRun

_QUOTE = re.compile(r"^(\s*)> ?")
_OPENING = re.compile(r"^([\s>]*)(`{3,}|~{3,})")
_BEFORE = re.compile(r"[\s>]*")
_DIAGRAM = "mermaid"

# [Note: how colon fences nest]
# A fence of colons is closed by the next line of at least as many. So what may hold the other has more: tabs hold a
# tab, a tab holds an alert, an alert holds a fold.
_TABS, _TAB, _ALERT, _FOLD = ":" * 6, ":" * 5, ":" * 4, ":" * 3


@dataclass(frozen=True)
class MystPage:
    """A page for Sphinx."""

    text: str
    lines: tuple[int, ...]  # per line of the text, the author's line that it was made from, counted from 1

    def author_line(self, line: int) -> int:
        """The author's line for a line of the text."""
        return self.lines[min(max(line, 1), len(self.lines)) - 1]


def to_myst(page: Page, run: RecordedRun | None = None) -> MystPage:
    """Translates hooks, alerts, tabs, blocks and recorded outputs; all else is MyST already."""
    made = _LineEdits(page)
    if page.front and page.headings:
        made.insert_after(page.headings[0].line, "", page.front.outcome)
    for hook in page.hooks:
        others = " ".join(sorted({other.text for other in page.hooks} - {hook.text}))
        option = [f"   :without: {others}"] if others else []
        made.replace(hook.line, "```{eval-rst}", f".. api-object:: {hook.text}", *option, "```", "")
    for tabs in page.tabs:
        _convert_tabs(tabs, made)
    for alert in page.alerts:
        _convert_alert(alert, made)
    for block in page.blocks:
        _convert_block(block, page.language, made)
    caption = run and texts_of(page.language).recorded.format(date=run.record["date"], machine=machine_name(run.record))
    for block, text in shown_outputs(page, run).items():
        _show_recorded(block, text, caption, made)
    for first, last in _folds(page):
        _fold(first, last, page.language, made)
    numbered = list(made.numbered_lines())
    return MystPage("\n".join(text for _, text in numbered), tuple(line for line, _ in numbered))


@dataclass
class _LineEdits:
    """The author's lines, each with what it becomes; line numbers count from 1."""

    page: Page
    changed: dict[int, list[str]] = field(default_factory=dict)

    def current(self, line: int) -> list[str]:
        return self.changed.get(line, [own_address(self.page.body[line - 1])])

    def replace(self, line: int, *texts: str) -> None:
        self.changed[line] = list(texts)

    def insert_after(self, line: int, *texts: str) -> None:
        self.changed[line] = [*self.current(line), *texts]

    def map_lines(self, first: int, last: int, change: Callable[[str], str]) -> None:
        for line in range(first, last + 1):
            self.changed[line] = [change(text) for text in self.current(line)]

    def numbered_lines(self) -> Iterator[tuple[int, str]]:
        for line in range(1, len(self.page.lines) + 1):
            yield from ((line, text) for text in self.current(line))


def _convert_tabs(tabs: Tabs, made: _LineEdits) -> None:
    made.replace(tabs.line, f"{_TABS}{{tab-set}}", *_options({"sync-group": tabs.group}))
    for number, tab in enumerate(tabs.tabs):
        closing = [_TAB] if number else []
        sync = {"sync": str(number)} if tabs.group else {}
        made.replace(tab.line, *closing, f"{_TAB}{{tab-item}} {tab.text}", *_options(sync), "")
    made.replace(tabs.end, _TAB, _TABS, "")


def _options(options: Mapping[str, str]) -> list[str]:
    return [f":{name}: {value}" for name, value in options.items() if value]


def _convert_alert(alert: Alert, made: _LineEdits) -> None:
    """Takes the quote marks away and puts an admonition around what is left."""
    made.map_lines(alert.line, alert.end, lambda text: _QUOTE.sub(r"\1", text))
    indent = " " * (len(made.current(alert.line)[0]) - len(made.current(alert.line)[0].lstrip()))
    made.replace(alert.line, f"{indent}{_ALERT}{{{alert.kind}}}")
    made.insert_after(alert.end, f"{indent}{_ALERT}", "")


def _convert_block(block: Block, language: str, made: _LineEdits) -> None:
    """Says why a block is not run, or to which file it is written; shows the text of a diagram."""
    opening = made.current(block.line - 1)
    match = _OPENING.match(opening[-1])
    if not match:
        return
    indent, marks = match.groups()
    shown = "text" if block.language == _DIAGRAM else block.language or "text"
    if block.ignored or block.file:
        caption = texts_of(language).not_run.format(reason=block.reason) if block.ignored else block.file
        opening[-1:] = [f"{indent}{marks}{{code-block}} {shown}", f"{indent}:caption: {caption}", indent.rstrip(" ")]
    elif block.language == _DIAGRAM:
        opening[-1:] = [f"{indent}{marks}{shown}"]
    made.replace(block.line - 1, *opening)


def _show_recorded(block: Block, text: str, caption: str | None, made: _LineEdits) -> None:
    """Puts what was printed into an output block, in a fence that nothing of it can close."""
    opening, closing = made.current(block.line - 1), made.current(block.end)
    match = _OPENING.match(opening[-1])
    assert match, "an output block has a fence"
    indent, marks = match.group(1), make_fence(text)
    head = [f"{indent}{marks}{{code-block}} text", f"{indent}:caption: {caption}", indent.rstrip(" ")]
    made.replace(block.line - 1, *opening[:-1], *head)
    for line in range(block.line, block.end):
        made.replace(line)
    made.replace(block.line, *(f"{indent}{shown}".rstrip() for shown in text.split("\n")))
    made.replace(block.end, f"{indent}{marks}", *closing[1:])


def _folds(page: Page) -> list[tuple[Block, Block]]:
    """The first and the last block of what is folded: neighboring checks, or figures, and what they print."""
    folds: list[list[Block]] = []
    for block in page.blocks:
        open_fold = folds[-1] if folds and _is_next(page, folds[-1][-1], block) else []
        if block.role in {CHECK, FIGURE} and not block.ignored:
            if not open_fold or open_fold[0].role != block.role:
                folds.append(open_fold := [])
            open_fold.append(block)
        elif open_fold and block.is_output and not open_fold[-1].is_output:
            open_fold.append(block)
    return [(fold[0], fold[-1]) for fold in folds]


def _is_next(page: Page, before: Block, block: Block) -> bool:
    """Whether nothing stands between two blocks of the same list or quote."""
    between = page.lines[before.end : block.line - 2]
    places = {_indent(page.lines[line - 1]) for line in (before.end, block.line - 1)}
    return len(places) == 1 and not "".join(between).strip(" >")


def _indent(line: str) -> str:
    match = _BEFORE.match(line)
    return match.group() if match else ""


def _fold(first: Block, last: Block, language: str, made: _LineEdits) -> None:
    opening, closing = made.current(first.line - 1), made.current(last.end)
    indent = _indent(opening[0])
    summary = getattr(texts_of(language), f"fold_{first.role}")
    made.replace(first.line - 1, f"{indent}{_FOLD}{{dropdown}} {summary}", *opening)
    made.replace(last.end, closing[0], f"{indent}{_FOLD}", indent.rstrip(" "), *closing[1:])
