"""The Sphinx site of a small tree of pages, built once as a user builds it; once checked with every kind of fault."""

import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagebuild import cli
from pagebuild.sphinx import command
from pagebuild.sphinx.sources import SphinxSources
from pagetest.graph.fingerprint import fingerprint
from pagetest.graph.imports import ImportGraph
from pagetest.model.page import Page
from pagetest.model.tree import Tree
from pagetest.results.recorder import run_facts
from pagetest.results.records import Records

pytestmark = pytest.mark.slow


ROOT = Path(__file__).resolve().parents[3]
LESSON = """---
kind: concept
outcome: Say what `boost` does.
minutes: 5
devices: cpu
---
# Lesson

{{ autodoc:colossal.booster.Booster }}

{{ autodoc:colossal.Booster.boost }}

```
{{ autodoc:colossal.booster.Booster }}
```

% Not a comment, and {not}`a role`.

## Part

> [!WARNING]
> Mind the **gap**.

<!--- tabs-start: device -->

**CPU (gloo)**

Slow.

**GPU**

Fast.

<!--- tabs-end -->

Inline $\\eta_k$ and

$$
\\eta = \\frac{a}{b}, \\text{每卡显存}
$$

```mermaid
graph TD
```

![A figure](../images/figure.svg)

See [the other page](other.md#第二节-显存).

```python file=train.py
x = 1
```

```shell run
python train.py
```

```python check
checked = 1
```

```text output
1
```

<!-- doc-test-command: none -->
"""
RUN = "# Run\n\n```python\nprint(x)\n```\n\n```text output\nx = ...\n```\n\n<!-- doc-test-command: python run.py -->\n"
OTHER = "# Other\n\n## 第二节 显存\n\n优化器与梯度累积。Back to [the lesson](lesson.md).\n"
FIGURE = '<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"><rect width="9" height="9"/></svg>\n'
SIDEBAR = '{"s": [{"type": "category", "label": "Basics", "items": ["basics/lesson", "basics/other", "basics/run"]}]}'
LABELS = '{"s": {"message": ""}, "sidebar.s.category.Basics": {"message": "基础"}}'
API_PAGES = ("errors", "booster", "wrappers", "lr_schedules_with_warmup")
GROUPS = ("train", "optimizers_and_schedules", "tests_and_errors")
FAULTY = """# Faulty

{{ autodoc:colossal.booster.Boster }}

> [!NOTE]
> See [nothing](gone.md).

A formula: $\\frac{a}$.

[A heading](#that-is-not-here)

![no figure](../images/gone.svg)

```pithon
x = 1
```

```json
{"a": $}
```
"""


@dataclass(frozen=True)
class Built:
    """What came of a build."""

    folder: Path
    status: int
    output: str

    def html(self, name: str) -> str:
        return (self.folder / "html" / f"{name}.html").read_text(encoding="utf-8")

    def article(self, name: str) -> str:
        match = re.search(r'<article role="main".*?</article>', self.html(name), re.DOTALL)
        assert match
        return match.group()

    def words(self, name: str) -> str:
        """What a reader sees."""
        return unescape(re.sub(r"<.*?>", "", self.article(name), flags=re.DOTALL))


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def build(folder: Path, languages: Sequence[str], api_pages: Sequence[str], *more: str) -> Built:
    source, html, work = folder / "docs" / "source", folder / "html", folder / "work"
    places = ["--source", source, "--output", html, "--work", work]
    chosen = [word for language in languages for word in ("--lang", language)]
    chosen += [word for page in api_pages for word in ("--api-page", page)]
    command = [sys.executable, "docs_build.py", "sphinx", *map(str, places), *chosen, *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.stderr == ""
    return Built(folder, done.returncode, done.stdout)


def record_of(page: Page) -> dict[str, Any]:
    """The record of a run that holds."""
    run = {"page": page.name, "lang": page.language, "device": "cpu", "status": "PASS"}
    blocks = [{"printed": "x = 2.5\n", "figures": []}]
    facts = run_facts(ROOT) | {"date": "2026-11-19", "processor": "A processor"}
    return run | facts | {"fingerprint": fingerprint(page, ImportGraph(ROOT / "src")), "blocks": blocks}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Built:
    folder = tmp_path_factory.mktemp("site")
    pages = {"basics/lesson.md": LESSON, "basics/other.md": OTHER, "basics/run.md": RUN, "images/figure.svg": FIGURE}
    write(folder / "docs", {"sidebars.json": SIDEBAR})
    for language in ("en", "zh-Hans"):
        write(folder / "docs" / "source" / language, pages)
    write(
        folder / "docs" / "source" / "zh-Hans",
        {"sidebar_category_translation.json": LABELS, "figures.json": '{"loss": "损失"}'},
    )
    write(folder / "docs" / "source" / "zh-Hans", {"basics/other.md": f"{OTHER}\n![曲线](../../en/images/curve.svg)\n"})
    write(folder / "docs" / "source" / "en", {"images/curve.svg": "<svg><text>loss</text></svg>"})
    Records(folder / "docs" / "verified").write(record_of(Tree(folder / "docs" / "source").page("basics/run", "en")))
    return build(folder, ["en", "zh-Hans"], API_PAGES)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> Built:
    folder = tmp_path_factory.mktemp("faulty")
    sidebar = '{"s": [{"type": "category", "label": "A", "items": ["a/faulty"]}]}'
    write(folder / "docs", {"sidebars.json": sidebar, "source/en/a/faulty.md": FAULTY})
    write(folder / "html" / "en", {"index.html": "built before"})
    return build(folder, ["en"], API_PAGES[:1], "--check")


LANGUAGES = pytest.mark.parametrize("language", ["en", "zh-Hans"])


def test_it_builds_without_a_warning(site) -> None:
    assert site.status == 0, site.output
    assert [line.partition(": ")[2].partition(" findings")[0] for line in site.output.splitlines()] == [
        "3 pages, 0",
        "3 pages, 0",
    ]


@LANGUAGES
def test_a_hook_is_a_description_and_in_a_fence_it_stays_literal(language, site) -> None:
    article = site.article(f"{language}/basics/lesson")
    assert site.words(f"{language}/basics/lesson").count("{{ autodoc:colossal.booster.Booster }}") == 1
    assert 'class="sig-name descname"><span class="pre">Booster</span>' in article
    assert article.count('class="sig-name descname"><span class="pre">save_model</span>') == 1
    assert article.count('class="sig-name descname"><span class="pre">boost</span>') == 1
    assert 'href="../api/errors.html#colossal.errors.ConfigError"' in article


def test_a_figure_that_the_page_draws_has_the_labels_of_the_language(site) -> None:
    assert '<img alt="曲线" src="../_images/curve.svg"' in site.article("zh-Hans/basics/other")
    assert "损失" in (site.folder / "html/zh-Hans/_images/curve.svg").read_text(encoding="utf-8")


@LANGUAGES
def test_every_construct_of_a_page_is_shown(language, site) -> None:
    article = site.article(f"{language}/basics/lesson")
    assert '<div class="admonition warning">' in article
    assert "% Not a comment, and {not}a role." in site.words(f"{language}/basics/lesson")
    assert 'class="sd-tab-set docutils"' in article
    assert "CPU (gloo)</label>" in article
    assert article.count("<math") == 2
    assert "每卡显存" in article
    assert "graph TD" in site.words(f"{language}/basics/lesson")
    assert '<img alt="A figure" src="../_images/figure.svg"' in article
    assert 'href="other.html#id1"' in article or 'href="other.html#第二节-显存"' in unescape(article)
    assert "doc-test-command" not in re.sub(r"<!--.*?-->", "", article, flags=re.DOTALL)


@pytest.mark.parametrize(("language", "summary"), [("en", "How this page is verified"), ("zh-Hans", "本页如何验证")])
def test_checks_are_folded_and_files_bear_their_names(language, summary, site) -> None:
    article = site.article(f"{language}/basics/lesson")
    assert article.count("<details ") == 1
    _, _, fold = article.partition("<details ")
    words = unescape(re.sub(r"<.*?>", "", fold.partition("</details>")[0], flags=re.DOTALL))
    assert re.search(rf"{summary}.*\bchecked = 1\n.*\b1\n", words, re.DOTALL)
    assert '<span class="caption-text">train.py</span>' in article
    assert "\npython train.py\n" in site.words(f"{language}/basics/lesson")
    assert re.search(r"</h1>\s*<p>Say what <code[^>]*><span class=\"pre\">boost</span></code> does", article)


@pytest.mark.parametrize(("language", "caption"), [("en", "Output, recorded"), ("zh-Hans", "输出，记录于")])
def test_an_output_that_the_author_left_open_is_the_recorded_one(language, caption, site) -> None:
    words = site.words(f"{language}/basics/run")
    assert "x = 2.5" in words
    assert "x = ..." not in words
    assert re.search(rf"{caption} 2026-11-19[，,] ?A processor", words)


@LANGUAGES
def test_every_page_of_the_reference_that_was_asked_for_is_there(language, contents, site) -> None:
    pages = {path.stem for path in (site.folder / "html" / language / "api").glob("*.html")}
    assert pages == {"index", *GROUPS, *API_PAGES}
    for page in contents.chosen(API_PAGES).pages:
        assert f"<h1>{page.title[language]}<" in site.html(f"{language}/api/{page.name}")


@LANGUAGES
def test_the_sidebar_has_the_groups_and_a_group_its_pages(language, contents, site) -> None:
    sidebar = site.html(f"{language}/index").partition('class="sidebar-tree"')[2].partition("</aside>")[0]
    for group in contents.chosen(API_PAGES).groups:
        assert f'href="api/{group.name}.html">{group.title[language]}</a>' in sidebar
        for page in group.pages:
            assert f'href="api/{page.name}.html">{page.title[language]}</a>' in sidebar
    assert "LinearWarmupLR" in site.words(f"{language}/api/optimizers_and_schedules")


def test_a_page_names_what_else_its_objects_are_called(site) -> None:
    assert "The same objects under other names" in site.words("en/api/booster")
    assert "colossal.Booster: colossal.booster.Booster" in site.words("en/api/booster")
    assert "同一对象的其他名称" in site.words("zh-Hans/api/booster")
    assert "under other names" not in site.words("en/api/errors")


def test_names_on_pages_that_are_left_out_are_text(site) -> None:
    article = site.article("en/api/booster")
    assert '<span class="pre">Plugin</span>' in article
    assert "#colossal.booster.plugin.Plugin" not in article


def test_the_whole_reference_is_built_unless_some_pages_are_chosen(contents, monkeypatch) -> None:
    orders = []

    def note(order: command.SiteBuild) -> command.SiteResult:
        orders.append(order)
        return command.SiteResult(order, 0, (), 0.0)

    monkeypatch.setattr(command, "ProcessPoolExecutor", lambda *_, **__: nullcontext(SimpleNamespace(map=map)))
    monkeypatch.setattr(command, "build_site", note)
    assert cli.main(["sphinx", "--lang", "en"], ROOT) == 0
    assert cli.main(["sphinx", "--lang", "en", "--api-page", "errors"], ROOT) == 0
    assert [order.api_pages for order in orders] == [tuple(page.name for page in contents.pages), ("errors",)]


def test_every_object_is_written_on_its_page_and_listed(inventory, contents, tmp_path) -> None:
    locales = ROOT / "docs" / "sphinx" / "locale"
    sources = SphinxSources(Tree(tmp_path), inventory, tmp_path / "work", locales, contents, lambda *_: None)
    sources.write("en")
    folder = tmp_path / "work" / "en" / "api"
    for group in contents.groups:
        listed = (folder / f"{group.name}.md").read_text(encoding="utf-8")
        for page in group.pages:
            assert f"\n{page.name}\n" in listed
            text = (folder / f"{page.name}.md").read_text(encoding="utf-8")
            for name in page.objects:
                shown = name.rpartition(".")[2] if inventory.main[name].kind == "data" else name
                assert re.search(rf"^\.\. [\w:]+:: {re.escape(shown)}$", text, re.MULTILINE), name


def test_a_page_of_the_reference_that_is_not_there_is_refused(capsys) -> None:
    assert cli.main(["sphinx", "--api-page", "boster"], ROOT) == 2
    assert "boster is no page of the reference; there are booster" in capsys.readouterr().err


def test_signatures_and_words_link_to_their_homes(site) -> None:
    article = site.article("en/api/booster")
    assert 'id="colossal.booster.Booster.boost"' in article
    assert 'href="wrappers.html#colossal.interface.OptimizerWrapper"' in article
    lr_scheduler = site.article("en/api/lr_schedules_with_warmup")
    assert 'href="booster.html#colossal.booster.Booster.boost"' in lr_scheduler
    assert '<code class="docutils literal notranslate"><span class="pre">eta_min</span></code>' in lr_scheduler
    assert "<cite>" not in lr_scheduler


def test_each_language_speaks_for_itself(site) -> None:
    english, chinese = site.html("en/basics/lesson"), site.html("zh-Hans/basics/lesson")
    assert '<html class="no-js" lang="en"' in english
    assert '<html class="no-js" lang="zh-CN"' in chinese
    for word in ("Basics", "Raises", "On this page"):
        assert word in english
        assert word not in re.sub(r"<(pre|script).*?</\1>", "", chinese, flags=re.DOTALL)
    for word in ("基础", "抛出", "本页目录", "API 参考"):
        assert word in chinese


def test_the_language_switch_keeps_the_page(site) -> None:
    for here, there in (("en", "zh-Hans"), ("zh-Hans", "en")):
        match = re.search(rf'<a href="([^"]+)" lang="{there}"', site.html(f"{here}/basics/lesson"))
        assert match
        target = (site.folder / "html" / here / "basics" / match.group(1)).resolve()
        assert target == site.folder / "html" / there / "basics" / "lesson.html"
        assert target.is_file()


@LANGUAGES
def test_nothing_is_fetched_from_elsewhere(language, site) -> None:
    for path in (site.folder / "html" / language).rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe|source)[^>]+src="([^"]+)"', text)
        loaded += re.findall(r'<link[^>]+rel="(?:stylesheet|preload|icon)"[^>]+href="([^"]+)"', text)
        assert not [url for url in loaded if re.match(r"(?:https?:)?//", url)], path


def test_the_search_knows_chinese_words(site) -> None:
    path = site.folder / "html" / "zh-Hans" / "searchindex.js"
    index = path.read_text(encoding="utf-8").encode().decode("unicode_escape")
    for word in ("显存", "优化器", "梯度", "梯度累积"):  # the last one only by the glossary
        assert f'"{word}":' in index, word


def test_every_fault_is_reported_at_the_authors_line(faulty) -> None:
    page = faulty.folder / "docs" / "source" / "en" / "a" / "faulty.md"
    found = {}
    for line in faulty.output.splitlines():
        match = re.fullmatch(rf"{re.escape(str(page))}:(\d+): (.*)", line)
        if match:
            found[int(match.group(1))] = match.group(2)
    assert faulty.status == 1
    assert sorted(found) == [3, 6, 8, 10, 12, 14, 18], faulty.output
    assert "`colossal.booster.Boster` is not in the API reference" in found[3]
    assert "'gone.md'" in found[6]
    assert "the formula `\\frac{a}` cannot be drawn" in found[8]
    assert "'that-is-not-here'" in found[10]
    assert "gone.svg" in found[12]
    assert "'pithon' is not known" in found[14]
    assert 'as "json" resulted in an error' in found[18]


def test_a_check_writes_no_site_and_leaves_the_one_that_is_there(faulty) -> None:
    assert faulty.html("en/index") == "built before"
    assert [path.name for path in faulty.folder.rglob("*.html")] == ["index.html"]


@pytest.mark.parametrize(
    ("file", "languages"),
    [
        ("docs/source/en/basics/lesson.md", ["en"]),
        ("docs/source/zh-Hans/basics/lesson.md", ["en", "zh-Hans"]),
        ("docs/source/zh-Hans/sidebar_category_translation.json", ["en", "zh-Hans"]),
        ("src/pack/__init__.py", ["en", "zh-Hans"]),
        ("docs/sidebars.json", ["en", "zh-Hans"]),
        ("docs/sphinx/conf.py", ["en", "zh-Hans"]),
        ("docs/verified/cpu/en/basics/lesson.json", ["en", "zh-Hans"]),
        ("doctest/pagebuild/sphinx/myst.py", ["en", "zh-Hans"]),
        ("tests/test_other.py", ["en"]),
    ],
)
def test_a_check_looks_at_the_languages_that_a_change_can_reach(file, languages, tmp_path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    source = tmp_path / "docs" / "source"
    assert list(command.affected_languages(tmp_path, source)) == ["en", "zh-Hans"]
    for words in (["init", "-q"], *[["commit", "-q", "--allow-empty", "-m", "x"]] * 2):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    assert list(command.affected_languages(tmp_path, source)) == ["en"]
    write(tmp_path, {file: "other"})
    assert list(command.affected_languages(tmp_path, source)) == languages


def test_a_base_that_git_does_not_know_is_a_wrong_call(capsys) -> None:
    assert cli.main(["sphinx", "--check", "--base", "nowhere"], ROOT) == 2
    assert capsys.readouterr().err.startswith("docs_build.py sphinx: ")
