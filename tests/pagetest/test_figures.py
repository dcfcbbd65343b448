"""Figures: other languages show the English ones, with labels that a table translates."""

import json
from pathlib import Path

import pytest

from pagetest.checks.figures import FILE, FigureLabels, Figures, labels, own_address
from pagetest.model.tree import Tree

pytestmark = pytest.mark.slow

FIGURE = """<svg><!-- loss --><title>loss</title>
<text x="1" style="fill: #123">loss</text><text>rank 0</text><text>rank 10</text><text>step 2: 1,024 MB &lt; max</text>
<text>all_reduce</text><text>0.25</text><text>GPU</text><text>LoRA</text><text>10<tspan>2</tspan></text></svg>
"""
TABLE = {"loss": "损失", "rank #": "rank #", "step #: # MB < max": "最多 # & 第 # 步 < 上限"}
TRANSLATED = (
    FIGURE.replace(">loss</text>", ">损失</text>")
    .replace("step 2: 1,024 MB &lt; max", "最多 2 &amp; 第 1,024 步 &lt; 上限")
)  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    write(tmp_path / "source/en/images/curve.svg", FIGURE)
    write_table(tmp_path / "source", TABLE)
    return Tree(tmp_path / "source")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_table(source: Path, rows: object) -> None:
    write(source / "zh-Hans" / FILE, json.dumps(rows, indent=1, ensure_ascii=False))


def faults(tree: Tree) -> list[str]:
    found = Figures(tree).faults()
    return [f"{finding.path.relative_to(tree.source)}:{finding.line}: {finding.message}" for finding in found]


def test_only_labels_are_translated(tree) -> None:
    table = FigureLabels(tree.source / "zh-Hans" / FILE)
    assert table.translate(FIGURE) == TRANSLATED
    assert FigureLabels(tree.source / "missing.json").translate(FIGURE) == FIGURE


def test_a_label_is_named_once_with_a_sign_for_each_number() -> None:
    assert labels(FIGURE) == ["loss", "rank #", "step #: # MB < max", "all_reduce", "#", "GPU", "LoRA"]


def test_translated_figures_have_no_fault(tree) -> None:
    assert faults(tree) == []


def test_a_label_without_a_translation_is_named(tree) -> None:
    write_table(tree.source, {label: text for label, text in TABLE.items() if label != "loss"})
    assert faults(tree) == ["zh-Hans/figures.json:1: the label `loss` of curve.svg has no translation: add a row"]


def test_a_row_that_no_figure_uses_is_named(tree) -> None:
    write_table(tree.source, TABLE | {"accuracy": "准确率"})
    assert faults(tree) == ["zh-Hans/figures.json:5: no figure has the label `accuracy`: remove the row"]


def test_a_translation_without_the_numbers_is_named(tree) -> None:
    write_table(tree.source, TABLE | {"rank #": "rank"})
    assert faults(tree)[0] == "zh-Hans/figures.json:3: `rank` must have a # for each number of `rank #`"


def test_a_figure_that_is_translated_when_pages_are_built_is_not_stored(tree) -> None:
    write(tree.source / "zh-Hans/images/curve.svg", TRANSLATED)
    (found,) = faults(tree)
    assert found.startswith("zh-Hans/images/curve.svg:1: the page draws this figure, in English: remove it, and link ")


def test_other_languages_show_the_english_figure_with_their_labels(tree) -> None:
    figures, original = Figures(tree), tree.source / "en/images/curve.svg"
    assert list(figures.translated("zh-Hans")) == [("images/curve.svg", TRANSLATED.encode())]
    assert figures.shown(original, "zh-Hans") == TRANSLATED.encode()
    assert list(figures.translated("en")) == []
    assert figures.shown(original, "en") == FIGURE.encode()


def test_a_figure_that_a_language_has_itself_is_shown(tree) -> None:
    own = tree.source / "zh-Hans/images/curve.svg"
    write(own, "<svg>own</svg>")
    assert list(Figures(tree).translated("zh-Hans")) == []
    assert Figures(tree).shown(own, "zh-Hans") == b"<svg>own</svg>"


def test_a_built_page_links_the_figure_of_its_language() -> None:
    assert own_address("![a](../../en/images/a.svg) [b](b.md)") == "![a](../images/a.svg) [b](b.md)"
    assert own_address("![a](../en/images/a.svg)") == "![a](images/a.svg)"


@pytest.mark.parametrize(("content", "message"), [("{", "this is no JSON"), ("[1]", "this is not of the form")])
def test_a_broken_table_is_a_finding(tree, content, message) -> None:
    write(tree.source / "zh-Hans" / FILE, content)
    assert f"zh-Hans/figures.json:1: {message}" in faults(tree)[0]


def test_a_figure_of_a_script_is_left_alone(tree) -> None:
    for name in ("scheme", "world", "turns", "step", "curve"):
        write(tree.source / "en/images" / f"{name}.svg", FIGURE)
    lines = ("def scheme():", '    "world": draw_world,', 'd.save("turns")', 'path / "step.svg"', '"curve", "x"')
    write(tree.source.parent / "figures/drawing.py", "\n".join(lines))
    assert faults(tree) == []


def test_the_figures_of_the_last_run_are_taken_over(docs, capsys) -> None:
    code = f"from pathlib import Path\nPath('curve.svg').write_text({FIGURE!r})\nPath('other.svg').write_text('<svg/>')"
    docs.add("lesson", code)
    write_table(docs.source, TABLE)
    write(docs.source / "en/images/curve.svg", "<svg/>")
    assert docs.run("lesson").returncode == 0
    assert docs.main("--figures") == 0
    assert (docs.source / "en/images/curve.svg").read_text() == "<svg/>", "no page is named"
    assert docs.main("lesson", "--figures") == 0
    assert capsys.readouterr().out.endswith("1 figure changed\n")
    assert (docs.source / "en/images/curve.svg").read_text() == FIGURE
    assert not (docs.source / "en/images/other.svg").exists(), "only figures that the pages show"
    assert docs.main("lesson", "--figures") == 0
    assert capsys.readouterr().out == "0 figures changed\n"
