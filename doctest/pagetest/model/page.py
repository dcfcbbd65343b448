"""The page model: the content of one Markdown tutorial, for its readers and for the harness."""

from dataclasses import dataclass
from pathlib import Path

from pagetest.finding import Finding

PYTHON = ("python", "python3", "py")
OBJECT_REPLACEMENT = "\ufffc"


@dataclass(frozen=True)
class Block:
    """One fenced block, dedented; `line` is that of its first line of content, counted from 1."""

    # `info` is everything after the opening fence, the language included.

    language: str
    line: int
    source: str
    ignored: bool = False
    reason: str = ""
    info: str = ""

    @property
    def end(self) -> int:
        """The line of the closing fence."""
        return self.line + self.source.count("\n")

    @property
    def is_python(self) -> bool:
        """Whether the block is part of the tutorial's program."""
        return self.language in PYTHON

    @property
    def info_words(self) -> list[str]:
        """The attributes after the language."""
        return self.info.lower().split()[1:]

    @property
    def is_output(self) -> bool:
        """Whether the block shows what the Python block before it prints."""
        return self.info_words[:1] == ["output"]


@dataclass(frozen=True)
class LocatedText:
    """A text and its line: a command, a hook, a link."""

    text: str
    line: int


@dataclass(frozen=True)
class Heading:
    """A heading of the page; translations must agree on the levels, not on the text."""

    level: int
    line: int
    text: str = ""


@dataclass(frozen=True)
class Alert:
    """A blockquote that opens with `[!NOTE]` or one of its kin; the lines are the first and the last of the quote."""

    kind: str
    line: int
    end: int


@dataclass(frozen=True)
class Tabs:
    """Alternatives between `tabs-start` and `tabs-end`, each opened by a paragraph of bold text: its title."""

    # `line` and `end` are those of the two markers; tabs of one `group` switch together.

    group: str
    line: int
    end: int
    tabs: tuple[LocatedText, ...]


@dataclass(frozen=True)
class Page:
    """A tutorial in one language."""

    # `prose` is the text of each paragraph, heading and table cell, line by line, with an OBJECT_REPLACEMENT for
    # each code span; `exclusive` says why no other page may run at the same time.

    path: Path
    language: str
    name: str
    lines: tuple[str, ...]
    blocks: tuple[Block, ...]
    commands: tuple[LocatedText, ...]
    headings: tuple[Heading, ...]
    hooks: tuple[LocatedText, ...]
    links: tuple[LocatedText, ...]
    alerts: tuple[Alert, ...]
    tabs: tuple[Tabs, ...]
    prose: tuple[tuple[LocatedText, ...], ...]
    findings: tuple[Finding, ...]
    exclusive: tuple[LocatedText, ...] = ()

    @property
    def stem(self) -> str:
        """The last part of the name, which the script is named after."""
        return self.name.rpartition("/")[2]

    @property
    def tree(self) -> Path:
        """The folder of all documentation, which holds a folder for each language."""
        return self.path.absolute().parents[self.name.count("/") + 1]

    @property
    def python(self) -> tuple[Block, ...]:
        """All Python blocks, ignored ones included."""
        return tuple(block for block in self.blocks if block.is_python)

    @property
    def runnable(self) -> tuple[Block, ...]:
        """The Python blocks that make the script."""
        return tuple(block for block in self.python if not block.ignored)

    @property
    def command(self) -> str:
        """The page's command, empty where it has none."""
        return self.commands[0].text if self.commands else ""

    @property
    def command_line(self) -> int:
        """Where the command stands, or the last line of a page that lacks one."""
        return self.commands[0].line if self.commands else len(self.lines)
