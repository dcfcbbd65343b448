"""The checker of terms, on a small tree; the session ``lint`` runs it on the project."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("terms.py")
TABLE = {
    "names": {"full or unsharded": "whole wholes", "point-to-point": "inbox"},
    "texts": {"full, unsharded": ["whole"], "no rank": ["nobody"], "cannot": ["can not"]},
}
GOOD = '''"""Module of full tensors."""

LIMIT = 1


def full(tensor):
    """Return the full tensor, on all ranks."""
    # The full tensor is on each rank.
    raise ValueError("The full tensor must be on rank 0.")
'''


def load() -> type:
    """Import the program, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("terms_program", PROGRAM)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module.Terms


Terms = load()
"""What ``terms.py`` calls so."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree with a module, a page and a README, all in the terms of the field."""
    for folder in ("src/lib", "doctest", "docs/source/en/basics"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "README.md").write_text("# Library\n\nFull tensors.\n")
    (tmp_path / "src/lib/a.py").write_text(GOOD)
    (tmp_path / "docs/source/en/basics/page.md").write_text("# Page\n\nText.\n\n```python\nfull = 1\n```\n")
    return tmp_path


def findings(root: Path, allow: list[dict[str, str]] | None = None) -> list[tuple[str, int, str]]:
    terms = Terms.load({**TABLE, "allow": allow or []})
    return [(finding.path, finding.line, finding.found) for finding in terms.findings(root)]


def stale(root: Path, entry: dict[str, str]) -> Iterator[str]:
    return Terms.load({**TABLE, "allow": [entry]}).stale(root)


def test_good_tree(root: Path) -> None:
    assert not findings(root)


BAD = {
    "a variable": ("LIMIT = 1", "WHOLE_SIZE = 1", [(3, "WHOLE_SIZE")]),
    "a class": ("LIMIT = 1", "class RecvInbox: pass", [(3, "RecvInbox")]),
    "a function": ("def full(", "def whole_of(", [(6, "whole_of")]),
    "an argument": ("full(tensor)", "full(wholes)", [(6, "wholes")]),
    "an attribute": ("LIMIT = 1", "LIMIT = 1; LIMIT.whole = 2", [(3, "whole")]),
    "a docstring of a module": ("of full tensors", "of whole tensors", [(1, "whole")]),
    "a docstring": ("Return the full tensor", "Return the whole tensor", [(7, "whole")]),
    "a later line of a docstring": ("tensor, on all ranks.", "tensor.\n\n    Nobody waits.\n    ", [(9, "Nobody")]),
    "a comment": ("is on each rank", "can not be here", [(8, "can not")]),
    "a message": ("must be on rank 0", "must be on nobody", [(9, "nobody")]),
    "two in one line": ("on each rank.", "whole, for nobody", [(8, "nobody"), (8, "whole")]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_code(root: Path, name: str) -> None:
    good, bad, expected = BAD[name]
    assert GOOD.count(good) == 1
    (root / "src/lib/a.py").write_text(GOOD.replace(good, bad))
    assert findings(root) == [("src/lib/a.py", line, found) for line, found in expected]


def test_code_of_the_tools(root: Path) -> None:
    (root / "doctest/tool.py").write_text("inbox = 1\n")
    assert findings(root) == [("doctest/tool.py", 1, "inbox")]


def test_names_that_are_only_used_belong_to_others(root: Path) -> None:
    (root / "src/lib/b.py").write_text("from lib import whole\n\nfull = whole(whole.inbox, inbox=1)\n")
    assert not findings(root)


def test_words_are_not_parts_of_words(root: Path) -> None:
    (root / "src/lib/b.py").write_text('wholesale = "Sold by wholesale."\n')
    assert not findings(root)


@pytest.mark.parametrize("string", ["whole", "a\\nwhole"])
def test_strings_that_are_no_sentences(root: Path, string: str) -> None:
    (root / "src/lib/b.py").write_text(f'KEY = "{string}"\n')
    assert not findings(root)


def test_examples_in_docstrings_are_code(root: Path) -> None:
    example = '"""Show it.\n\n>>> x = whole(1)\n>>> for y in x:\n...     whole(y)\nthe whole output\n"""\n'
    (root / "src/lib/b.py").write_text(example)
    assert findings(root) == [("src/lib/b.py", 6, "whole")]


def test_readme(root: Path) -> None:
    (root / "README.md").write_text("# Library\n\nThe whole\ntensor.\n")
    assert findings(root) == [("README.md", 3, "whole")]


def test_code_of_pages(root: Path) -> None:
    page = "# Page\n\nThe whole text.\n\n```python\nfull = 1\n```\n\n```text\nwhole\n```\n\n"
    page += '```python title="b.py"\nx = 1\nwhole = 2  # nobody uses it\n```\n'
    (root / "docs/source/en/basics/page.md").write_text(page)
    assert findings(root) == [("docs/source/en/basics/page.md", 15, found) for found in ("nobody", "whole")]


def test_text_of_pages_is_counted(root: Path) -> None:
    (root / "docs/source/en/basics/page.md").write_text("The whole\nfor nobody.\n\n```python\nwhole = 1\n```\n")
    assert Terms.load(TABLE).prose(root) == {"docs/source/en/basics/page.md": 2}


def test_what_to_write_instead(root: Path) -> None:
    (root / "src/lib/b.py").write_text("inbox = 1  # the whole\n")
    assert [finding.instead for finding in Terms.load(TABLE).findings(root)] == ["point-to-point", "full, unsharded"]


ALLOWED = {"file": "src/lib/b.py", "found": "whole", "reason": "the standard library calls it so"}


@pytest.mark.parametrize("file", ["src/lib/b.py", "src/*", "*.py"])
def test_allowed_use(root: Path, file: str) -> None:
    (root / "src/lib/b.py").write_text("# The whole.\n")
    assert findings(root) == [("src/lib/b.py", 1, "whole")]
    entry = {**ALLOWED, "file": file}
    assert not findings(root, [entry])
    assert not list(stale(root, entry))


@pytest.mark.parametrize("change", [{"file": "src/lib/a.py"}, {"file": "src/lib"}, {"found": "nobody"}])
def test_allowance_of_something_else(root: Path, change: dict[str, str]) -> None:
    (root / "src/lib/b.py").write_text("# The whole.\n")
    entry = {**ALLOWED, **change}
    assert findings(root, [entry]) == [("src/lib/b.py", 1, "whole")]
    assert [text.rpartition("} ")[2] for text in stale(root, entry)] == ["allows nothing: remove it"]


@pytest.mark.parametrize("reason", [{}, {"reason": " "}])
def test_allowance_without_reason(root: Path, reason: dict[str, str]) -> None:
    (root / "src/lib/b.py").write_text("# The whole.\n")
    entry = {"file": "src/lib/b.py", "found": "whole", **reason}
    assert [text.rpartition("} ")[2] for text in stale(root, entry)] == ["has no reason"]


def test_program_says_where_and_what_to_write(root: Path) -> None:
    (root / "tests/design").mkdir(parents=True)
    for name in ("terms.py", "terms.toml"):
        (root / "tests/design" / name).write_text(PROGRAM.with_name(name).read_text(encoding="utf-8"))
    (root / "src/lib/b.py").write_text("inbox = 1\n")
    command = [sys.executable, root / "tests/design/terms.py"]
    for words, status in (["src/lib/b"], 1), (["src/lib/a"], 0):
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        found = "src/lib/b.py:1: 'inbox': write point-to-point, send, recv\n" if status else ""
        assert (done.returncode, done.stdout) == (status, f"{found}{status} findings\n")
