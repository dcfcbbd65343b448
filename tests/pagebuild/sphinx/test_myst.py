"""From the page model to MyST: what is translated, what stays as it is, and which line came from where."""

from pathlib import Path

import pytest

from pagebuild.sphinx.myst import to_myst
from pagetest.model.reader import parse_page
from pagetest.results.records import Records
from pagetest.results.run_finder import RecordedRun

pytestmark = pytest.mark.slow


def myst(text: str, language: str = "en", run: RecordedRun | None = None) -> str:
    return to_myst(parse_page(text, Path("page.md"), language), run).text


def test_plain_markdown_stays_as_it_is() -> None:
    text = "# Title\n\nText with `code`, $x^2$ and [a link](other.md#part).\n\n| a |\n| - |\n| b |\n\n$$\ny\n$$\n"
    assert myst(text) == text


def test_a_hook_becomes_a_description() -> None:
    assert myst("# T\n\n{{ autodoc:a.b }}\n\nEnd.\n") == ("# T\n\n```{eval-rst}\n.. api-object:: a.b\n```\n\n\nEnd.\n")


def test_hooks_of_a_page_know_of_each_other() -> None:
    assert ".. api-object:: a.B\n   :without: a.B.c a.d\n" in myst(
        "{{ autodoc:a.B }}\n\n{{ autodoc:a.B.c }}\n\n{{ autodoc:a.d }}\n"
    )


@pytest.mark.parametrize("fence", ["```", "````markdown", "~~~"])
def test_a_hook_in_a_fence_stays_literal(fence) -> None:
    text = f"{fence}\n{{{{ autodoc:a.b }}}}\n{fence.rstrip('markdown')}\n"
    assert "{{ autodoc:a.b }}" in myst(text)
    assert "api-object" not in myst(text)


@pytest.mark.parametrize("kind", ["NOTE", "TIP", "IMPORTANT", "WARNING", "CAUTION"])
def test_an_alert_becomes_an_admonition(kind) -> None:
    text = f"> [!{kind}]\n> First.\n>\n> ```python\n> x = 1\n> ```\n\nAfter.\n"
    assert myst(text) == f"::::{{{kind.lower()}}}\nFirst.\n\n```python\nx = 1\n```\n::::\n\n\nAfter.\n"


def test_an_alert_in_a_list_keeps_its_place() -> None:
    assert myst("* item\n\n  > [!TIP]\n  > Text.\n") == "* item\n\n  ::::{tip}\n  Text.\n  ::::\n\n"


def test_other_quotes_stay_quotes() -> None:
    assert myst("> Said.\n") == "> Said.\n"


TABS = """<!--- tabs-start: device -->

**CPU (gloo)**

One.

**GPU**

> [!NOTE]
> Two.

<!--- tabs-end -->

After.
"""


def test_tabs_become_a_tab_set() -> None:
    lines = [line for line in myst(TABS).split("\n") if line]
    assert lines == [
        "::::::{tab-set}",
        ":sync-group: device",
        ":::::{tab-item} CPU (gloo)",
        ":sync: 0",
        "One.",
        ":::::",
        ":::::{tab-item} GPU",
        ":sync: 1",
        "::::{note}",
        "Two.",
        "::::",
        ":::::",
        "::::::",
        "After.",
    ]


def test_tabs_without_a_group_stand_alone() -> None:
    assert "sync" not in myst(TABS.replace(": device", ""))


IGNORED = """<!--- doc-test-ignore-start: needs 8 GPUs -->
```python
x = 1
```
<!--- doc-test-ignore-end -->
"""


@pytest.mark.parametrize(
    ("language", "caption"), [("en", "Not run: needs 8 GPUs"), ("zh-Hans", "未运行：needs 8 GPUs")]
)
def test_code_that_is_not_run_says_so(language, caption) -> None:
    assert f"```{{code-block}} python\n:caption: {caption}\n\nx = 1\n```" in myst(IGNORED, language)


def test_a_diagram_is_shown_as_its_text() -> None:
    assert myst("```mermaid\ngraph TD\n```\n") == "```text\ngraph TD\n```\n"


def test_an_output_stays_text() -> None:
    text = "```python\nprint(1)\n```\n\n```text output exact\n1\n```\n"
    assert myst(text) == text


def run_that_printed(*printed: str, **facts: str) -> RecordedRun:
    blocks = [{"printed": text, "figures": []} for text in printed]
    record = {"device": "cpu", "date": "2026-11-19", "processor": "A processor", "blocks": blocks}
    return RecordedRun(Records(Path("verified")), record | facts)


LEFT_OPEN = "```python\nf()\n```\n\n```text output\nx = ...\n...\n```\n\nAfter.\n"


@pytest.mark.parametrize(
    ("language", "caption"),
    [("en", "Output, recorded 2026-11-19, A processor"), ("zh-Hans", "输出，记录于 2026-11-19，A processor")],
)
def test_what_was_printed_stands_where_the_author_left_it_open(language, caption) -> None:
    made = myst(LEFT_OPEN, language, run_that_printed("x = 2.5  \n  y\n\nz\n"))
    shown = f"```{{code-block}} text\n:caption: {caption}\n\nx = 2.5\n  y\n\nz\n```"
    assert made == LEFT_OPEN.replace("```text output\nx = ...\n...\n```", shown)


def test_a_run_on_a_gpu_does_not_name_the_processor() -> None:
    assert "recorded 2026-11-19, GPU\n" in myst(LEFT_OPEN, run=run_that_printed("x = 2", device="cuda"))


def test_what_was_printed_cannot_close_its_fence() -> None:
    made = myst(LEFT_OPEN, run=run_that_printed("x = 1\n```\n````text\n"))
    assert "`````{code-block} text\n" in made
    assert "\nx = 1\n```\n````text\n`````\n\nAfter.\n" in made


def test_an_output_in_a_list_or_an_alert_keeps_its_place() -> None:
    item = "* item\n\n  " + LEFT_OPEN.replace("\n", "\n  ").replace("  \n", "\n").rstrip() + "\n"
    assert "\n  ```{code-block} text\n  :caption: " in myst(item, run=run_that_printed("x = 1\ny"))
    assert "\n\n  x = 1\n  y\n  ```\n" in myst(item, run=run_that_printed("x = 1\ny"))
    quote = "> [!NOTE]\n> " + LEFT_OPEN.partition("\n\nAfter")[0].replace("\n", "\n> ") + "\n"
    assert "\n\nx = 1\ny\n```\n::::" in myst(quote, run=run_that_printed("x = 1\ny"))


def test_an_output_that_says_all_is_the_authors() -> None:
    full = LEFT_OPEN.replace("x = ...\n...\n", "x = 2.0\n")
    assert myst(full, run=run_that_printed("x = 2.0001\n")) == full
    assert myst(LEFT_OPEN, run=run_that_printed("x = ...\n...\n")) == LEFT_OPEN
    assert myst(LEFT_OPEN) == LEFT_OPEN


FRONT = "---\nkind: how-to\noutcome: Train with `f`.\nminutes: 10\ndevices: cpu\n---\n# T\n\nText.\n"


def test_the_outcome_is_the_first_paragraph() -> None:
    assert myst(FRONT) == "\n" * 6 + "# T\n\nTrain with `f`.\n\nText.\n"


CHECKS = """Words.

```python check
a
```

```text output
A
```

```python check
b
```

```python figure
c
```

```text output
...
C
```

Words.

```python check
d
```
"""


@pytest.mark.parametrize(
    ("language", "check", "figure"),
    [("en", "How this page is verified", "How this figure is drawn"), ("zh-Hans", "本页如何验证", "此图如何绘制")],
)
def test_checks_and_figures_are_folded_with_what_they_print(language, check, figure) -> None:
    made = [line for line in myst(CHECKS, language).split("\n") if line and not line.startswith("```")]
    assert made == [
        *("Words.", f":::{{dropdown}} {check}", "a", "A", "b", ":::"),
        *(f":::{{dropdown}} {figure}", "c", "...", "C", ":::"),
        *("Words.", f":::{{dropdown}} {check}", "d", ":::"),
    ]


def test_what_a_check_was_recorded_to_print_is_in_its_fold() -> None:
    made = myst(CHECKS, run=run_that_printed("A", "", "x\nC", ""))
    assert "```{code-block} text\n:caption: Output, recorded 2026-11-19, A processor\n\nx\nC\n```\n:::\n" in made


def test_folds_stay_in_their_list_and_their_alert() -> None:
    item = "* item\n\n  ```python check\n  a\n  ```\n\n```python check\nb\n```\n"
    fold = ":::{dropdown} How this page is verified\n"
    assert f"* item\n\n  {fold}  ```python check\n  a\n  ```\n  :::\n" in myst(item)
    assert f"\n\n{fold}```python check\nb\n```\n:::\n" in myst(item)
    alert = "> [!NOTE]\n> ```python check\n> a\n> ```\n>\n> ```text output\n> A\n> ```\n"
    inner = "```python check\na\n```\n\n```text output\nA\n```\n"
    assert myst(alert) == f"::::{{note}}\n{fold}{inner}:::\n\n::::\n\n"


def test_a_check_that_is_not_run_is_shown() -> None:
    ignored = IGNORED.replace("python", "python check")
    assert "dropdown" not in myst(ignored)
    assert ":caption: Not run: needs 8 GPUs" in myst(ignored)


def test_a_file_bears_its_name_and_a_transcript_stays() -> None:
    assert myst("```python file=a/b.py\nx\n```\n") == "```{code-block} python\n:caption: a/b.py\n\nx\n```\n"
    transcript = "```shell run\nls\n```\n\n```text output\nx\n```\n"
    assert myst(transcript) == transcript


def test_every_line_knows_the_authors() -> None:
    text = FRONT + "\n{{ autodoc:a.b }}\n\n" + TABS + CHECKS.replace("Words", "Word")
    text += LEFT_OPEN.replace("After", "End") + "\nLast.\n"
    made = to_myst(parse_page(text, Path("page.md")), run_that_printed("A", "", "C", "", "x = 1\n2\n3\n4"))
    authors, lines = text.split("\n"), made.text.split("\n")
    for words in ("# T", "Text.", "Word.", "One.", "Two.", "After.", "End.", "Last."):
        at = next(number for number, line in enumerate(lines, 1) if words in line)
        assert words in authors[made.author_line(at) - 1]
    hook = next(number for number, line in enumerate(lines, 1) if "api-object" in line)
    assert authors[made.author_line(hook) - 1] == "{{ autodoc:a.b }}"
    assert made.author_line(10_000) == len(authors)
