"""What a word in a docstring stands for."""

import pytest

from pagebuild.api.names import DocstringContext

pytestmark = pytest.mark.slow


WORDS = {
    # the full name, the name of a part, an alias, and the place of definition
    ("colossal.booster.Booster", "colossal.cluster.ParallelMesh"): "colossal.booster.Booster",
    ("colossal.booster.Booster.boost", "colossal.cluster.ParallelMesh"): "colossal.booster.Booster.boost",
    ("colossal.Booster.boost()", "colossal.cluster.ParallelMesh"): "colossal.booster.Booster.boost",
    ("colossal._src.booster.booster.Booster", "colossal.cluster.ParallelMesh"): "colossal.booster.Booster",
    # a member of the class at hand, in its own docstring and in those of its methods
    ("boost", "colossal.booster.Booster"): "colossal.booster.Booster.boost",
    ("save_model", "colossal.booster.Booster.load_model"): "colossal.booster.Booster.save_model",
    ("ranks(axis)", "colossal.cluster.ParallelMesh.group"): "colossal.cluster.ParallelMesh.ranks",
    # a short name that only one object has
    ("ConfigError", "colossal.booster.Booster"): "colossal.errors.ConfigError",
    ("Booster.boost", "colossal.interface.OptimizerWrapper"): "colossal.booster.Booster.boost",
    ("launch", "colossal.cluster.ParallelMesh"): "colossal.cluster.launch",
    # words that stand for nothing here
    ("boost", "colossal.cluster.ParallelMesh"): None,
    ("state_dict", "colossal.cluster.ParallelMesh"): None,
    ("torch.Tensor", "colossal.cluster.ParallelMesh"): None,
    ("colossal.booster.Booster.gone", "colossal.booster.Booster"): None,
    ("two words", "colossal.booster.Booster"): None,
    ('"cpu"', "colossal.booster.Booster"): None,
}


@pytest.mark.parametrize(("word", "place"), WORDS)
def test_words(word, place, inventory) -> None:
    assert inventory.names.find(word, DocstringContext(inventory.main[place])) == WORDS[word, place]


def test_a_parameter_stands_for_itself(inventory) -> None:
    place = DocstringContext(inventory.main["colossal.booster.Booster"], frozenset({"boost"}))
    assert inventory.names.find("boost", place) is None
    assert inventory.names.find("boost.x", place) is None


def test_a_function_hides_the_module_of_its_name(inventory) -> None:
    assert inventory.main["colossal.cluster.launch"].kind == "function"


def test_an_inherited_member_leads_to_the_class_that_has_it(inventory) -> None:
    assert inventory.aliases["colossal._src.booster.plugin.base.Plugin.prepare_dataloader"] == (
        "colossal.booster.plugin.Plugin.prepare_dataloader"
    )
    assert "colossal.booster.plugin.TorchDDPPlugin.prepare_dataloader" in inventory.main
