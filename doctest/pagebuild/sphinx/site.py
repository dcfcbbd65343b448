"""Runs Sphinx, once per language, and reports every warning at the author's line."""

import io
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

from pagebuild.api.sphinx_warnings import warning_finding
from pagebuild.api.target import Resolver
from pagebuild.sphinx.myst import MystPage
from pagetest.finding import Finding

LANGUAGE_CODES = {"en": "en", "zh-Hans": "zh_CN"}


@dataclass(frozen=True)
class SphinxSite:
    """A site of one language."""

    language: str
    configuration: Path  # the folder of `conf.py`
    source: Path  # the folder that Sphinx reads
    output: Path
    builder: str  # Sphinx's name for what is built: `html`, or `dummy` for the warnings alone
    resolver: Resolver  # knows where objects are defined
    described: Sequence[str]  # the objects that have a page

    def build(self, pages: Mapping[Path, tuple[Path, MystPage]]) -> list[Finding]:
        """Builds the site anew; returns Sphinx's warnings, each of which is a fault."""
        shutil.rmtree(self.output, ignore_errors=True)
        warnings = io.StringIO()
        with patch_docutils(str(self.configuration)), docutils_namespace():
            app = Sphinx(
                self.source,
                self.configuration,
                self.output,
                self.source.parent / f"doctrees-{self.language}",
                self.builder,
                confoverrides={
                    "language": LANGUAGE_CODES[self.language],
                    "html_context.page_language": self.language,
                    "api_described": tuple(self.described),
                },
                status=None,
                warning=warnings,
                freshenv=True,
                warningiserror=True,
            )
            app.build()
        found = [warning_finding(line, self.resolver) for line in warnings.getvalue().splitlines() if line.strip()]
        return sorted({_at_author_line(finding, pages) for finding in found})


def _at_author_line(finding: Finding, pages: Mapping[Path, tuple[Path, MystPage]]) -> Finding:
    """The finding at the author's line."""
    if finding.path not in pages:
        return finding
    author, made = pages[finding.path]
    return Finding(author, made.author_line(finding.line), finding.message)
