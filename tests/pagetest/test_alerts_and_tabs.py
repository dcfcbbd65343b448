"""GitHub's alerts and the tabs between two markers are parts of a page."""

import pytest

from pagetest.checks.parity import compare_structure
from pagetest.model.page import Alert, LocatedText, Tabs

TABS = """# Title

<!--- tabs-start: device -->

**CPU (gloo)**

one

**GPU `nccl`**

two

<!--- tabs-end -->
"""


@pytest.mark.parametrize("kind", ["NOTE", "TIP", "IMPORTANT", "WARNING", "CAUTION"])
def test_an_alert_is_a_quote_that_says_so(parse, kind) -> None:
    page = parse(f"# Title\n\n> [!{kind}]\n> words\n>\n> more\n\nafter\n")
    assert page.alerts == (Alert(kind.lower(), 3, 6),)
    assert page.findings == ()


def test_a_plain_quote_is_no_alert(parse) -> None:
    page = parse("> words\n>\n> `[!NOTE]` is the marker\n\n```text\n> [!NOTE]\n```\n")
    assert (page.alerts, page.findings) == ((), ())


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("# T\n\n> [!HINT]\n> words\n", 3, "unknown alert `[!HINT]`: the alerts are NOTE, TIP"),
        ("# T\n\n> [!note]\n> words\n", 3, "unknown alert `[!note]`"),
        ("# T\n\n> [!NOTE] words\n", 3, "an alert is a blockquote whose first line is the marker alone"),
        ("# T\n\n> words\n>\n> [!NOTE]\n> more\n", 5, "an alert is a blockquote"),
        ("# T\n\n[!NOTE]\nwords\n", 3, "an alert is a blockquote"),
    ],
)
def test_what_github_would_not_render_is_refused(parse, text, line, message) -> None:
    [finding] = parse(text).findings
    assert finding.line == line
    assert message in finding.message


def test_tabs_have_a_group_titles_and_lines(parse) -> None:
    page = parse(TABS)
    assert page.tabs == (Tabs("device", 3, 13, (LocatedText("CPU (gloo)", 5), LocatedText("GPU nccl", 9))),)
    assert page.findings == ()


def test_bold_paragraphs_elsewhere_are_prose(parse) -> None:
    page = parse(
        "**bold**\n\n<!-- tabs-start: a -->\n\n**A**\n\n**b** and **c**\n\n- **d**\n\n**B**\n\n<!-- tabs-end -->\n"
    )
    assert [note.text for note in page.tabs[0].tabs] == ["A", "B"]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (TABS.replace("<!--- tabs-end -->", ""), 3, "tabs-start is never closed"),
        (TABS.replace("<!--- tabs-start: device -->", ""), 13, "tabs-end closes nothing"),
        (TABS.replace("one", "<!--- tabs-start: x -->"), 7, "tabs-start inside the tabs opened at line 3"),
        (TABS.replace("**GPU `nccl`**", "GPU"), 3, "tabs need two alternatives at least"),
        (TABS.replace("**CPU", "early\n\n**CPU"), 7, "the first thing inside tabs is a title"),
        (TABS.replace("two", "## Two"), 11, "a heading inside tabs"),
        (TABS.replace("tabs-end", "tabs-close"), 13, "unknown marker `tabs-close`"),
        ("words <!-- tabs-start: a --> words\n", 1, "marker inside a sentence"),
    ],
)
def test_tabs_that_cannot_be_shown_are_refused(parse, text, line, message) -> None:
    found = [(finding.line, finding.message) for finding in parse(text).findings]
    assert any(where == line and message in what for where, what in found), found


@pytest.mark.parametrize(
    ("change", "what"), [(("[!NOTE]", "[!TIP]"), "alert"), (("**C**", "C"), "set of tabs"), (("device", "x"), "set of")]
)
def test_a_translation_has_the_same_ones(parse, change, what) -> None:
    text = "> [!NOTE]\n> words\n\n" + TABS.replace("<!--- tabs-end", "**C**\n\nthree\n\n<!--- tabs-end")
    assert not compare_structure(parse(text), parse(text.replace("one", "甲"))).findings
    [finding] = compare_structure(parse(text), parse(text.replace(*change))).findings
    assert f"the first {what}" in finding.message


def test_a_heading_has_its_words(parse) -> None:
    page = parse("# A `b` *c*\n\nTitle\n=====\n")
    assert [heading.text for heading in page.headings] == ["A b c", "Title"]


def test_a_fence_keeps_its_info_and_knows_its_end(parse) -> None:
    [block] = parse("```text  output exact\n1\n2\n```\n").blocks
    assert (block.language, block.info, block.line, block.end) == ("text", "text output exact", 2, 4)
