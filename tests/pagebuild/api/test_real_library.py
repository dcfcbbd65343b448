"""The project's own reference: complete, without findings, and as an independent reader of the source sees it."""

import ast
import doctest
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import griffe
import pytest
from docstring_examples import find_examples
from griffe import DocstringSectionKind as Section

from pagebuild.api.entry import Entry

pytestmark = pytest.mark.slow


# What griffe cannot see without importing: the constructor that a class has from torch. It is compared by nobody.
UNSEEN = frozenset({"colossal._src.amp.FP8Linear"})
KINDS = {
    griffe.ParameterKind.positional_only: "positional_only",
    griffe.ParameterKind.positional_or_keyword: "positional_or_keyword",
    griffe.ParameterKind.var_positional: "var_positional",
    griffe.ParameterKind.keyword_only: "keyword_only",
    griffe.ParameterKind.var_keyword: "var_keyword",
}


def test_there_is_no_finding(reference) -> None:
    assert reference.findings == ()


def test_every_public_name_is_there(reference, inventory) -> None:
    for module, names in inventory.resolver.library.modules.items():
        assert {f"{module}.{name}" for name in names} <= set(reference.objects)
        assert module in reference.objects


def test_every_link_leads_to_an_entry(reference) -> None:
    urls = set(re.findall(r'"api:([^"]+)"', reference.text))
    assert len(urls) > 20
    assert urls <= set(reference.objects)
    assert {name for entry in reference.objects.values() for name in entry["links"].values()} <= set(reference.objects)
    assert {name for entry in reference.objects.values() for name in entry["members"]} <= set(reference.objects)


def test_the_booster_as_its_page_shows_it(reference) -> None:
    entry = reference.objects["colossal.booster.Booster.boost"]
    assert [one["name"] for one in entry["params"]] == ["model", "optimizer", "criterion", "dataloader", "lr_scheduler"]
    assert entry["links"]["OptimizerWrapper"] == "colossal.interface.OptimizerWrapper"
    assert {one["type"] for one in entry["raises"]} == {"ConfigError", "MeshError", "UnsupportedError"}
    assert entry["returns"]["type"].startswith("tuple[ModelWrapper, OptimizerWrapper | None, ")


def test_every_example_is_collected_as_a_test(reference) -> None:
    """`tests/design/test_examples.py` runs what doctest finds; doctest finds what is shown."""
    names = [entry["canonical"].split(".") for entry in reference.objects.values()]  # also members of a private base
    modules = {".".join(parts[:length]) for parts in names for length in range(len(parts))}
    found = {}
    for name in modules & set(sys.modules):
        found.update({test.name: test.examples for test in find_examples(sys.modules[name])})
    shown = {entry["canonical"]: entry["examples"] for entry in reference.objects.values() if entry["examples"]}
    assert len(shown) > 60
    for name, examples in shown.items():
        count = sum(len(doctest.DocTestParser().get_examples(text)) for text in examples)
        assert len(found[name]) == count, name


# ------------------------------------------------------------------------------------------ griffe's view


@pytest.fixture(scope="module")
def package(inventory) -> Any:
    """The library as griffe reads it: from the source alone."""
    source = inventory.resolver.library.folder.parent
    loader = griffe.GriffeLoader(search_paths=[source], allow_inspection=False)
    package = loader.load("colossal")
    loader.resolve_aliases(implicit=True)
    return package


def compared(reference) -> Iterator[tuple[str, Entry]]:
    for name, entry in reference.objects.items():
        if not entry["alias_of"] and entry["kind"] not in {"module", "data"} and name not in UNSEEN:
            yield name, entry


def seen(package, entry: Entry) -> Any:
    return package[entry["canonical"].removeprefix("colossal.")]


def normal(source: object) -> str | None:
    """A default value whatever its spacing and quotes."""
    return None if source is None else ast.dump(ast.parse(str(source), mode="eval"))


def parameters_seen(item: Any) -> list[tuple[str, str, str | None]]:
    found = [one for one in item.parameters if one.name not in {"self", "cls"} or item.is_class]
    found = [one for one in found if one.name != "self"]
    return [(one.name, KINDS[one.kind], None if one.kind in _MANY else normal(made_by(one.default))) for one in found]


_MANY = {griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword}


def made_by(default: object) -> object:
    """A dataclass's factory as the call that it will be."""
    match = re.fullmatch(r"field\(default_factory=([\w.]+)\)", str(default))
    return f"{match.group(1)}()" if match else default


def test_griffe_sees_the_same_parameters(reference, package) -> None:
    count = 0
    for name, entry in compared(reference):
        if entry["signature"] is not None:
            ours = [(one["name"], one["kind"], normal(one["default"])) for one in entry["signature"]]
            assert parameters_seen(seen(package, entry)) == ours, name
            count += len(ours)
    assert count > 200


def test_griffe_sees_the_same_lines(reference, package) -> None:
    """A property it takes for an attribute, which begins at its name: the decorators do not count."""
    for name, entry in compared(reference):
        item, source = seen(package, entry), entry["source"]
        assert item.endlineno == source["end"], name
        assert item.lineno > source["line"] if item.is_attribute else item.lineno == source["line"], name


def sections_of(item: Any) -> dict[Section, Any]:
    options = {"returns_named_value": False, "returns_multiple_items": False, "warnings": False}
    return {section.kind: section.value for section in item.docstring.parse("google", **options)}


def described(returned: Any, item: Any) -> str:
    """What is returned; words before a colon, which griffe takes for a type, are put back."""
    written = None if item.is_attribute else item.returns
    return (
        returned.description
        if str(returned.annotation) == str(written)
        else f"{returned.annotation} {returned.description}"
    )


def words(text: str) -> list[str]:
    """The words of a docstring without its markup."""
    text = re.sub(r":[\w:]+:`~?(?:[\w.]+\.)?([^`]*)`", r"\1", text)
    return re.findall(r"\w+", text)


def texts(blocks: list[Any]) -> Iterator[str]:
    for block in blocks:
        if "value" in block:
            yield block["value"].rpartition(".")[2] if block["type"] == "reference" else block["value"]
        yield from texts(block.get("children", []))


def test_griffe_reads_the_same_words_of_parameters_and_exceptions(reference, package) -> None:
    count = 0
    for name, entry in compared(reference):
        item = seen(package, entry)
        found = sections_of(item) if item.docstring else {}
        theirs = [*found.get(Section.parameters, []), *found.get(Section.attributes, [])]
        ours = [*entry["params"], *entry["attributes"]]
        assert [one.name.replace("\\_", "_") for one in theirs] == [one["name"] for one in ours], name
        raised = found.get(Section.raises, [])
        assert [str(one.annotation) for one in raised] == [one["type"] for one in entry["raises"]], name
        for one, other in zip([*theirs, *raised], [*ours, *entry["raises"]], strict=True):
            assert words(one.description) == words(" ".join(texts(other["body"]))), name
            count += 1
        returned = [described(one, item) for one in found.get(Section.returns, [])]
        body = entry["returns"]["body"] if entry["returns"] else []
        assert words(" ".join(returned)) == words(" ".join(texts(body))), name
    assert count > 400


def test_griffe_would_see_a_difference(reference, package) -> None:
    """The comparison is not blind: another object's entry does not fit."""
    boost, step = (reference.objects[f"colossal.{name}"] for name in ("booster.Booster.boost", "cluster.launch"))
    assert parameters_seen(seen(package, boost)) != parameters_seen(seen(package, step))
    assert words(inspect.cleandoc(seen(package, boost).docstring.value)) != words(seen(package, step).docstring.value)
