"""One Sphinx run: from the docstrings of many objects to their document trees.

autodoc fetches each docstring, napoleon reads its sections, docutils parses it. What comes of it is taken before Sphinx
lays it out: the fields are then still apart, each with its name and its body.
"""

import io
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

from pagebuild.api.target import Resolver, Target

CONFIGURATION = {
    "project": "reference",
    "root_doc": "index",
    "extensions": ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"],
    "autodoc_typehints": "none",
    "autodoc_inherit_docstrings": False,
    "napoleon_google_docstring": True,
    "napoleon_numpy_docstring": False,
    "napoleon_use_ivar": True,
    "napoleon_use_admonition_for_examples": True,
}

_DIRECTIVES = {"module": "module", "data": "data", "property": "property", "attribute": "attribute"}
_RESULTS = re.compile(r"(Returns?|Yields?):\s*")

# [Note: results without a type]
# napoleon takes the text before a colon in a Returns section for a type: "Always five values: model, ..." would lose
# its beginning. Types stand in annotations here, so an empty type is put before it, which napoleon drops.


def read_docstrings(targets: Iterable[Target], resolver: Resolver) -> tuple[Mapping[str, list[nodes.Node]], list[str]]:
    """Parses the docstrings of objects; returns the nodes of each by the object's name, and Sphinx's warnings."""
    found: dict[str, list[nodes.Node]] = {}
    warnings = io.StringIO()
    wanted = {_name_in_source(target): target for target in targets if _has_text(target, resolver)}

    def keep(_app: Sphinx, _domain: str, _kind: str, content: nodes.Element) -> None:
        signature = content.parent[0]
        assert isinstance(signature, nodes.Element)
        found[wanted[f"{signature['module']}.{signature['fullname']}"].name] = content.deepcopy().children

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        source.mkdir()
        (source / "index.rst").write_text("\n".join(_source_lines(wanted)), encoding="utf-8")
        with patch_docutils(), docutils_namespace():
            app = Sphinx(
                source,
                None,
                Path(folder, "out"),
                Path(folder, "doctrees"),
                "dummy",
                confoverrides=CONFIGURATION,
                status=None,
                warning=warnings,
                freshenv=True,
            )
            app.connect("object-description-transform", keep, priority=1)
            app.connect("autodoc-process-docstring", insert_empty_types, priority=1)
            app.build()
            sections = app.env.get_doctree("index").findall(nodes.section)
            found.update((one.children[0].astext(), one.children[1:]) for one in sections)
    return found, warnings.getvalue().splitlines()


def insert_empty_types(_app: Any, _what: str, _name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    """Puts an empty type before what is returned, see [Note: results without a type]."""
    for index, line in enumerate(lines[:-1]):
        if _RESULTS.fullmatch(line):
            text = lines[index + 1].lstrip()
            lines[index + 1] = lines[index + 1].replace(text, f": {text}", 1)


def autodoc_directive(target: Target) -> str:
    """The name of autodoc's directive for an object."""
    if target.is_class or target.kind == "function":
        return f"auto{target.kind}"
    return f"auto{_DIRECTIVES.get(target.kind, 'method')}"


def _has_text(target: Target, resolver: Resolver) -> bool:
    """Whether there is a docstring; plain data would show that of its type."""
    node = resolver.node(target)
    return target.kind != "data" or bool(node and resolver.source(target).attribute_docstring(node))


def _name_in_source(target: Target) -> str:
    return target.canonical if target.kind == "data" else target.name


def _source_lines(wanted: Mapping[str, Target]) -> Iterator[str]:
    """The one source: modules as sections, because their text has no description around it."""
    for name, target in wanted.items():
        if target.kind == "module":
            yield from (name, "=" * len(name), "", f".. automodule:: {name}", "")
    yield from ("objects", "=======", "")
    for name, target in wanted.items():
        if target.kind != "module":
            yield from (f".. {autodoc_directive(target)}:: {name}", "   :no-index:", "")
