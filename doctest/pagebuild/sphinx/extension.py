"""The Sphinx extension of the site; `docs/sphinx/conf.py` names it."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.ext.autodoc import MethodDocumenter
from sphinx.util.docutils import SphinxDirective

from pagebuild.api.command import library_of
from pagebuild.api.docstrings import insert_empty_types
from pagebuild.api.inventory import Inventory
from pagebuild.api.signature import format_parameters, signature_of
from pagebuild.api.target import Resolver
from pagebuild.sphinx import formulas
from pagebuild.sphinx.check_builder import check_doctree
from pagebuild.sphinx.links import LinkResolver
from pagebuild.sphinx.reference import describe_object


class ApiObject(SphinxDirective):
    """`.. api-object:: name`: an object of the library in the middle of a page."""

    # The members of a class are shown with it, those left out that `:without:` names: they stand elsewhere on the
    # page.

    required_arguments = 1
    has_content = False
    option_spec: ClassVar[dict[str, Callable[[str], Any]] | None] = {"without": str.split}
    inventory: ClassVar[Inventory]

    def run(self) -> list[nodes.Node]:
        """Describes the object; its home is a page of the reference."""
        asked = self.arguments[0]
        if fault := self.inventory.why_unknown(asked):
            raise self.error(fault)
        name = self.inventory.names.main(asked) or asked
        without = {self.inventory.names.main(other) or other for other in self.options.get("without", ())}
        lines = describe_object(self.inventory.main[name], self.inventory, indexed=False, without=without)
        around = nodes.Element()
        self.state.nested_parse(StringList(lines, self.get_source_info()[0]), self.content_offset, around)
        return around.children


def signature_listener(inventory: Inventory) -> Callable[..., tuple[str, str | None] | None]:
    """Makes the listener by which signatures have types and defaults as they stand in the source."""

    def spell(_app: Sphinx, _what: str, name: str, *_: Any) -> tuple[str, str | None] | None:
        target = inventory.main.get(name)
        signature = signature_of(target, inventory.resolver) if target else None
        if signature is None or signature.parameters is None:
            return None
        return f"({', '.join(format_parameters(signature.parameters))})", signature.return_type

    return spell


def set_up_chinese_search(app: Sphinx, config: Config) -> None:
    """Lets the dictionary that segments Chinese text load quietly, and adds the terms of the glossary to it."""
    if config.language.startswith("zh"):
        import jieba

        jieba.setLogLevel(logging.WARNING)
        vars(jieba.dt)["tmp_dir"] = str(app.doctreedir.parent)
        for term in _glossary_terms(Path(app.confdir).parent / "glossary.json"):
            jieba.add_word(term)


def _glossary_terms(glossary: Path) -> list[str]:
    """The accepted terms of a glossary, which readers will search for."""
    content = json.loads(glossary.read_text(encoding="utf-8")) if glossary.is_file() else {}
    return [term for entry in content.values() for term in entry["zh"] if not term.isascii()]


class OneSignature(MethodDocumenter):
    """A method has the signature that its documentation describes; overloads are for type checkers."""

    def format_signature(self, **kwargs: Any) -> str:
        """The signature of the method itself."""
        if self.analyzer:
            self.analyzer.overloads.clear()
        return super().format_signature(**kwargs)


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers everything with Sphinx."""
    app.setup_extension("sphinx.ext.autodoc")
    app.add_autodocumenter(OneSignature, override=True)
    inventory = Inventory(Resolver(library_of(Path(app.confdir).parents[1])))
    linker = LinkResolver(inventory)
    app.add_config_value("api_described", (), "env")
    app.add_directive("api-object", type("ApiObject", (ApiObject,), {"inventory": inventory}))
    app.add_html_math_renderer("mathml", (formulas.visit_inline, None), (formulas.visit_block, None))
    app.connect("autodoc-process-docstring", insert_empty_types, priority=1)
    app.connect("autodoc-process-signature", signature_listener(inventory))
    app.connect("config-inited", set_up_chinese_search)
    app.connect("doctree-read", linker.link_words)
    app.connect("missing-reference", linker.resolve)
    app.connect("doctree-resolved", check_doctree)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
