"""The pages of one edition as the website reads them, with their images and downloads."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pagebuild.anchors import SharedAnchors
from pagebuild.api.contents import API_FOLDER, contents_files
from pagebuild.runs import shown_outputs, shown_run
from pagebuild.site.coverage import Coverage
from pagebuild.site.downloads import DOWNLOADS, downloadable_files, executed_notebook
from pagebuild.site.edition import BrokenInputError, Edition
from pagebuild.site.front_matter import PageFacts, first_sentence, front_matter, website_page
from pagebuild.site.project import Project
from pagebuild.site.reference import reference_page, summary
from pagetest.checks.figures import Figures
from pagetest.finding import Finding
from pagetest.model.page import Page
from pagetest.model.tree import LANGUAGES

IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp")


@dataclass(frozen=True)
class EditionWriter:
    """Makes the files of one edition."""

    root: Path
    project: Project
    edition: Edition
    coverage: Coverage

    @cached_property
    def _anchors(self) -> SharedAnchors:
        return SharedAnchors(self.edition.tree)

    def files(self) -> dict[str, bytes]:
        """Every page in every language, with images and downloads, by path below the website's folder."""
        pages = [self._page(name, language) for name in self.edition.tree.names for language in LANGUAGES]
        if faults := [fault for page in pages for fault in self._faults(page)]:
            raise BrokenInputError(*faults)
        found = dict(self._images())
        for page in pages:
            found |= self._downloads(page)
            facts = self._facts(page, tuple(found))
            text = website_page(page, facts, first_sentence(page))
            found[f"{self.edition.folder(page.language)}/{page.name}.md"] = text.encode()
        return found | dict(self._reference())

    def _page(self, name: str, language: str) -> Page:
        path = self.edition.tree.path(name, language)
        if not path.is_file():
            raise BrokenInputError(Finding(path, 1, f"the page exists in another language only: translate {name}"))
        return self.edition.tree.page(name, language)

    def _faults(self, page: Page) -> Iterator[Finding]:
        for hook in page.hooks:
            if hook.text not in self.edition.objects:
                yield Finding(page.path, hook.line, f"`{hook.text}` is not in the API reference: correct the name")
        if page.name.startswith(f"{API_FOLDER}/"):
            yield Finding(page.path, 1, f"the folder {API_FOLDER}/ belongs to the API reference: move the page")

    def _relative_source(self, file: Path) -> str:
        return file.resolve().relative_to(self.root.resolve()).as_posix()

    def _facts(self, page: Page, published: tuple[str, ...]) -> PageFacts:
        source = self._relative_source(page.path)
        edit = self.project.edit_address(source) if self.edition.is_current else None
        places = {kind: self._download_path(page, suffix) for kind, suffix in DOWNLOADS.items()}
        downloads = {kind: f"/{place}" for kind, place in places.items() if f"static/{place}" in published}
        results = self.coverage.results
        run = shown_run(page, results.find_run)
        outputs = shown_outputs(page, run)
        recorded = run.record if run and outputs else None
        return PageFacts(
            source,
            edit,
            "tutorial",
            results.badges(page),
            downloads,
            self.coverage.stale_headings(page),
            page.front,
            self._anchors.of_headings(page),
            self._anchors.of_links(page),
            outputs,
            recorded,
        )

    def _download_path(self, page: Page, suffix: str) -> str:
        return f"{self.edition.downloads}/{page.language}/{page.name}{suffix}"

    def _downloads(self, page: Page) -> dict[str, bytes]:
        texts = downloadable_files(page, self._relative_source(page.path), self.edition.reference["version"])
        found = {f"static/{self._download_path(page, suffix)}": text.encode() for suffix, text in texts.items()}
        file = self.root / "build" / "docs" / "notebooks" / page.language / f"{page.name}.ipynb"
        present = self.coverage.fingerprint(page)
        content = executed_notebook(file, page, present) if self.edition.is_current else None
        if content is not None:
            found[f"static/{self._download_path(page, '.ipynb')}"] = content
        return found

    def _images(self) -> Iterator[tuple[str, bytes]]:
        for language in LANGUAGES:
            folder = self.edition.tree.source / language
            for file in sorted(folder.rglob("*")):
                place = file.relative_to(folder)
                if file.suffix.lower() in IMAGES and not any(part.startswith((".", "_")) for part in place.parts):
                    yield f"{self.edition.folder(language)}/{place.as_posix()}", file.read_bytes()
            for name, content in Figures(self.edition.tree).translated(language):
                yield f"{self.edition.folder(language)}/{name}", content

    def _reference(self) -> Iterator[tuple[str, bytes]]:
        """The pages of the API reference; what is edited is the table of its contents, or the page to begin with."""
        table, *openings = map(self._relative_source, contents_files(self.root))
        contents, objects = self.edition.contents, self.edition.objects
        for language, opening in zip(LANGUAGES, openings, strict=True):
            text = contents.opening[language]
            title = text.partition("\n")[0].removeprefix("# ")
            yield self._reference_page("index", language, opening, text, title=title, description=title)
            for page in contents.pages:
                title, text = page.title[language], reference_page(page, objects, language)
                words = summary(objects[page.objects[0]]) or title
                yield self._reference_page(page.name, language, table, text, title=title, description=words)

    def _reference_page(self, name: str, language: str, source: str, text: str, **words: str) -> tuple[str, bytes]:
        edit = self.project.edit_address(source) if self.edition.is_current else None
        place = f"{API_FOLDER}/{name}"
        head = front_matter(place, language, PageFacts(source, edit, "api"), **words)
        return f"{self.edition.folder(language)}/{place}.md", (head + text).encode()
