"""From the source of a library to its entries."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from docutils.core import publish_doctree

from pagebuild.api.entry import Entry
from pagebuild.api.reference import Reference, build_reference
from pagebuild.api.sections import split_sections
from pagetest.model.reader import parse_page

pytestmark = pytest.mark.slow

MODULES = {
    "__init__.py": '''"""A toy library."""

from toylib.parts import Part, build

__version__ = "1.2"
"""The version."""

__all__ = ["Part", "__version__", "build"]
''',
    "parts/__init__.py": '''"""Parts and how they are built.

Rules:

* **First.** See :class:`toylib.parts.Part`.
* Second, with :math:`x^2`.

1. one
2. two

.. note:: Mind the gap.

.. code-block:: text

    a diagram
"""

from toylib.parts.part import LIMIT, Base, Part, PartError
from toylib.parts.part import build as build
from toylib.parts.part import opened

__all__ = ["LIMIT", "Base", "Part", "PartError", "Piece", "build", "opened"]

Piece = Part
"""`Part` by another name."""
''',
    "parts/part.py": '''"""Hidden behind its package."""

from abc import ABC
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar, final

Check = Callable[["Part"], bool]
LIMIT: int = 2**4
"""The largest `Part`."""


class PartError(ValueError):
    """A part does not fit."""


class Base:
    """What parts share.

    Attributes:
        kind: The kind, see `Part.grow`.
    """

    kind: ClassVar[str]

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def grow(self, by: "int | None" = None, *rest: float, **options: object) -> "Part":
        """Make it larger, unlike `shrink`.

        Args:
            by: How much; see `size`, `build` and ``by``.
            *rest: More.
            **options: Still more.

        Returns:
            Always two things: a part, and `LIMIT`.

        Raises:
            PartError: It would exceed ``LIMIT``.
            OSError: Never.
        """

    def _hidden(self) -> None: ...


@final
@dataclass(frozen=True)
class Part(Base, ABC):
    """A part.

    .. math:: a^2 + b^2

    Source: *A book*, **1999**, https://example.org/book.

    Args:
        name: ``"a"`` or ``"b"``.
        checks: Called in order.
        path: Where it lies.

    Communication: all_reduce, `axis`, see `build`.

    Example:
        >>> from toylib import Part
        >>> Part("a").name
        'a'

        >>> 1 + 1
        2
    """

    name: str
    checks: "tuple[Check, ...]" = field(default_factory=tuple)
    path: Path = field(default=Path("."), kw_only=True)

    @property
    def double(self) -> "str":
        """Twice the name."""
        return 2 * self.name

    @cached_property
    def half(self) -> int:
        """Half of it."""
        return 1

    @classmethod
    def make(cls, name: str, /) -> "Part":
        """Make one.

        Args:
            name: Its name.

        Returns:
            The part.
        """
        return cls(name)

    @staticmethod
    def shrink(check: Check | None = None) -> None:
        """Make it smaller, see :meth:`grow`.

        Args:
            check: Asked first.
        """


def build(first: Part, *, scale: float = 2.0**16, mode: str = "fast") -> list[Part]:
    """Build a part; the opposite of `Part.shrink()`.

    Args:
        first: The first one.
        scale: The scale.
        mode: The mode.

    Returns:
        The parts.

    Example:
        >>> from toylib import Part, build
        >>> build(Part("a"))
        []
    """
    return []


@contextmanager
def opened(part: Part) -> Iterator[int]:
    """Open a part.

    Args:
        part: The part.

    Yields:
        Its number.

    Example:
        >>> with opened(None) as number:
        ...     print(number)
        1
    """
    yield 1
''',
}
PAGE = """# Page

{{ autodoc:toylib.parts.part.Part }}

{{ autodoc:toylib.Part.make }}

{{ autodoc:toylib.parts.Prat }}

```
{{ autodoc:toylib.nowhere }}
```

{{ autodoc:toylib.parts.Part._hidden }}

{{ autodoc:os.path.join }}

{{ autodoc:toylib.parts.part.Check }}
"""


@pytest.fixture(scope="module")
def built(make_shared_library) -> Reference:
    page = parse_page(PAGE, Path("docs/source/en/page.md"))
    return build_reference(make_shared_library(MODULES), iter([page]))


@pytest.fixture(scope="module")
def objects(built) -> Mapping[str, Entry]:
    return built.objects


def text(blocks) -> str:
    """Blocks in a short form of Markdown."""
    forms = {"inlineCode": "`{}`", "inlineMath": "${}$", "math": "$${}$$", "code": "```{}```", "text": "{}"}
    return "".join(
        forms[block["type"]].format(block["value"])
        if "value" in block
        else f"[{text(block['children'])}]({block['url']})"
        if block["type"] == "link"
        else f"<{block['type']}>{text(block['children'])}"
        for block in blocks
    )


def test_every_public_name_and_member_has_an_entry(objects) -> None:
    assert [name for name, entry in objects.items() if not entry["alias_of"]] == [
        "toylib",
        "toylib.__version__",
        "toylib.parts",
        "toylib.parts.Base",
        "toylib.parts.Base.grow",
        "toylib.parts.LIMIT",
        "toylib.parts.Part",
        "toylib.parts.Part.double",
        "toylib.parts.Part.grow",
        "toylib.parts.Part.half",
        "toylib.parts.Part.make",
        "toylib.parts.Part.shrink",
        "toylib.parts.PartError",
        "toylib.parts.build",
        "toylib.parts.opened",
    ]


def test_other_names_point_to_the_main_one(objects) -> None:
    aliases = {name: entry["alias_of"] for name, entry in objects.items() if entry["alias_of"]}
    assert aliases == {
        "toylib.Part": "toylib.parts.Part",
        "toylib.Part.make": "toylib.parts.Part.make",
        "toylib.build": "toylib.parts.build",
        "toylib.parts.Piece": "toylib.parts.Part",
        "toylib.parts.part.Part": "toylib.parts.Part",
    }
    main, alias = objects["toylib.parts.Part"], objects["toylib.parts.part.Part"]
    assert {**alias, "name": main["name"], "alias_of": None} == main


def test_kinds(objects) -> None:
    kinds = {name.removeprefix("toylib.parts."): entry["kind"] for name, entry in objects.items()}
    assert kinds["Part"] == "class"
    assert kinds["PartError"] == "exception"
    assert kinds["Part.grow"] == "method"
    assert kinds["Part.make"] == "classmethod"
    assert kinds["Part.shrink"] == "staticmethod"
    assert kinds["Part.double"] == kinds["Part.half"] == "property"
    assert kinds["LIMIT"] == kinds["toylib.__version__"] == "data"
    assert kinds["toylib"] == "module"
    assert kinds["build"] == "function"


def parameters(entry) -> list[tuple[str, str, str | None, str | None]]:
    return [(one["name"], one["kind"], one["type"], one["default"]) for one in entry["signature"]]


def test_signatures_are_spelled_as_in_the_source(objects) -> None:
    assert parameters(objects["toylib.parts.build"]) == [
        ("first", "positional_or_keyword", "Part", None),
        ("scale", "keyword_only", "float", "2.0**16"),
        ("mode", "keyword_only", "str", '"fast"'),
    ]
    assert objects["toylib.parts.build"]["return_type"] == "list[Part]"
    assert parameters(objects["toylib.parts.Base.grow"]) == [
        ("by", "positional_or_keyword", "int | None", "None"),
        ("rest", "var_positional", "float", None),
        ("options", "var_keyword", "object", None),
    ]
    assert objects["toylib.parts.Base.grow"]["return_type"] == "Part"
    assert parameters(objects["toylib.parts.Part.make"]) == [("name", "positional_only", "str", None)]
    assert objects["toylib.parts.Part.double"]["return_type"] == "str"
    assert objects["toylib.parts.PartError"]["signature"] is None
    assert objects["toylib.parts.LIMIT"]["signature"] is None


def test_the_constructor_of_a_dataclass_is_read_from_its_fields(objects) -> None:
    """An alias that is not public is written out: nobody could look it up."""
    assert parameters(objects["toylib.parts.Part"]) == [
        ("name", "positional_or_keyword", "str", None),
        ("checks", "positional_or_keyword", 'tuple[Callable[["Part"], bool], ...]', "tuple()"),
        ("path", "keyword_only", "Path", 'Path(".")'),
    ]
    assert parameters(objects["toylib.parts.Part.shrink"]) == [
        ("check", "positional_or_keyword", 'Callable[["Part"], bool] | None', "None")
    ]


def test_a_context_manager_returns_one(objects) -> None:
    entry = objects["toylib.parts.opened"]
    assert entry["return_type"] == "contextlib.AbstractContextManager[int]"
    assert text(entry["yields"]["body"]) == "<paragraph>Its number."


def test_sections_are_taken_apart(objects) -> None:
    entry = objects["toylib.parts.Part"]
    assert text(entry["body"]) == (
        "<paragraph>A part.$$a^2 + b^2$$"
        "<paragraph>Source: <emphasis>A book, <strong>1999, [https://example.org/book](https://example.org/book)."
    )
    assert [(one["name"], one["type"], one["default"]) for one in entry["params"]] == [
        ("name", "str", None),
        ("checks", 'tuple[Callable[["Part"], bool], ...]', "tuple()"),
        ("path", "Path", 'Path(".")'),
    ]
    assert text(entry["params"][0]["body"]) == '<paragraph>`"a"` or `"b"`.'
    assert entry["examples"] == [">>> from toylib import Part\n>>> Part(\"a\").name\n'a'", ">>> 1 + 1\n2"]
    assert text(entry["communication"]) == "<paragraph>all_reduce, `axis`, see [`build`](api:toylib.parts.build)."
    assert entry["bases"] == ["toylib.parts.Base", "abc.ABC"]
    base = objects["toylib.parts.Base"]["attributes"]
    assert [(one["name"], one["type"]) for one in base] == [("kind", "str")]
    assert [one["name"] for one in objects["toylib.parts.Base.grow"]["params"]] == ["by", "*rest", "**options"]


def test_names_that_end_in_an_underscore_are_read_as_written() -> None:
    fields = publish_doctree("Text.\n\n:param input_: What it is.\n:param \\*rest: More.").children
    assert list(split_sections(fields).params) == ["input_", "*rest"]


def test_a_colon_in_what_is_returned_makes_no_type(objects) -> None:
    returns = objects["toylib.parts.Base.grow"]["returns"]
    assert returns["type"] == "Part"
    assert text(returns["body"]).startswith("<paragraph>Always two things: a part, and")


def test_raises(objects) -> None:
    raises = objects["toylib.parts.Base.grow"]["raises"]
    assert [(one["type"], text(one["body"])) for one in raises] == [
        ("PartError", "<paragraph>It would exceed [`LIMIT`](api:toylib.parts.LIMIT)."),
        ("OSError", "<paragraph>Never."),
    ]


def test_words_become_links_where_they_name_one_object(objects) -> None:
    grow = objects["toylib.parts.Part.grow"]
    assert text(grow["body"]) == "<paragraph>Make it larger, unlike [`shrink`](api:toylib.parts.Part.shrink)."
    assert text(objects["toylib.parts.Base.grow"]["body"]) == "<paragraph>Make it larger, unlike `shrink`."
    by = text(grow["params"][0]["body"])
    assert by == "<paragraph>How much; see `size`, [`build`](api:toylib.parts.build) and `by`."
    assert "[`grow()`](api:toylib.parts.Part.grow)" in text(objects["toylib.parts.Part.shrink"]["body"])
    assert "[`Part.shrink()`](api:toylib.parts.Part.shrink)" in text(objects["toylib.parts.build"]["body"])
    assert objects["toylib.parts.build"]["links"] == {"Part": "toylib.parts.Part"}
    assert objects["toylib.parts.Base.grow"]["links"] == {
        "Part": "toylib.parts.Part",
        "PartError": "toylib.parts.PartError",
    }


def test_modules_are_described_with_what_they_offer(objects) -> None:
    entry = objects["toylib.parts"]
    assert text(entry["body"]) == (
        "<paragraph>Parts and how they are built.<paragraph>Rules:"
        "<list><listItem><paragraph><strong>First. See [`toylib.parts.Part`](api:toylib.parts.Part)."
        "<listItem><paragraph>Second, with $x^2$."
        "<list><listItem><paragraph>one<listItem><paragraph>two"
        "<blockquote><paragraph>Mind the gap.```a diagram```"
    )
    ordered, alert, diagram = entry["body"][3:]
    assert (ordered["ordered"], ordered["start"], alert["data"]) == (True, 1, {"alert": "note"})
    assert diagram["lang"] == "text"
    assert "toylib.parts.opened" in entry["members"]


def test_members_are_listed_with_the_inherited_ones(objects) -> None:
    names = [name.rpartition(".")[2] for name in objects["toylib.parts.Part"]["members"]]
    assert names == ["grow", "double", "half", "make", "shrink"]
    assert objects["toylib.parts.Part.grow"]["canonical"] == "toylib.parts.part.Base.grow"


def test_source_lines_include_decorators(objects) -> None:
    lines = MODULES["parts/part.py"].splitlines()
    source = objects["toylib.parts.Part"]["source"]
    assert source["file"] == "src/toylib/parts/part.py"
    assert lines[source["line"] - 1] == "@final"
    assert lines[source["end"] - 1].strip() == '"""'
    data = objects["toylib.parts.LIMIT"]["source"]
    assert lines[data["line"] - 1] == "LIMIT: int = 2**4"
    assert text(objects["toylib.parts.LIMIT"]["body"]) == "<paragraph>The largest [`Part`](api:toylib.parts.Part)."


def test_a_hook_that_names_nothing_is_reported_at_its_line_with_the_nearest_names(built) -> None:
    found = {one.line: one.message for one in built.findings if str(one).startswith("docs/source/en/page.md:")}
    assert found == {
        7: "`toylib.parts.Prat` is not in the API reference: toylib.parts has no Prat; "
        "the nearest: toylib.parts.Part, toylib.parts, toylib.parts.Base",
        13: "`toylib.parts.Part._hidden` is not in the API reference: toylib.parts.Part._hidden is private; "
        "the nearest: toylib.parts.Part.shrink, toylib.parts.Part.double, toylib.parts.Part",
        15: "`os.path.join` is not in the API reference: os.path.join does not belong to toylib",
        17: "`toylib.parts.part.Check` is not public: offer it in the `__all__` of a public module; "
        "the nearest: toylib.parts.Part.shrink, toylib.parts.Part.make, toylib.parts.Part.half",
    }


def test_the_file_says_the_version_and_reads_back(built) -> None:
    content = json.loads(built.text)
    assert content["version"] == "1.2"
    assert content["objects"] == built.objects
    assert list(content["objects"]) == sorted(content["objects"])


def test_two_runs_give_the_same_bytes(built, make_shared_library) -> None:
    page = parse_page(PAGE, Path("docs/source/en/page.md"))
    assert build_reference(make_shared_library(MODULES), iter([page])).text == built.text


UNREADABLE = '''"""Say."""


def definition() -> None:
    """Say.

    A term
        and what it means.
    """


def reference() -> None:
    """See :class:`tinylib.nowhere.Thing`."""


def broken() -> None:
    """Say *what."""


def foreign() -> None:
    """See :class:`os.PathLike`."""
'''


def test_what_markdown_cannot_say_is_reported_at_its_line(make_library) -> None:
    library = make_library({"words.py": UNREADABLE})
    found = {f"{one.path.name}:{one.line}": one.message for one in build_reference(library, iter([])).findings}
    assert "a definition_list has no counterpart in Markdown" in found["words.py:4"]
    assert "`tinylib.nowhere.Thing` is not in the API reference" in found["words.py:12"]
    assert "Inline emphasis start-string without end-string" in found["words.py:16"]
    assert found["words.py:20"] == "tinylib.words.foreign shows no example: add an Example section"
