"""Every kind of gap in the reference is found, and nothing else is."""

import re
from collections import defaultdict
from collections.abc import Mapping

import pytest

from pagebuild.api.reference import build_reference
from pagetest.finding import Finding

pytestmark = pytest.mark.slow

EXAMPLE = """
    Example:
        >>> {name}
        1
"""
GOOD = '''"""A module without gaps."""

import torch.distributed as dist
from dataclasses import dataclass

LIMIT = 3
"""The most."""


class Failure(ValueError):
    """It went wrong."""


class Narrow(Failure):
    """It went wrong in a special way."""


@dataclass(frozen=True)
class Fields:
    """Holds values.

    Attributes:
        first: A value.

    Example:
        >>> Fields(1).first
        1
    """

    first: int

    def __post_init__(self) -> None:
        assert self.first


class Whole:
    """Does everything right.

    Args:
        size: How large.

    Attributes:
        twice: Twice as large.

    Raises:
        Failure: The size is below 1.

    Communication: barrier, everywhere, in each method.

    Example:
        >>> Whole(1).area()
        1
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise Narrow(size)
        self.size, self._hidden = size, 0
        self.twice: int = 2 * size

    @property
    def side(self) -> int:
        """The length of a side."""
        return 1

    def area(self) -> int:
        """Multiply the sides.

        Returns:
            The area.

        Raises:
            Failure: There is none.
            OSError: Never.
        """
        if not self:
            raise self._failure()
        return 1

    def wait(self) -> None:
        """Wait for the others."""
        dist.barrier()

    def _failure(self) -> Failure:
        return Failure()

    def _private(self, undocumented: int) -> int:
        raise KeyError


class Heir(Whole):
    """Its attribute is described where it comes from.

    Args:
        size: How large.

    Example:
        >>> Heir(2).twice
        2
    """

    twice = 2

    def __init__(self, size: int) -> None:
        super().__init__(size)


def convert(text: str, *rest: str, **options: str) -> None:
    """Convert a text.

    Args:
        text: The text.
        *rest: More of it.
        **options: How.

    Raises:
        toylib.good.Failure: It cannot be converted.

    Example:
        >>> assert convert("") is None
    """

    def inner() -> None:
        raise KeyError

    try:
        inner()
    except KeyError as error:
        raise error from None
    raise Failure


def never() -> "NoReturn":
    """Fail.

    Raises:
        RuntimeError: Always.

    Example:
        >>> try:
        ...     never()
        ... except RuntimeError:
        ...     print("failed")
        failed
    """
    raise RuntimeError
'''

GAPS = {
    "a class without docstring": ("class Thing: ...", "Thing says nothing"),
    "a function without docstring": ("def thing() -> None: ...", "thing says nothing"),
    "a method without docstring": (
        'class Thing:\n    """Say.{example}"""\n    def run(self) -> None: ...',
        "Thing.run says nothing",
    ),
    "a property without docstring": (
        'class Thing:\n    """Say.{example}"""\n    @property\n    def size(self) -> int: ...',
        "Thing.size says nothing",
    ),
    "a constant without a text below it": ("THING = 1", "THING says nothing"),
    "a docstring that dataclass made up": (
        "@dataclass\nclass Thing:\n    x: int = 0",
        "Thing says nothing",
    ),
    "a docstring that is inherited": (
        'class Base:\n    """Say."""\nclass Thing(Base): ...',
        "Thing says nothing",
    ),
    "a parameter that is not described": (
        'def thing(first: int) -> None:\n    """Say.{example}"""',
        "thing does not describe its parameter `first`",
    ),
    "parameters of which one is described": (
        'def thing(first: int, *rest: int) -> None:\n    """Say.\n\n    Args:\n        first: One.\n{example}"""',
        "thing does not describe its parameter `*rest`",
    ),
    "a parameter of a method": (
        'class Thing:\n    """Say.{example}"""\n    def run(self, far: int) -> None:\n        """Run."""',
        "Thing.run does not describe its parameter `far`",
    ),
    "a field of a dataclass": (
        '@dataclass\nclass Thing:\n    """Say.{example}"""\n    x: int = 0',
        "Thing does not describe its parameter `x`",
    ),
    "a parameter that does not exist": (
        'def thing() -> None:\n    """Say.\n\n    Args:\n        gone: Nothing.\n{example}"""',
        "thing describes a parameter `gone` that it does not have",
    ),
    "an attribute of the class": (
        'class Thing:\n    """Say.{example}"""\n    size = 3',
        "Thing does not describe its attribute `size`",
    ),
    "an attribute that the constructor makes": (
        'class Thing:\n    """Say.{example}"""\n    def __init__(self) -> None:\n        self.size, self._own = 3, 4',
        "Thing does not describe its attribute `size`",
    ),
    "an attribute that does not exist": (
        'class Thing:\n    """Say.\n\n    Attributes:\n        gone: Nothing.\n{example}"""\n    _own = 3',
        "Thing describes an attribute `gone` that it does not have",
    ),
    "a result that is not described": (
        'def thing() -> int:\n    """Say.{example}"""',
        "thing does not say what it returns (int)",
    ),
    "a result without annotation": (
        'def thing():\n    """Say.\n\n    Returns:\n        Something.\n{example}"""',
        "thing returns None: drop Returns",
    ),
    "a result where there is none": (
        'def thing() -> None:\n    """Say.\n\n    Returns:\n        Nothing.\n{example}"""',
        "thing returns None: drop Returns",
    ),
    "a result of a class": (
        'class Thing:\n    """Say.\n\n    Returns:\n        Itself.\n{example}"""',
        "Thing is a class and returns nothing",
    ),
    "a result of a property": (
        """class Thing:
    '''Say.{example}'''

    @property
    def size(self) -> int:
        '''Say.

        Returns:
            It.
        '''
""",
        "Thing.size is a property and returns nothing",
    ),
    "what a generator yields": (
        'def thing() -> Iterator[int]:\n    """Say.{example}"""\n    yield 1',
        "thing does not say what it yields (int)",
    ),
    "what a context manager yields": (
        '@contextmanager\ndef thing() -> Iterator[int]:\n    """Say.{example}"""\n    yield 1',
        "thing does not say what it yields (int)",
    ),
    "an exception that is not documented": (
        'def thing() -> None:\n    """Say.{example}"""\n    if True:\n        raise ValueError("no")',
        "thing raises ValueError at line 20 and does not say so",
    ),
    "an exception of a constructor": (
        'class Thing:\n    """Say.{example}"""\n    def __init__(self) -> None:\n        raise OSError',
        "Thing raises OSError at line",
    ),
    "an exception that a helper makes": (
        'def _refusal() -> KeyError: ...\ndef thing() -> None:\n    """Say.{example}"""\n    raise _refusal()',
        "thing raises KeyError at line",
    ),
    "an exception wider than the documented one": (
        'def thing():\n    """Say.\n\n    Raises:\n        FileNotFoundError: No.\n{example}"""\n    raise OSError',
        "thing raises OSError at line",
    ),
    "an exception that does not exist": (
        'def thing() -> None:\n    """Say.\n\n    Raises:\n        MissingError: No.\n{example}"""',
        "thing documents `MissingError`, which is no exception that toylib.",
    ),
    "a class without example": ('class Thing:\n    """Say."""', "Thing shows no example"),
    "a function without example": ('def thing() -> None:\n    """Say."""', "thing shows no example"),
    "an example without result": (
        'def thing() -> None:\n    """Say.\n\n    Example:\n        >>> thing()\n    """',
        "thing has an example that shows no result",
    ),
    "an example of something else": (
        'def thing() -> None:\n    """Say.\n\n    Example:\n        >>> 1\n        1\n    """',
        "thing has an example that does not use it",
    ),
    "a collective": (
        'def thing() -> None:\n    """Say.{example}"""\n    dist.barrier()',
        "thing talks to other ranks",
    ),
    "a collective behind a method of another class": (
        """class _Inner:
    def send(self) -> None:
        dist.barrier()


class Thing:
    '''Say.{example}'''

    def __init__(self) -> None:
        self._inner = _Inner()

    def run(self) -> None:
        '''Run.'''
        self._inner.send()
""",
        "Thing.run talks to other ranks",
    ),
}
HEAD = '''"""A module with a gap."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

__all__ = [{names!r}]


'''


def name_of(case: str) -> str:
    """Which of the three names a case gives its object."""
    source = GAPS[case][0]
    return next(name for name in ("Thing", "thing", "THING") if name in source)


def source_of(case: str) -> str:
    example = "\n" + EXAMPLE.format(name=name_of(case)) + "    "
    return HEAD.format(names=name_of(case)) + GAPS[case][0].replace("{example}", example) + "\n"


def module_of(case: str) -> str:
    return f"gap_{list(GAPS).index(case)}"


@pytest.fixture(scope="module")
def found(make_shared_library) -> Mapping[str, list[Finding]]:
    """The findings in a library that has a module without gaps and one for each gap, by module."""
    library = make_shared_library({"good.py": GOOD, **{f"{module_of(case)}.py": source_of(case) for case in GAPS}})
    findings = defaultdict(list)
    for one in build_reference(library, iter([])).findings:
        findings[one.path.stem].append(one)
    return findings


def test_what_is_documented_passes(found) -> None:
    assert found["good"] == []


@pytest.mark.parametrize("case", GAPS)
def test_a_gap_is_found_at_the_line_of_its_object(case, found) -> None:
    [finding] = found[module_of(case)]
    assert finding.message.startswith(f"toylib.{module_of(case)}.")
    assert GAPS[case][1] in finding.message
    line = source_of(case).splitlines()[finding.line - 1]
    name = GAPS[case][1].partition(" ")[0].rpartition(".")[2]
    assert re.search(rf"\b{name}\b", line)


def test_an_inherited_member_is_judged_once(make_library) -> None:
    body = 'class {name}({base}):\n    """Say.\n\n    Example:\n        >>> assert {name}\n    """\n'
    member = "    def run(self) -> int:\n        return 1\n"
    source = '"""Say."""\n' + body.format(name="A", base="") + member + body.format(name="B", base="A")
    reference = build_reference(make_library({"both.py": source}), iter([]))
    [finding] = reference.findings
    assert finding.message.startswith("tinylib.both.A.run says nothing")
