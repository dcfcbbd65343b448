"""Names of other libraries are accepted if they exist; names of ours must be documented."""

from pathlib import Path

import pytest
from docutils import nodes
from sphinx import addnodes

from pagebuild.api.inventory import Inventory
from pagebuild.api.library import Library
from pagebuild.api.target import Resolver
from pagebuild.sphinx.links import LinkResolver, find_in_module, import_object

pytestmark = pytest.mark.slow


ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def linker() -> LinkResolver:
    return LinkResolver(Inventory(Resolver(Library(ROOT, ROOT / "src" / "colossal"))))


def resolved(linker: LinkResolver, name: str, inside: str = "", domain: str = "py", role: str = "") -> bool:
    """Whether a name that Sphinx did not find passes, inside the description of an object or outside of any."""
    node = addnodes.pending_xref("", refdomain=domain, reftarget=name, reftype=role)
    module, _, fullname = inside.rpartition(".")
    signature = addnodes.desc_signature("", "", node, module=module, fullname=fullname)
    around = addnodes.desc("", signature) if inside else node
    shown = nodes.literal("", name)
    found = linker.resolve(None, None, node, shown)  # type: ignore[arg-type]
    assert found in {None, shown}
    assert around is not None
    return found is shown


@pytest.mark.parametrize(
    "name", ["torch.Tensor", "torch.nn.Module", "collections.abc.Callable", "int", "str.join", "pathlib.Path", "torch"]
)
def test_what_can_be_imported_passes(name, linker) -> None:
    assert resolved(linker, name)


@pytest.mark.parametrize(
    "name",
    ["torch.Tenso", "torch.nn.Modul", "no_such_package.Thing", "nn.Module", "Nothing", "str.jon", "", "."],
)
def test_what_cannot_be_imported_does_not(name, linker) -> None:
    assert not resolved(linker, name)


@pytest.mark.parametrize("name", ["nn.Module", "Optimizer", "Any", "torch.Tensor"])
def test_the_names_of_a_module_count_inside_its_descriptions(name, linker) -> None:
    assert resolved(linker, name, inside="colossal.booster.Booster")


@pytest.mark.parametrize(
    "name",
    [
        "colossal._src.booster.booster.SingleProcessPlugin",
        "colossal.nowhere",
        "colossal._src.booster.argument_checks.check_parts",
    ],
)
def test_our_own_names_must_be_documented(name, linker) -> None:
    assert not resolved(linker, name)
    assert not resolved(linker, name.rpartition(".")[2], inside="colossal.booster.Booster")


def test_a_private_type_in_an_annotation_is_an_error(linker) -> None:
    assert not resolved(linker, "Adam8bitState", inside="colossal.checkpoint_io.CheckpointIO", role="class")


def test_a_variable_of_types_has_no_entry_and_needs_none(linker) -> None:
    assert resolved(linker, "_Arguments", inside="colossal.cluster.DistCoordinator")
    assert resolved(linker, "colossal._src.checkpoint_io.checkpoint_group.T")


def test_links_of_pages_are_not_names(linker) -> None:
    assert not resolved(linker, "torch.Tensor", domain="std")


def test_names_are_looked_up_as_python_does() -> None:
    assert import_object("pathlib.Path.joinpath") is Path.joinpath
    assert import_object("pathlib.Path.gone") is None
    assert find_in_module("pagebuild.sphinx.links", "nodes.literal") is nodes.literal
    assert find_in_module("pagebuild.sphinx.links", "gone.literal") is None
