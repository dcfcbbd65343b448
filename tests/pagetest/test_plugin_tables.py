"""Tables about plugins are what one file says, on every page and in every language."""

import pytest

from pagetest.checks.plugin_tables import PluginTables

pytestmark = pytest.mark.slow

FILE = """
[columns]
when = { en = "when", zh-Hans = "何时" }
name = { en = "plugin", zh-Hans = "插件" }
size = { en = "size", zh-Hans = "大小" }

[[plugin]]
key = "none"
name = ""
page = "basics/a"
size = "1"
en.when = "one, see [b](features/b.md)"
zh-Hans.when = "一个"

[[plugin]]
key = "many"
name = "ManyPlugin"
page = "features/b"
size = "2"
en.when = "many"
zh-Hans.when = "多个"
"""
END = "<!-- /plugins -->\n"
PAGE = f"# T\n\n<!-- plugins: when, name, size -->\n{END}\n<!-- plugins of many: name -->\n{END}"
ENGLISH = """# T

<!-- plugins: when, name, size -->
| when | plugin | size |
| --- | --- | --- |
| one, see [b](../features/b.md) | [`Booster()`](../basics/a.md) | 1 |
| many | [`ManyPlugin`](../features/b.md) | 2 |
<!-- /plugins -->

<!-- plugins of many: name -->
| plugin |
| --- |
| [`ManyPlugin`](../features/b.md) |
<!-- /plugins -->
"""


@pytest.fixture
def tables(docs) -> PluginTables:
    docs.source.mkdir(parents=True)
    file = docs.source.parent / "plugins.toml"
    file.write_text(FILE, encoding="utf-8")
    return PluginTables(file)


@pytest.mark.usefixtures("tables")
def test_tables_are_written_in_the_language_of_the_page_and_then_hold(docs, capsys) -> None:
    docs.write("basics/t", PAGE + "\n<!-- doc-test-command: none -->\n")
    assert docs.main("--check") == 1
    assert "t.md:3: this table is not what plugins.toml says: run `docs_test.py --tables`" in capsys.readouterr().out
    assert docs.main("--tables") == 0
    assert "2 pages changed" in capsys.readouterr().out
    assert (docs.source / "en/basics/t.md").read_text().startswith(ENGLISH)
    chinese = (docs.source / "zh-Hans/basics/t.md").read_text()
    assert "| 何时 | 插件 | 大小 |" in chinese
    assert "| 多个 | [`ManyPlugin`](../features/b.md) | 2 |" in chinese
    docs.main("--check")
    assert "plugins.toml" not in capsys.readouterr().out
    docs.main("--tables")
    assert "0 pages changed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (ENGLISH.replace("| 2 |", "| 3 |"), 3, "this table is not what plugins.toml says"),
        (ENGLISH.replace("of many", "of few"), 10, "plugins.toml has no `few`: correct the marker"),
        (ENGLISH.replace("when, name, size", "when, price"), 3, "plugins.toml has no `price`: correct the marker"),
        ("# T\n\n<!-- plugins: name -->\n| plugin |\n", 3, "the table is never closed: add `<!-- /plugins -->`"),
    ],
)
def test_other_tables_and_markers_are_faults(parse, tables, text, line, message) -> None:
    assert not list(tables.faults(parse(ENGLISH)))
    (found,) = tables.faults(parse(text))
    assert found.line == line
    assert message in found.message


def test_a_tree_without_the_file_has_no_tables(docs, parse) -> None:
    assert not list(PluginTables(docs.source / "none.toml").faults(parse("# T\n")))
