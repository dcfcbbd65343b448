"""The new text of an output block: what still holds stays."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetest.outputs.matching import first_difference
from pagetest.outputs.merging import merge_output

CASES = {
    "nothing to do": ("a  1.0\n...\n", "a 1.0001\nb\n", "a  1.0\n...\n"),
    "an empty block": ("", "\n a\n\n  b\n\n", " a\n\n  b\n"),
    "one line": ("a\nb\nc\n", "a\nx\nc\n", "a\nx\nc\n"),
    "a line that still holds keeps its digits": ("a 0.5\nb 1\n", "a 0.50001\nb 2\n", "a 0.5\nb 2\n"),
    "lines that came": ("a\n", "x\na\ny\n", "x\na\ny\n"),
    "lines that went": ("a\nb\nc\n", "c\n", "c\n"),
    "a wild line": ("a\n...\ny\n", "a\nk\nl\nz\n", "a\n...\nz\n"),
    "a wild line is not stretched": ("a\n...\nb\n", "a\nx\nb\ny\n", "a\n...\nb\ny\n"),
    "a wild line for nothing": ("a\n...\n", "b\n", "b\n...\n"),
    "wild text": ("loss ... end 5\n", "  loss 0.3 end 6\n", "  loss ... end 6\n"),
    "wild text that no longer holds": ("took ... s\n", "done\n", "done\n"),
    "the blank lines of the old": ("a\n\nb 1\n", "a\nb 1\nc\n", "a\n\nb 1\nc\n"),
}


@pytest.mark.parametrize(("old", "printed", "new"), CASES.values(), ids=CASES)
def test_what_holds_stays(old, printed, new) -> None:
    assert merge_output(old, printed) == new


def test_exact_digits_are_rewritten() -> None:
    assert merge_output("0.5 a\n", "0.50001 a\n", exact=True) == "0.50001 a\n"


WORDS = st.sampled_from(["a", "b 1", "0.5", "0.5001", "...", "x ... y", "x 3 y", "", "  deep 7", "..."])
TEXTS = st.lists(WORDS, max_size=6).map(lambda lines: "".join(f"{line}\n" for line in lines))


@settings(max_examples=300, deadline=None)
@given(TEXTS, TEXTS, st.booleans())
def test_new_text_always_fits_and_is_stable(old, printed, exact) -> None:
    new = merge_output(old, printed, exact)
    assert first_difference(new, printed, exact) is None
    assert merge_output(new, printed, exact) == new
