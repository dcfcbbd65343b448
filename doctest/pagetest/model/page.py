"""The page model: the content of one Markdown tutorial, for its readers and for the harness."""

from dataclasses import dataclass
from pathlib import Path

from pagetest.finding import Finding

PYTHON = ("python", "python3", "py")
SHELL = ("shell", "bash", "sh")
USAGE, CHECK, FIGURE, FILE, RUN = "usage", "check", "figure", "file", "run"
"""The roles of code: see `Block.role`."""
TUTORIAL, HOW_TO, CONCEPT, INTERNALS = "tutorial", "how-to", "concept", "internals"
KINDS = (TUTORIAL, HOW_TO, CONCEPT, INTERNALS)
DEVICES = ("cpu", "cuda")
"""The devices that the front matter of a page can name."""
OBJECT_REPLACEMENT = "\ufffc"

_FILE = "file="


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
    def role(self) -> str:
        """What the code is for; empty for what is only shown, and for what names no role."""
        # Python is usage, a check, or draws a figure, and is all one program; `file=` writes it to a file instead.
        # Of other languages only a shell block that says `run` does something.
        words = self.info_words
        if self.language in SHELL:
            return RUN if words == [RUN] else ""
        if self.language not in PYTHON or len(words) > 1:
            return ""
        if self.file:
            return FILE
        return words[0] if words in ([CHECK], [FIGURE]) else USAGE if not words else ""

    @property
    def file(self) -> str:
        """The file that the block is written to; empty where it is none."""
        words = self.info.split()[1:]
        return words[0].removeprefix(_FILE) if words and words[0].startswith(_FILE) else ""

    @property
    def is_python(self) -> bool:
        """Whether the block is part of the tutorial's program."""
        return self.language in PYTHON and not self.file

    @property
    def is_shell(self) -> bool:
        """Whether it is a transcript, or a file for one: what the shell does before the program starts."""
        return self.role in {RUN, FILE} and not self.ignored

    @property
    def is_code(self) -> bool:
        """Whether the harness runs or writes it, or would if it were not ignored."""
        return self.is_python or self.role in {RUN, FILE}

    @property
    def info_words(self) -> list[str]:
        """The attributes after the language."""
        return self.info.lower().split()[1:]

    @property
    def is_output(self) -> bool:
        """Whether the block shows what the code before it prints."""
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
class FrontMatter:
    """What the author says about the page, between two lines `---` at its top."""

    kind: str  # one of `KINDS`
    outcome: str  # what the reader can do afterwards, in a sentence
    minutes: int  # to read it
    devices: tuple[str, ...]  # on which it runs
    end: int  # the line of the closing `---`


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
    front: FrontMatter | None = None

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
    def shell(self) -> tuple[Block, ...]:
        """The transcripts and files that the shell runs and writes, in order, before the script starts."""
        return tuple(block for block in self.blocks if block.is_shell)

    @property
    def executed(self) -> tuple[Block, ...]:
        """The blocks that can print, in the order of the page."""
        return tuple(block for block in self.blocks if not block.ignored and (block.is_python or block.role == RUN))

    @property
    def body(self) -> tuple[str, ...]:
        """The lines without the front matter, which are empty instead, so that all others keep their numbers."""
        end = self.front.end if self.front else 0
        return ("",) * end + self.lines[end:]

    @property
    def command(self) -> str:
        """The page's command, empty where it has none."""
        return self.commands[0].text if self.commands else ""

    @property
    def command_line(self) -> int:
        """Where the command stands, or the last line of a page that lacks one."""
        return self.commands[0].line if self.commands else len(self.lines)
