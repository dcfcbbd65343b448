"""From a page to cells: what is run is code, all else is text that reads well."""

import json
from pathlib import Path

import nbformat
import pytest

from pagebuild.notebook import texts
from pagebuild.notebook.kind import notebook_kind
from pagebuild.notebook.page_notebook import build_notebook
from pagetest.results.records import Records
from pagetest.results.run_finder import RecordedRun

pytestmark = pytest.mark.slow

PAGE = """
# Lesson

Text before.

```python
x = 1


def double(y):
    return 2 * y
```

```text output
nothing
```

## Next

Shell commands are text:

```shell
python lesson.py
```

```python
print(double(x))
```
"""
SEVERAL = "torchrun --standalone --nproc_per_node=2 lesson.py"


def cells(notebook, kind: str) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


def text(notebook) -> str:
    return "\n\n".join(cells(notebook, "markdown"))


# ------------------------------------------------------------------------------------------ kinds of pages


def test_the_command_decides_the_kind(parse) -> None:
    assert notebook_kind(parse(PAGE)) == "one"
    assert notebook_kind(parse(PAGE, "torchrun --standalone --nproc-per-node 1 lesson.py")) == "one"
    assert notebook_kind(parse(PAGE, SEVERAL)) == "several"
    assert notebook_kind(parse(PAGE, "colossal run --nproc_per_node 8 lesson.py")) == "several"
    assert notebook_kind(parse("# T\n", "none")) == "nothing"
    ignored = "<!--- doc-test-ignore-start: why -->\n```python\nx\n```\n<!--- doc-test-ignore-end -->"
    assert notebook_kind(parse(ignored, "none")) == "nothing"


def test_a_page_of_one_rank_makes_a_world_and_runs_its_cells(build) -> None:
    first, *parts = cells(build(PAGE, "python lesson.py --steps 3"), "code")
    assert "WORLD_SIZE" in first
    assert '\nsys.argv[:] = ["lesson.py", "--steps", "3"]\n' in first
    assert parts == ["x = 1\n\n\ndef double(y):\n    return 2 * y", "print(double(x))"]


def test_a_page_of_several_ranks_notes_its_parts_down_and_runs_them_last(build) -> None:
    first, *parts, last = cells(build(PAGE, SEVERAL), "code")
    assert "register_cell_magic" in first
    assert parts == ["%%page 6\nx = 1\n\n\ndef double(y):\n    return 2 * y", "%%page 26\nprint(double(x))"]
    assert last == f'run("{SEVERAL}")'


def test_a_page_without_code_has_no_code(build) -> None:
    notebook = build("# T\n\nWords.\n\n```shell\nls\n```", "none")
    assert not cells(notebook, "code")
    assert "no code to run" in text(notebook)


def test_every_code_cell_knows_its_line(build) -> None:
    lines = [cell.metadata.get("page_line") for cell in build(PAGE, SEVERAL).cells if cell.cell_type == "code"]
    assert lines == [None, 6, 26, 29]


def test_the_title_comes_first_and_says_how_to_use_the_notebook(build) -> None:
    notebook = build(PAGE, SEVERAL)
    assert notebook.cells[0].source.startswith("# Lesson\n\n*This notebook was made from a page")
    assert f"`lesson.py` and runs `{SEVERAL}`" in notebook.cells[0].source
    assert notebook.cells[1].cell_type == "code"
    chinese = build(PAGE, SEVERAL, "zh-Hans")
    assert "本笔记本" in chinese.cells[0].source
    assert chinese.cells[-2].source == "## 运行程序"


def test_the_program_is_run_where_its_last_section_ends(build) -> None:
    tail = "\n\n```text output\n2\n```\n\nSo it is.\n\n### Deeper\n\n![x](none.svg)\n\n## Last words\n\nBye."
    sources = [cell.source.split("\n")[0] for cell in build(PAGE + tail, SEVERAL).cells]
    last = sources.index("%%page 26")
    assert sources[last + 1 : last + 4] == ["```text output", "### Deeper", "## Run the program"]
    assert sources[-1] == "## Last words"


def test_a_kernel_and_an_origin_are_written(parse) -> None:
    from pagebuild.notebook.page_notebook import build_notebook

    notebook = build_notebook(parse(PAGE), {}, {"page": "lesson", "commit": "c"})
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.colossal == {"page": "lesson", "commit": "c"}
    nbformat.validate(notebook)
    again = build_notebook(parse(PAGE), {}, {"page": "lesson", "commit": "c"})
    assert nbformat.writes(notebook) == nbformat.writes(again)


# ------------------------------------------------------------------------------------------ what code is for


ROLES = """---
kind: how-to
outcome: Train with `f`.
minutes: 5
devices: cpu
---
# T

```python file=sub/train.py
x = 1
```

```shell run
ls  # files


pwd
```

```text output
sub
```

```python
y = 1
```

```python check
assert y
```

```python figure
z = 1
```
"""
PYTHON_CELLS = ["y = 1", "assert y", "z = 1"]


def test_checks_and_figures_are_hidden_cells_with_a_tag(build) -> None:
    cells = [cell for cell in build(ROLES).cells if cell.source in PYTHON_CELLS]
    found = [(cell.source, cell.metadata.get("tags"), cell.metadata.get("jupyter")) for cell in cells]
    hidden = {"source_hidden": True}
    assert found == [("y = 1", None, None), ("assert y", ["check"], hidden), ("z = 1", ["figure"], hidden)]


def test_a_file_is_written_and_a_transcript_runs_in_a_shell(build) -> None:
    notebook = build(ROLES)
    shell, world, *parts = cells(notebook, "code")
    assert ("def bash" in shell, "WORLD_SIZE" in world) == (True, True)
    own = ["%%writefile sub/train.py\nx = 1", "%%bash\nls  # files\n\n\npwd"]
    assert parts == [*own, *PYTHON_CELLS]
    assert "sub" not in text(notebook)
    shell, ranks, *parts, _ = cells(build(ROLES, SEVERAL), "code")
    assert ("def bash" in shell, "def page" in ranks) == (True, True)
    lines = (25, 29, 33)
    assert parts == [*own, *(f"%%page {line}\n{code}" for line, code in zip(lines, PYTHON_CELLS, strict=True))]


def test_a_page_with_a_shell_alone_is_of_one_rank_and_has_no_world(parse, build) -> None:
    page = ROLES.partition("```python\n")[0]
    assert notebook_kind(parse(page, "none")) == "one"
    notebook = build(page, "none")
    assert len(cells(notebook, "code")) == 3
    assert "cells with `%%bash` run" in text(notebook)
    assert "world" not in text(notebook)
    assert "sub" not in text(notebook)


def test_the_outcome_stands_below_the_title_and_the_front_matter_vanishes(build) -> None:
    notebook = build(ROLES)
    assert notebook.cells[0].source.startswith("# T\n\nTrain with `f`.\n\n*This notebook was made")
    assert "how-to" not in text(notebook)


def test_code_with_a_role_that_is_not_run_is_text(build) -> None:
    start, end = "<!--- doc-test-ignore-start: why -->", "<!--- doc-test-ignore-end -->"
    notebook = build(f"# T\n\n{start}\n\n{ROLES.partition('# T')[2]}\n{end}\n", "none")
    assert not cells(notebook, "code")
    assert "```shell run\nls  # files" in text(notebook)


# ------------------------------------------------------------------------------------------ what stays text


@pytest.mark.parametrize("language", ["shell", "bash", "sh", "console", "json", "javascript", "r", "julia", "text", ""])
def test_fences_of_other_languages_are_shown_and_not_run(build, language) -> None:
    notebook = build(f"# T\n\n```{language}\nrm -rf x\n\n\nrm y\n```\n\n```python\nx = 1\n```")
    assert cells(notebook, "code")[1:] == ["x = 1"]
    assert f"```{language}\nrm -rf x\n\n\nrm y\n```" in text(notebook)


def test_ignored_code_is_shown_with_the_reason(build) -> None:
    ignored = (
        "<!--- doc-test-ignore-start: it needs 8 GPUs -->\n\n```python\nimport a\n\n\nlaunch()\n```\n\n"
        "<!--- doc-test-ignore-end -->"
    )
    notebook = build(f"# T\n\n{ignored}\n\n```python\nx = 1\n```")
    assert cells(notebook, "code")[1:] == ["x = 1"]
    assert "*Not run here: it needs 8 GPUs.*\n\n```python\nimport a\n\n\nlaunch()\n```" in text(notebook)
    assert "doc-test" not in text(notebook)
    assert "*此处不运行：它需要 8 个 GPU。*" in text(
        build(ignored.replace("it needs 8 GPUs", "它需要 8 个 GPU"), "none", "zh-Hans")
    )


def test_an_output_that_the_author_left_open_is_the_recorded_one(parse) -> None:
    printed = [{"printed": "x = 2.5\n```\n", "figures": []}, {"printed": "", "figures": []}]
    run = RecordedRun(Records(Path("verified")), {"blocks": printed})
    notebook = build_notebook(parse(PAGE.replace("nothing", "x = ...\n..."), SEVERAL), {}, {}, run)
    assert "````text\nx = 2.5\n```\n````" in text(notebook)
    assert "..." not in text(notebook)


def test_output_is_text_where_the_cell_does_not_show_it_itself(build) -> None:
    assert "nothing" not in text(build(PAGE))
    assert "```text output\nnothing\n```" in text(build(PAGE, SEVERAL))


def test_code_inside_a_list_is_run_and_text_inside_one_stays(build) -> None:
    notebook = build("# T\n\n- one\n\n  ```python\n  x = 1\n  ```\n\n- two\n\n  ```shell\n  ls\n  ```")
    assert cells(notebook, "code")[1:] == ["x = 1"]
    assert "  ```shell\n  ls\n  ```" in text(notebook)


def test_a_marker_in_a_fence_is_not_taken_away(build) -> None:
    marker = "<!-- doc-test-command: none -->"
    assert marker in text(build(f"# T\n\n```markdown\n{marker}\n```", "none"))


# ------------------------------------------------------------------------------------------ what is rewritten


def test_alerts_get_a_title(build) -> None:
    page = "# T\n\n> [!WARNING]\n> Take care.\n> Really."
    assert "> **Warning**\n>\n> Take care.\n> Really." in text(build(page, "none"))
    assert "> **警告**\n>\n> Take care." in text(build(page, "none", "zh-Hans"))


def test_tabs_are_read_one_after_the_other(build) -> None:
    page = "# T\n\n<!--- tabs-start: device -->\n\n**CPU**\n\nOne.\n\n**GPU**\n\nTwo.\n\n<!--- tabs-end -->"
    found = text(build(page, "none"))
    assert "**CPU**\n\nOne.\n\n**GPU**\n\nTwo." in found
    assert "tabs-" not in found


def test_a_hook_becomes_a_signature_and_a_sentence(build) -> None:
    found = text(build("# T\n\n{{ autodoc:pack.thing }}\n\n{{ autodoc:pack.THINGS }}", "none"))
    assert '**`pack.thing(size, *rest, name="x", **more)`**\n\nMake a thing.' in found
    assert "*All parameters: `help(pack.thing)`.*" in found
    assert "**`pack.THINGS`**" in found
    assert "autodoc" not in found


def test_links_lead_to_notebooks_and_to_jupyters_headings(build) -> None:
    page = (
        "# T\n\n## Why this is so\n\n[a](other.md), [b](../x/other.md#part), [c](#why-this-is-so), "
        "[d](https://example.org/x.md), `](code.md)`"
    )
    found = text(build(page, "none"))
    assert "[a](other.ipynb), [b](../x/other.ipynb), [c](#Why-this-is-so)" in found
    assert "[d](https://example.org/x.md), `](code.md)`" in found
    chinese = text(build("# T\n\n## 为什么？ 因为\n\n## 为什么 因为\n\n[a](#为什么-因为), [b](#为什么-因为-1)", "none"))
    assert "[a](#为什么？-因为), [b](#为什么-因为)" in chinese


def test_images_come_along(build, tmp_path) -> None:
    (tmp_path / "figure.svg").write_text("<svg/>")
    notebook = build('# T\n\nWords.\n\n![Two "words"](figure.svg)\n\nMore, with ![inline](figure.svg).', "none")
    address = "data:image/svg+xml;base64,PHN2Zy8+"
    assert f'<img alt="Two &quot;words&quot;" src="{address}">' in cells(notebook, "markdown")
    assert f"![inline]({address})" in text(notebook)


def test_sections_are_cells_of_their_own(build) -> None:
    starts = [source.split("\n")[0] for source in cells(build(PAGE), "markdown")]
    assert starts == ["# Lesson", "Text before.", "## Next"]


def test_every_phrase_is_there_in_both_languages() -> None:
    content = json.loads(texts.FILE.read_text(encoding="utf-8"))
    for group in content.values():
        for key, words in group.items():
            assert set(words) == {"en", "zh-Hans"}, key
            assert words["en"].count("{") == words["zh-Hans"].count("{"), key
