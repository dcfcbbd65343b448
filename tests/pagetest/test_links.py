"""Links lead to files and headings that exist, under the names that GitHub and the website give them."""

import pytest

from pagetest.checks.links import LinkChecker
from pagetest.model.sections import make_slugs
from pagetest.model.tree import Tree

SLUGS = {  # as github-slugger 2.0.0 makes them, the slugger of GitHub and of Docusaurus
    "Title": "title",
    "What's new in 2.13.0?": "whats-new-in-2130",
    "A `b_c` & d / e": "a-b_c--d--e",
    "fp16: loss scale (dynamic)": "fp16-loss-scale-dynamic",
    "出错时会看到什么": "出错时会看到什么",
    "ZeRO：优化器状态的切分（第 1 级）": "zero优化器状态的切分第-1-级",
    "Écoles — ÅB": "écoles--åb",
    "x² ½ Ⅳ ①": "x--ⅳ-",
    "tabs\tand\u3000wide": "tabsandwide",
    "emoji 🚀 end": "emoji--end",
    "--flag": "--flag",
    "हिन्दी": "हिन्दी",
}


@pytest.mark.parametrize(("text", "slug"), SLUGS.items())
def test_a_heading_gets_the_name_that_github_gives_it(text, slug) -> None:
    assert list(make_slugs([text])) == [slug]


def test_a_name_that_is_taken_gets_a_number() -> None:
    assert list(make_slugs(["a", "a", "a-1", "a", "A"])) == ["a", "a-1", "a-1-1", "a-2", "a-3"]


FILES = {
    "en/basics/a.md": "# Title\n\n## The `part`\n\n## The part\n",
    "en/bare.md": "no heading\n",
    "zh-Hans/b.md": "# 标题\n",
    "en/images/l.svg": "",
    "logo.png": "",
}

GOOD = [
    "basics/a.md",
    "./basics/a.md",
    "basics/a.md#title",
    "basics/a.md#the-part-1",
    "basics/a.md?plain=1#the-part",
    "basics/../bare.md",
    "bare.md#",
    "#here-%E4%B8%AD",
    "#here-中",
    "#",
    "https://example.org/x#y",
    "mailto:a@b.c",
    "//example.org",
    "images/l.svg",
    "../logo.png",
]

DEAD = {
    "basics/none.md": "leads to none.md, which does not exist: correct it",
    "basics/A.md": "leads to A.md, which does not exist (there is a.md): correct it",
    "Basics/a.md": "leads to a.md, which does not exist",
    "basics/": "leads to basics, which does not exist",
    "images/L.svg": "leads to L.svg, which does not exist (there is l.svg)",
    "../../outside.png": "leads to outside.png, which does not exist",
    "../zh-Hans/b.md": "leaves the en pages",
    "/basics/a.md": "begins at the root",
    "basics/a.md#none": "leads to no heading of a.md; the nearest is `#",
    "basics/a.md#Title": "leads to no heading of a.md; the nearest is `#title`: correct it",
    "basics/a.md#the-prt": "the nearest is `#the-part`",
    "basics/a.md#the-part-2": "leads to no heading of a.md; the nearest is `#the-part-1`",
    "bare.md#x": "leads to no heading of bare.md; it has no heading: correct it",
    "#there": "leads to no heading of this page; the nearest is `#here-中`",
}


@pytest.fixture
def links(docs) -> LinkChecker:
    for name, text in FILES.items():
        path = docs.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return LinkChecker(Tree(docs.source))


def faults(docs, links: LinkChecker, text: str) -> list[str]:
    docs.write("page", f"# Here 中\n\n{text}\n", "en")
    return [str(finding).removeprefix(str(docs.source)) for finding in links.faults(links.tree.page("page", "en"))]


@pytest.mark.parametrize("link", GOOD)
def test_a_living_link_is_accepted(docs, links, link) -> None:
    assert faults(docs, links, f"[words]({link}) ![image]({link})") == []


@pytest.mark.parametrize("form", ["words\n[words]({})", "words\n![image]({})", "<div>\n<img src='{}'>\n</div>"])
@pytest.mark.parametrize(("link", "message"), DEAD.items())
def test_a_dead_link_is_found_at_its_line(docs, links, link, message, form) -> None:
    [found] = faults(docs, links, form.format(link))
    assert found.startswith(f"/en/page.md:4: the link `{link}` ")
    assert message in found


def test_check_finds_dead_links_in_all_pages(docs, capsys) -> None:
    docs.write("a", "# A\n\n[words](b.md#c)\n\n<!-- doc-test-command: none -->\n")
    docs.write("b", "# B\n\n## C\n\n<!-- doc-test-command: none -->\n", "en")
    docs.write("b", "# 乙\n\n## 丙\n\n<!-- doc-test-command: none -->\n", "zh-Hans")
    assert docs.main("--check") == 1
    out = capsys.readouterr().out
    assert "zh-Hans/a.md:3: the link `b.md#c` leads to no heading of b.md; the nearest is `#" in out
    assert out.count("the link") == 1
