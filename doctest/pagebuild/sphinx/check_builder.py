"""What the writer of the HTML would complain of, for a build that writes nothing."""

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.highlighting import PygmentsBridge

from pagebuild.sphinx.formulas import to_mathml

BUILDER = "dummy"
"""Sphinx's builder that reads all sources and resolves all links, and writes nothing."""


def check_doctree(app: Sphinx, doctree: nodes.document, _name: str) -> None:
    """Draws each formula and highlights each block of code, only for the warnings."""
    if app.builder.name != BUILDER:
        return
    for formula in doctree.findall(lambda node: isinstance(node, (nodes.math, nodes.math_block))):
        to_mathml(formula, as_block=isinstance(formula, nodes.math_block))
    highlighter = PygmentsBridge("html")
    for block in doctree.findall(nodes.literal_block):
        highlighter.highlight_block(block.astext(), block.get("language", "default"), location=block)
