"""From the page model to Markdown that jupytext turns into cells, and that reads well in a notebook."""

import base64
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from pagebuild.notebook.kind import NO_CODE, ONE_RANK, notebook_kind
from pagebuild.notebook.texts import alert_title, format_text
from pagebuild.runs import make_fence
from pagebuild.site.reference import summary
from pagetest.checks.figures import Figures
from pagetest.model.page import RUN, Block, Page
from pagetest.model.sections import anchors
from pagetest.model.tree import Tree
from pagetest.outputs.blocks import outputs_of

TYPES = {
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
}
_STARS = {"var_positional": "*", "var_keyword": "**"}
LINE = "page_line"
"""The cell's metadata that says at which line of the page its code stands."""
TEXT_ONLY = " .noeval"
"""Makes jupytext leave a fence in the text; it is removed afterwards."""
_SEPARATOR = ["", ""]  # jupytext begins a new cell of text after two blank lines
_MARKER = re.compile(r"\s*<!--.*-->\s*")
_BEFORE = re.compile(r"[\s>]*")
_IMAGE = re.compile(r"\s*!\[(.*)\]\(([^()\s]+)\)\s*")
_TARGET = re.compile(r"\]\(([^()\s]+)\)")
_MARKDOWN = re.compile(r"([^#?:]+)\.md(#.*)?")


def data_url(page: Page, target: str) -> str | None:
    """The content of an image as an address, which JupyterLab shows for every type; None for what is no image."""
    file = (page.path.parent / unquote(target)).resolve()
    kind = TYPES.get(file.suffix.lower())
    if kind is None or not file.is_file():
        return None
    return f"data:{kind};base64,{base64.b64encode(_figures(page).shown(file, page.language)).decode()}"


def _figures(page: Page) -> Figures:
    """The figures of the tree that the page is in."""
    return Figures(Tree(page.path.resolve().parents[page.name.count("/") + 1]))


def summarize_object(found: Mapping[str, Any], language: str) -> str:
    """What stands in the place of a hook."""
    name = found["name"]
    call = f"({', '.join(_parameters(found['signature']))})" if found["signature"] is not None else ""
    parts = [f"**`{name}{call}`**", summary(found), f"*{format_text('help', language, name=name)}*"]
    return "\n\n".join(part for part in parts if part)


def _parameters(signature: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for one in signature:
        default = f"={one['default']}" if one["default"] is not None else ""
        yield f"{_STARS.get(one['kind'], '')}{one['name']}{default}"


@dataclass(frozen=True)
class NotebookTranslator:
    """Rewrites one page."""

    page: Page
    objects: Mapping[str, Mapping[str, Any]]
    outputs: Mapping[Block, str] = field(default_factory=dict)
    _edits: dict[int, list[str]] = field(default_factory=dict)

    def markdown(self) -> str:
        """The page as jupytext's Markdown: fences that are run are code, all others text."""
        self._rewrite_lines()
        for heading in self.page.headings:
            self._set_lines(heading.line, [*_SEPARATOR, self._line(heading.line)])
        for quote in self.page.alerts:
            title = f"> **{alert_title(quote.kind, self.page.language)}**"
            self._set_lines(quote.line, [title, ">"])
        for hook in self.page.hooks:
            self._set_lines(hook.line, summarize_object(self.objects[hook.text], self.page.language).split("\n"))
        for block in self.page.blocks:
            self._rewrite_block(block)
        first = self.page.headings[0].line if self.page.headings else 1
        self._set_lines(first, [self._line(first), "", *self._introduction()])
        lines = [line for number in range(1, len(self.page.lines) + 1) for line in self._current_lines(number)]
        return "\n".join(lines).strip("\n") + "\n"

    def _line(self, number: int) -> str:
        return self.page.body[number - 1]

    def _set_lines(self, number: int, lines: list[str]) -> None:
        self._edits[number] = lines

    def _current_lines(self, number: int) -> list[str]:
        return self._edits.get(number, [self._line(number)])

    def _introduction(self) -> Iterator[str]:
        """What a reader of the page can do afterwards, and must know of the notebook, below the title."""
        kind, language = notebook_kind(self.page), self.page.language
        if self.page.front:
            yield from (self.page.front.outcome, "")
        yield format_text("about" if kind != NO_CODE else "nothing", language)
        if self.page.shell:
            yield from ("", format_text("shell", language))
        if self.page.runnable:
            yield from ("", format_text(kind, language, file=f"{self.page.stem}.py", command=self.page.command))
        if kind != NO_CODE:
            yield from _SEPARATOR

    def _rewrite_lines(self) -> None:
        """Images, links and comments outside of code."""
        code = {number for block in self.page.blocks for number in range(block.line - 1, block.end + 1)}
        names = [heading.text.replace(" ", "-") for heading in self.page.headings]
        headings = dict(zip(anchors(self.page), names, strict=True))
        for number, line in enumerate(self.page.body, 1):
            if number in code:
                continue
            image = _IMAGE.fullmatch(line)
            address = image and data_url(self.page, image.group(2))
            if image and address:
                self._set_lines(
                    number, [*_SEPARATOR, f'<img alt="{_escaped(image.group(1))}" src="{address}">', *_SEPARATOR]
                )
            elif _MARKER.fullmatch(line):
                self._set_lines(number, [])
            else:
                self._set_lines(number, [_TARGET.sub(lambda match: self._rewrite_link(match, headings), line)])

    def _rewrite_link(self, match: re.Match[str], headings: Mapping[str, str]) -> str:
        """Links lead from notebook to notebook, and images come along; headings have other names in Jupyter."""
        target = match.group(1)
        if target.startswith("#"):
            return f"](#{headings.get(unquote(target[1:]), target[1:])})"
        page = _MARKDOWN.fullmatch(target)
        if page and target in {link.text for link in self.page.links}:
            return f"]({page.group(1)}.ipynb)"
        return f"]({data_url(self.page, target) or target})"

    def _rewrite_block(self, block: Block) -> None:
        opening, closing = block.line - 1, block.end
        if block.is_code and not block.ignored:
            content = block.source.split("\n")[:-1]
            self._replace_lines(opening, closing, [f"```python {LINE}={block.line}", *content, "```"])
        elif self._is_repeated(block):
            self._replace_lines(opening, closing, [])
        elif block in self.outputs:
            before, fence = _BEFORE.match(self._line(opening)), make_fence(self.outputs[block])
            lines = [f"{fence}text{TEXT_ONLY}", *self.outputs[block].split("\n"), fence]
            self._replace_lines(opening, closing, [f"{before.group() if before else ''}{line}" for line in lines])
        else:
            note = [f"*{format_text('ignored', self.page.language, reason=block.reason)}*", ""] if block.reason else []
            self._set_lines(opening, [*note, self._line(opening) + TEXT_ONLY])

    def _is_repeated(self, block: Block) -> bool:
        """Whether this is output that the executed cell above shows itself."""
        code = next((output.code for output in outputs_of(self.page) if output.block == block), None)
        return code is not None and (code.role == RUN or notebook_kind(self.page) == ONE_RANK)

    def _replace_lines(self, first: int, last: int, lines: list[str]) -> None:
        for number in range(first, last + 1):
            self._set_lines(number, [])
        self._set_lines(first, lines)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
