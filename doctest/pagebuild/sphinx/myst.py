"""From the page model to MyST, the Markdown that Sphinx reads. Author files hold none of it."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from pagebuild.runs import machine_name, make_fence, shown_outputs
from pagebuild.sphinx.texts import texts_of
from pagetest.model.page import Alert, Block, Page, Tabs
from pagetest.results.run_finder import RecordedRun

_QUOTE = re.compile(r"^(\s*)> ?")
_OPENING = re.compile(r"^([\s>]*)(`{3,}|~{3,})")
_DIAGRAM = "mermaid"

# [Note: how colon fences nest]
# A fence of colons is closed by the next line of at least as many. So what may hold the other has more: tabs hold a
# tab, a tab holds an alert.
_TABS, _TAB, _ALERT = ":" * 6, ":" * 5, ":" * 4


@dataclass(frozen=True)
class MystPage:
    """A page for Sphinx."""

    text: str
    lines: tuple[int, ...]  # per line of the text, the author's line that it was made from, counted from 1

    def author_line(self, line: int) -> int:
        """The author's line for a line of the text."""
        return self.lines[min(max(line, 1), len(self.lines)) - 1]


def to_myst(page: Page, run: RecordedRun | None = None) -> MystPage:
    """Translates hooks, alerts, tabs, recorded outputs and the blocks that are not run; all else is MyST already."""
    made = _LineEdits(page)
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
    numbered = list(made.numbered_lines())
    return MystPage("\n".join(text for _, text in numbered), tuple(line for line, _ in numbered))


@dataclass
class _LineEdits:
    """The author's lines, each with what it becomes; line numbers count from 1."""

    page: Page
    changed: dict[int, list[str]] = field(default_factory=dict)

    def current(self, line: int) -> list[str]:
        return self.changed.get(line, [self.page.lines[line - 1]])

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
    """Says why a block is not run; shows the text of a diagram, which only the website draws."""
    opening = made.current(block.line - 1)
    match = _OPENING.match(opening[-1])
    if not match:
        return
    indent, marks = match.groups()
    shown = "text" if block.language == _DIAGRAM else block.language or "text"
    if block.ignored:
        caption = texts_of(language).not_run.format(reason=block.reason)
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
