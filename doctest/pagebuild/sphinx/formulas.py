"""Formulas as MathML, which browsers draw by themselves: no script, nothing to fetch."""

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

_LOGGER = logging.getLogger(__name__)


def visit_inline(translator: Any, node: nodes.math) -> None:
    """Writes a formula that stands in a sentence."""
    translator.body.append(to_mathml(node, as_block=False))
    raise nodes.SkipNode


def visit_block(translator: Any, node: nodes.math_block) -> None:
    """Writes a formula that stands by itself."""
    translator.body.append(f'<div class="math">{to_mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode


def to_mathml(node: nodes.Node, *, as_block: bool) -> str:
    """The formula as MathML; a formula that cannot be drawn is a warning, and empty."""
    text = node.astext()
    try:
        return tex2mathml(text, as_block=as_block)
    except (MathError, SyntaxError) as error:
        _LOGGER.warning("the formula `%s` cannot be drawn: %s", text, error, location=node)
        return ""
