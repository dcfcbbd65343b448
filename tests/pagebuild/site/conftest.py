"""A small project with pages in two languages, from which a website can be made."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pagebuild.site.coverage import Coverage, current_coverage
from pagebuild.site.edition import current_edition
from pagebuild.site.project import Project
from pagebuild.site.website import website_files
from pagetest.graph.fingerprint import fingerprint
from pagetest.graph.imports import ImportGraph
from pagetest.model.page import Page
from pagetest.results.recorder import run_facts
from pagetest.results.records import Records

PRESENT = "the present code"
PROJECT = Project("https://host.example/team/colossal", "c" * 40, "2026-11-20")

LESSON = """# A lesson

The first sentence. The second one, with `code`.

```python
x = 1
print(x)
```

## More

{{ autodoc:pack.Thing }}

![A figure](../images/figure.svg)

```python
mesh = launch()
```

<!-- doc-test-command: torchrun --standalone --nproc_per_node=2 lesson.py -->
"""
CHINESE = (
    LESSON.replace("A lesson", "一课")
    .replace("The first sentence. The second one, with `code`.", "第一句话。第二句话，\n换行之后。")
    .replace("## More", "## 更多")
)
RAN: dict[str, Any] = {
    "device": "cpu", "date": "2026-11-19", "commit": "a" * 40, "processor": "A processor",
    "backend": "gloo", "world": 2, "seconds": 8.6,
}  # fmt: skip
TALK = "# Talk\n\nNothing to run.\n\n<!-- doc-test-command: none -->\n"


def described(name: str, kind: str, **more: Any) -> dict[str, Any]:
    """An entry of the API reference."""
    words = {"type": "text", "value": f"About {name}: "}
    code = {"type": "link", "url": "api:pack.go", "children": [{"type": "inlineCode", "value": "go"}]}
    body = [{"type": "paragraph", "children": [words, code]}]
    return {"name": name, "kind": kind, "body": body, "source": {"file": "src/pack/__init__.py"}, "members": []} | more


TEXTS = {"en": "Make things", "zh-Hans": "制造"}
PACK = {"name": "things", "title": {"en": "Things", "zh-Hans": "物件"}, "objects": ["pack", "pack.Thing", "pack.go"]}
API = {
    "version": "0.1.0",
    "contents": {
        "groups": [{"name": "make", "title": TEXTS, "pages": [PACK]}],
        "opening": {
            "en": "# API\n\nBegin: [things](things.md).\n",
            "zh-Hans": "# 接口\n\n[物件](things.md)。\n",
        },
    },
    "objects": {
        "pack": described("pack", "module", members=["pack.go", "pack.Thing", "pack.inner"]),
        "pack.inner": described("pack.inner", "module"),
        "pack.Thing": described("pack.Thing", "class", members=["pack.Thing.use"]),
        "pack.Thing.use": described("pack.Thing.use", "method"),
        "pack.go": described("pack.go", "function"),
    },
}
SIDEBARS = {
    "tutorialSidebar": [
        {"type": "category", "label": "Basics", "items": ["basics/lesson", {"type": "doc", "id": "talk"}]}
    ]
}
LABELS = {"sidebar.tutorialSidebar.category.Basics": {"message": "基础"}}


@dataclass(frozen=True)
class Docs:
    """The project's files."""

    root: Path

    def write(self, name: str, content: str | object) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, indent=1)
        path.write_text(text, encoding="utf-8")
        return path

    def results(self, *entries: dict[str, Any], folder: str = "build/docs/verified") -> None:
        for entry in entries:
            Records(self.root / folder).write(entry)

    def record(self, language: str = "en", **changes: Any) -> dict[str, Any]:
        """The record of a run of the lesson that holds, as far as nothing is changed."""
        page, graph, facts = self.page(language=language), ImportGraph(self.root / "src"), run_facts(self.root)
        blocks = [{"printed": "1\n", "figures": []}, {"printed": "", "figures": []}]
        found = {"page": page.name, "lang": language, "status": "PASS", "blocks": blocks}
        found |= {"fingerprint": fingerprint(page, graph), "inputs": facts["inputs"], "versions": facts["versions"]}
        return found | RAN | changes

    def same(self, **changes: Any) -> dict[str, Any]:
        """The record of the translation, which has the same code."""
        found = self.record("zh-Hans", status="SAME", **changes)
        return {key: value for key, value in found.items() if key != "blocks"}

    def page(self, name: str = "basics/lesson", language: str = "en") -> Page:
        return current_edition(self.root).tree.page(name, language)

    def coverage(self) -> Coverage:
        return current_coverage(self.root)

    def badges(self, name: str = "basics/lesson", language: str = "en") -> list[dict[str, Any]]:
        return self.coverage().results.badges(self.page(name, language))


@pytest.fixture
def docs(tmp_path: Path) -> Docs:
    docs = Docs(tmp_path)
    for language, lesson in (("en", LESSON), ("zh-Hans", CHINESE)):
        docs.write(f"docs/source/{language}/basics/lesson.md", lesson)
        docs.write(f"docs/source/{language}/talk.md", TALK)
        docs.write(f"docs/source/{language}/images/figure.svg", f"<svg>{language}</svg>")
    docs.write("docs/figures/draw.py", "def figure() -> None: ...\n")  # a script draws the figure in each language
    docs.write("docs/source/zh-Hans/sidebar_category_translation.json", LABELS)
    docs.write("docs/sidebars.json", SIDEBARS)
    docs.write("docs/versions.json", ["current"])
    docs.write("build/docs/api.json", API)
    docs.write("README.md", "# pack\n\n```python\nx = 1\n```\n")
    return docs


@pytest.fixture
def make(docs, monkeypatch) -> Callable[[], dict[str, bytes]]:
    """Makes all files; the landing page's data, which asks the real library, has tests of its own."""
    monkeypatch.setattr("pagebuild.site.website.landing_data", lambda *_: {"landing": True})

    def stale(page: Page) -> tuple[str, ...]:
        return ("更多",) if page.language == "zh-Hans" and page.name == "basics/lesson" else ()

    return lambda: website_files(docs.root, PROJECT, Coverage(docs.coverage().results, lambda _: PRESENT, stale))
