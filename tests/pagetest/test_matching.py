"""When printed text is what a page shows."""

import pytest

from pagetest.outputs.matching import ANY_NUMBER, Difference, first_difference

SAME = {
    "equal text": ("a\nb\n", "a\nb\n"),
    "another line end": ("a\nb\n", "a\r\nb\r\n"),
    "white space in a line": ("a   b\tc\n", "a b  c\n"),
    "white space around a line": ("  a\n", "a  \n"),
    "blank lines": ("a\nb\n", "\na\n\n\nb\n\n"),
    "a number within a thousandth": ("loss 1.0000\n", "loss 1.0009\n"),
    "a negative number": ("-2.0\n", "-2.001\n"),
    "an exponent": ("1e-3\n", "1.0001e-03\n"),
    "a number and its unit": ("8.60s, 50.00%\n", "8.601s, 50.01%\n"),
    "numbers in brackets": ("tensor([1., 2.5], x=0.1)\n", "tensor([1.0001, 2.501], x=0.10001)\n"),
    "numbers as numpy prints them": ("[1. 2. 3. ]\n", "[1.0001 2. 3. ]\n"),
    "thousands": ("1,234.5 bytes\n", "1,234.6 bytes\n"),
    "a whole number and a decimal one": ("1\n", "1.0\n"),
    "the zeros": ("0.0\n", "-0.0\n"),
    "nan and inf": ("nan -inf\n", "nan -inf\n"),
    "any text in a line": ("took ... s in all\n", "took 3.7 s in all\n"),
    "no text at all": ("a ... b\n... c\nd ...\n", "a b\nc\nd\n"),
    "the rest of a word": ("sha 3f... ok 0.5...\n", "sha 3fa9 ok 0.5234\n"),
    "a number behind any text": ("... 0.5 ...\n", "0.1 0.5001 0.7\n"),
    "any lines": ("a\n...\nz\n", "a\nb\nc\nz\n"),
    "no line at all": ("a\n...\nz\n", "a\nz\n"),
    "any lines, then one that comes twice": ("...\nb\n", "b\na\nb\n"),
    "literal dots": ("1 ... 9\n", "1 ... 9\n"),
}

OTHER = {
    "a word": ("a\n", "b\n"),
    "case": ("a\n", "A\n"),
    "a line break": ("a b\n", "a\nb\n"),
    "white space inside a word": ("a b\n", "ab\n"),
    "a number beyond a thousandth": ("loss 1.000\n", "loss 1.002\n"),
    "a sign": ("0.5\n", "-0.5\n"),
    "nothing near zero": ("0.0\n", "0.0000001\n"),
    "whole numbers": ("step 1000\n", "step 1001\n"),
    "huge whole numbers": ("9007199254740993\n", "9007199254740992\n"),
    "a port": ("localhost:29500\n", "localhost:29501\n"),
    "a version": ("torch 2.13.0\n", "torch 2.13.1\n"),
    "a longer version": ("torch 2.13.0\n", "torch 2.13.0+cpu\n"),
    "an address": ("127.0.0.1\n", "127.0.0.2\n"),
    "a date": ("2026-11-20\n", "2026-11-21\n"),
    "a number inside a word": ("fp16 cuda0 v1.5\n", "fp16 cuda0 v1.5001\n"),
    "nan and a number": ("nan\n", "1.0\n"),
    "inf and a big number": ("inf\n", "1e300\n"),
    "text before any text": ("a ... z\n", "b c z\n"),
    "any text reaches no further than its line": ("a ... z\n", "a b\nc z\n"),
    "a missing line": ("a\nb\n", "a\n"),
    "a line too many": ("a\n", "a\nb\n"),
    "any lines, then a wrong one": ("...\nz\n", "a\nb\n"),
}


@pytest.mark.parametrize(("expected", "printed"), SAME.values(), ids=SAME)
def test_this_is_the_same(expected, printed) -> None:
    assert first_difference(expected, printed) is None


@pytest.mark.parametrize(("expected", "printed"), OTHER.values(), ids=OTHER)
def test_this_is_not(expected, printed) -> None:
    assert first_difference(expected, printed) is not None


@pytest.mark.parametrize("name", [name for name in SAME if "number" in name and "any text" not in name] + ["the zeros"])
def test_exact_numbers_are_text(name) -> None:
    assert first_difference(*SAME[name], exact=True) is not None


@pytest.mark.parametrize("name", ["white space in a line", "blank lines", "any text in a line", "any lines"])
def test_exact_is_about_numbers_only(name) -> None:
    assert first_difference(*SAME[name], exact=True) is None


@pytest.mark.parametrize(
    ("expected", "printed", "found"),
    [
        ("a\n\nb  1\n", "a\nb 2\n", Difference(2, "b 1", "b 2")),
        ("a\nb\n", "a\n", Difference(1, "b", "")),
        ("a\n", "a\nmore\n", Difference(1, "", "more")),
        ("", "more\n", Difference(0, "", "more")),
        ("a\n...\nloss 3\n", "a\nx\nloss 4\ny\n", Difference(2, "loss 3", "loss 4")),
    ],
)
def test_the_first_difference_has_a_line(expected, printed, found) -> None:
    assert first_difference(expected, printed) == found


def test_on_a_gpu_results_of_arithmetic_may_be_others_and_counts_may_not() -> None:
    assert first_difference("loss 2.58 in 4 steps", "loss 0.1 in 4 steps", tolerance=ANY_NUMBER) is None
    assert first_difference("loss 0.0 in 4 steps", "loss 1e-9 in 4 steps", tolerance=ANY_NUMBER) is None
    assert first_difference("loss 2.58 in 4 steps", "loss 2.58 in 5 steps", tolerance=ANY_NUMBER) is not None
    assert first_difference("loss 2.58 in 4 steps", "loss nan in 4 steps", tolerance=ANY_NUMBER) is not None
