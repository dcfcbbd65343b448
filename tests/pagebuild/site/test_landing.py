"""The landing page's data says what the library does, in both languages."""

import dataclasses
import json
from itertools import product
from pathlib import Path

import pytest
import torch

from colossal._src.interface.boost_types import Parts
from colossal.booster import plugin as home
from colossal.booster.plugin import Plugin, TorchDDPPlugin, TorchFSDPPlugin
from colossal.checkpoint_io import GeneralCheckpointIO
from colossal.errors import UnsupportedError
from colossal.shardformer import FAMILIES
from pagebuild.site.badges import PageResults
from pagebuild.site.coverage import current_coverage
from pagebuild.site.edition import BrokenInputError, current_edition
from pagebuild.site.landing import features, measured, texts
from pagebuild.site.landing.data import (
    GOALS,
    INSTALL,
    count_verified,
    install_line,
    landing_data,
    landing_example,
    tutorial_cards,
)
from pagebuild.site.landing.features import FEATURES, feature_matrix
from pagebuild.site.landing.measured import measured_result
from pagebuild.site.landing.models import METHODS, make_inputs, model_matrix, tiny_model
from pagebuild.site.landing.plugins import CHOICES, DEVICES, QUESTIONS, PluginChoice, check_choices, offered_plugins
from pagebuild.site.landing.trial import single_process_group, try_action
from pagetest.model.reader import parse_page

pytestmark = pytest.mark.slow


LANGUAGES = {"en", "zh-Hans"}


def proof(**verified: int) -> dict:
    return {"programs": 9, "lastDate": "2026-11-19", "verified": verified}


@pytest.fixture(scope="module")
def matrix() -> dict:
    return feature_matrix(proof(cpu=9))


def cells(matrix: dict, key: str) -> dict[str, str]:
    (row,) = [row for row in matrix["rows"] if row["key"] == key]
    return row["cells"]


def note(matrix: dict, key: str) -> str:
    (row,) = [row for row in matrix["rows"] if row["key"] == key]
    assert set(row["note"]) == LANGUAGES
    return row["note"]["en"]


# ------------------------------------------------------------------------------------------ the chooser


def test_the_library_and_the_chooser_know_the_same_plugins() -> None:
    assert offered_plugins() == (
        "GeminiPlugin",
        "HybridParallelPlugin",
        "LowLevelZeroPlugin",
        "TorchDDPPlugin",
        "TorchFSDPPlugin",
    )
    check_choices(offered_plugins())
    with pytest.raises(BrokenInputError, match=r"plugins\.py:1: the library has the plugin NewPlugin: say when"):
        check_choices(("TorchDDPPlugin", "NewPlugin"))


def test_every_combination_of_answers_leads_somewhere() -> None:
    rows = [choice.row() for choice in CHOICES]
    for answers in product(*QUESTIONS.values()):
        asked = dict(zip(QUESTIONS, answers, strict=True))
        assert any(all(answer in row["when"][question] for question, answer in asked.items()) for row in rows), asked
    with pytest.raises(BrokenInputError, match="no plugin for one and states and memory"):
        check_choices((), tuple(choice for choice in CHOICES if choice.key != "gemini"))


def test_every_plugin_is_recommended_to_somebody() -> None:
    found = set()
    for workers, fits, goal in product(*QUESTIONS.values()):
        found.add(next(c.key for c in CHOICES if workers in c.workers and fits in c.fits and goal in c.goal))
    assert found == {choice.key for choice in CHOICES}


def test_a_working_row_says_what_the_library_says() -> None:
    for plugin in (TorchDDPPlugin, TorchFSDPPlugin):
        (row,) = [choice.row() for choice in CHOICES if choice.name == plugin.__name__]
        assert row["state"] == "works"
        assert row["code"].splitlines()[-2:] == [f"plugin = {plugin.__name__}()", "booster = Booster(plugin=plugin)"]
        assert row["object"] == f"colossal.booster.plugin.{plugin.__name__}"
        assert row["devices"] == list(plugin.supported_devices or DEVICES)
        assert row["precisions"] == list(plugin.supported_precisions)
        assert set(row["text"]) == LANGUAGES


def test_what_is_not_built_is_planned_and_promises_nothing() -> None:
    row = dataclasses.replace(CHOICES[-1], key="hybrid", name="NotYetPlugin").row()
    empty = {"state": "planned", "object": None, "page": None, "devices": [], "precisions": []}
    assert row | empty == row


def test_a_plugin_that_needs_arguments_shows_some() -> None:
    (row,) = [choice.row() for choice in CHOICES if choice.key == "hybrid"]
    assert "plugin = HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=8)" in row["code"].splitlines()


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.key)
def test_the_code_of_a_choice_runs_when_it_is_pasted(choice) -> None:
    program = choice.row()["code"].replace(f"({choice.arguments})", "(**smallest_arguments)")
    names: dict = {"smallest_arguments": choice.smallest_arguments}
    with single_process_group():
        exec(program, names)  # noqa: S102
    assert type(names["booster"]).__name__ == "Booster"
    assert choice.plugin is None or type(names["plugin"]) is choice.plugin


def test_a_plugin_that_works_names_its_page() -> None:
    choices = tuple(dataclasses.replace(choice, page="") if choice.key == "ddp" else choice for choice in CHOICES)
    with pytest.raises(BrokenInputError, match="TorchDDPPlugin works, and no page teaches it"):
        check_choices(("TorchDDPPlugin",), choices)


# ------------------------------------------------------------------------------------------ the features


class Lazy(Plugin):
    """Refuses to train."""

    supported_devices = ("cpu",)
    supported_precisions: tuple[str, ...] = ()

    def configure(self, parts: Parts, *_: object) -> object:
        raise UnsupportedError(f"Lazy needs rest. Found {type(parts.model).__name__}. Ask another plugin.")

    def get_checkpoint_io(self) -> GeneralCheckpointIO:
        return GeneralCheckpointIO()

    def data_parallel_rank_and_size(self) -> tuple[int, int]:
        return 0, 1


def test_cells_are_what_happened(matrix) -> None:
    assert [column["key"] for column in matrix["columns"]] == ["single", "ddp", "zero", "fsdp", "hybrid", "gemini"]
    assert [row["key"] for row in matrix["rows"]] == [feature.key for feature in FEATURES]
    columns = ["single", "ddp", "zero", "fsdp", "hybrid", "gemini"]
    saving = ("whole", "sharded", "safetensors", "resume", "async", "lora")
    for key in ("fp16", "bf16", "clip_norm", "clip_value", "accumulation", *saving):
        assert cells(matrix, key) == dict.fromkeys(columns, "yes"), key
    have_their_own = {"zero": "no", "hybrid": "no", "gemini": "no"}
    assert cells(matrix, "fp8") == dict.fromkeys(columns, "yes") | have_their_own
    assert cells(matrix, "fp16_naive") == dict.fromkeys(columns, "yes") | have_their_own | {"fsdp": "no"}
    assert cells(matrix, "pipeline") == dict.fromkeys(columns, "no") | {"hybrid": "yes"}


def test_a_device_counts_when_all_tutorials_are_verified_on_it(matrix, monkeypatch) -> None:
    columns = ["single", "ddp", "zero", "fsdp", "hybrid", "gemini"]
    assert cells(matrix, "cpu") == dict.fromkeys(columns, "yes")
    assert cells(matrix, "cuda") == dict.fromkeys(columns, "partial")
    assert note(matrix, "cuda") == "same code; no tutorial has run on one yet"
    states = {choice.key: features._feature_states(choice) for choice in CHOICES[:1]}
    monkeypatch.setattr(features, "_feature_states", lambda choice: states[choice.key])
    monkeypatch.setattr(features, "CHOICES", CHOICES[:1])
    some = feature_matrix(proof(cpu=0, cuda=8))
    assert (cells(some, "cpu"), cells(some, "cuda")) == ({"single": "partial"}, {"single": "partial"})
    assert note(some, "cuda") == "8 of 9 tutorials verified since the code last changed"
    nothing_ran = [row["key"] for row in feature_matrix(proof())["rows"]]
    assert nothing_ran == [feature.key for feature in FEATURES if feature.key not in {"cpu", "cuda"}]


def test_a_refusal_is_a_no_and_any_other_error_is_raised() -> None:
    def refuse(message: str) -> None:
        raise UnsupportedError(message)

    assert try_action(lambda: None) == "yes"
    assert try_action(lambda: refuse("Found x, which does not. Do y.")) == "no"
    assert try_action(lambda: refuse("Found x, which is not built yet. Do y.")) == "planned"
    with pytest.raises(ZeroDivisionError):
        try_action(lambda: 1 / 0)


def test_a_plugin_that_cannot_be_tried_is_an_error(monkeypatch) -> None:
    choice = PluginChoice("lazy", "Lazy", "p", ("one",), ("all",), ("simple",))
    monkeypatch.setattr(home, "Lazy", Lazy, raising=False)
    with pytest.raises(UnsupportedError, match="Lazy needs rest"):
        features._feature_states(choice)


def test_the_librarys_table_of_precisions_is_held_against_what_happens(monkeypatch) -> None:
    monkeypatch.setattr(features, "try_action", lambda _: "no")
    with pytest.raises(AssertionError, match=r"supported_precisions is wrong about fp16: no"):
        feature_matrix(proof())


# ------------------------------------------------------------------------------------------ models, example, pages


@pytest.fixture(scope="module")
def models() -> dict:
    return model_matrix()


def test_every_family_is_a_row_and_was_tried(models) -> None:
    assert [row["key"] for row in models["rows"]] == list(FAMILIES)
    assert [column["key"] for column in models["columns"]] == ["tensor", "pipeline"]
    for row in models["rows"]:
        assert row["cells"] == {"tensor": "yes", "pipeline": "yes"}, row["key"]
    assert models["rows"][0]["label"] == {"en": "Bert", "zh-Hans": "Bert"}


@pytest.mark.parametrize("attempted", METHODS.values())
def test_a_model_that_says_something_else_when_divided_is_a_no(attempted, monkeypatch) -> None:
    monkeypatch.setattr("pagebuild.site.landing.models.make_inputs", lambda model: make_inputs(model) | next(others))
    others = iter([{}, {"input_ids": torch.ones(2, 8, dtype=torch.long)}, {}])  # whole, and then in parts
    assert attempted(tiny_model("llama")) == "no"


def test_the_example_is_what_a_page_runs(docs) -> None:
    text = "# T\n```python\nx = 1\n```\n\n<!-- doc-test-command: python page.py -->\n"
    page = parse_page(text, docs.root / "page.md")
    shown = landing_example(docs.root / "README.md", page)
    assert shown == {"source": "x = 1", "page": "page", "command": "python train.py"}
    docs.write("README.md", "# pack\n\n```python\nx = 2\n```\n")
    with pytest.raises(BrokenInputError, match=r"README\.md:4: this program is not the first one of"):
        landing_example(docs.root / "README.md", page)
    docs.write("README.md", "# pack\n\n```python\nx = 1\n```\n")
    part = parse_page(text.replace("x = 1", "import a\nx = 1"), docs.root / "page.md")
    with pytest.raises(BrokenInputError, match="not the first one of"):
        landing_example(docs.root / "README.md", part)
    docs.write("README.md", "# pack\n")
    with pytest.raises(BrokenInputError, match=r"README\.md:1: the README shows no program"):
        landing_example(docs.root / "README.md", page)


def test_an_ignored_block_is_no_example(docs) -> None:
    ignored = "<!--- doc-test-ignore-start: why -->\n```python\nx = 1\n```\n<!--- doc-test-ignore-end -->\n"
    with pytest.raises(BrokenInputError, match="not the first one of"):
        landing_example(docs.root / "README.md", parse_page(ignored, docs.root / "page.md"))


def test_the_line_that_installs_is_one_of_its_page(docs) -> None:
    shown = install_line(parse_page(f"# T\n```shell\n{INSTALL}\n```\n", docs.root / "page.md"))
    assert shown == {"command": INSTALL, "page": "page"}
    with pytest.raises(BrokenInputError, match=r"page\.md:1: the page does not show the line `pip install"):
        install_line(parse_page("# T\n", docs.root / "page.md"))


def results_with(**record: object) -> PageResults:
    return PageResults({(measured.PAGE, "en", "cpu"): record} if record else {}, lambda *_: None)


def test_the_measured_result_is_what_a_recorded_run_printed() -> None:
    printed = "16 MB  all_reduce          13682      2325    5.9\n"
    step = "the same losses; a step takes 10.5 ms with gloo, 8.0 ms with shm\n"
    run: dict = {"status": "PASS", "device": "cpu", "processor": "A processor", "world": 2, "date": "2026-11-19"}
    run |= {"commit": "a" * 40, "versions": {"torch": "2.13.0"}}
    shown = measured_result(results_with(**run, blocks=[{"printed": printed}, {"printed": step}]))
    assert shown
    rows = [(row["key"], round(row["peer"], 3), round(row["ours"], 3)) for row in shown["rows"]]
    assert rows == [("all_reduce", 13.682, 2.325), ("step", 10.5, 8.0)]
    assert (shown["machine"], shown["torch"], shown["world"]) == ("A processor", "2.13.0", 2)
    assert measured_result(results_with()) is None
    assert measured_result(results_with(**run | {"status": "FAIL"})) is None
    with pytest.raises(BrokenInputError, match="printed nothing like"):
        measured_result(results_with(**run, blocks=[{"printed": printed}]))


def test_the_page_of_the_measured_result_prints_it() -> None:
    root = Path(__file__).resolve().parents[3]
    assert measured_result(current_coverage(root).results)


def test_pages_come_in_the_order_of_the_sidebar(docs) -> None:
    (category,) = tutorial_cards(current_edition(docs.root), docs.coverage())
    assert category["label"] == {"en": "Basics", "zh-Hans": "基础"}
    assert [card["name"] for card in category["pages"]] == ["basics/lesson", "talk"]
    card = category["pages"][0]
    assert card["title"] == {"en": "A lesson", "zh-Hans": "一课"}
    assert card["description"] == {"en": "The first sentence.", "zh-Hans": "第一句话。"}
    assert card["badges"] == {"en": [], "zh-Hans": []}
    assert [card["hasCode"] for card in category["pages"]] == [True, False]


@pytest.mark.parametrize(
    ("changes", "verified"),
    [
        (None, {}),
        ({}, {"cpu": 1}),
        ({"fingerprint": "older"}, {"cpu": 0}),
        ({"status": "FAIL"}, {"cpu": 0}),
        ({"device": "cuda"}, {"cuda": 1}),
    ],
)
def test_of_the_pages_with_code_those_count_that_are_verified(docs, changes, verified) -> None:
    docs.results(*([] if changes is None else [docs.record(**changes), docs.same()]))
    (category,) = tutorial_cards(current_edition(docs.root), docs.coverage())
    date = "" if changes is None else "2026-11-19"
    assert count_verified(category["pages"]) == {"programs": 1, "lastDate": date, "verified": verified}


def test_a_tutorial_counts_when_it_is_verified_in_every_language(docs) -> None:
    docs.results(docs.record(), docs.same())
    chinese = docs.root / "docs/source/zh-Hans/basics/lesson.md"
    chinese.write_text(chinese.read_text(encoding="utf-8").replace("x = 1", "x = 2"), encoding="utf-8")
    (category,) = tutorial_cards(current_edition(docs.root), docs.coverage())
    assert count_verified(category["pages"])["verified"] == {"cpu": 0}


@pytest.fixture
def _tried(matrix, models, monkeypatch) -> None:
    """What the library was seen to do, of which all of this file speaks; trying it takes ten seconds."""
    monkeypatch.setattr("pagebuild.site.landing.data.feature_matrix", lambda _proof: matrix)
    monkeypatch.setattr("pagebuild.site.landing.data.model_matrix", lambda: models)


@pytest.mark.usefixtures("_tried")
def test_rows_lead_to_pages_that_exist(docs, monkeypatch) -> None:
    monkeypatch.setattr("pagebuild.site.landing.data.PAGE", "basics/lesson")
    monkeypatch.setattr("pagebuild.site.landing.data.INSTALL_PAGE", "basics/lesson")
    monkeypatch.setattr("pagebuild.site.landing.data.INSTALL", "x = 1")
    docs.write("README.md", "# pack\n\n```python\nx = 1\nprint(x)\n```\n")
    with pytest.raises(BrokenInputError, match="the row ddp leads to basics/booster_api, which is no page"):
        landing_data(docs.root, current_edition(docs.root), docs.coverage())


def test_every_text_is_there_in_both_languages_and_used() -> None:
    content = json.loads(texts.FILE.read_text(encoding="utf-8"))
    assert all(set(text) == LANGUAGES and all(text.values()) for group in content.values() for text in group.values())
    assert all(set(choice.text) == LANGUAGES and all(choice.text.values()) for choice in CHOICES)
    assert set(content["features"]) == {feature.key for feature in FEATURES}
    assert set(content["methods"]) == set(METHODS)
    assert set(content["goals"]) == set(content["goal_texts"]) == set(GOALS)
    assert set(content["measured"]) == set(measured._ROWS)
    assert set(content["groups"]) == {feature.group for feature in FEATURES}


@pytest.mark.usefixtures("_tried")
def test_the_real_landing_page_can_be_made() -> None:
    root = Path(__file__).resolve().parents[3]
    edition = current_edition(root)
    data = landing_data(root, edition, current_coverage(root))
    assert "booster.backward(loss, optimizer)" in data["example"]["source"]
    assert data["example"]["source"].strip() == (root / "examples" / "quickstart.py").read_text("utf-8").strip()
    assert data["example"]["command"].startswith("torchrun")
    shown = [card["name"] for category in data["tutorials"] for card in category["pages"]]
    assert sorted(shown) == list(edition.tree.names)
    pages = [page for name in edition.tree.names if (page := edition.tree.page(name, "en")).executed]
    assert data["proof"]["programs"] == len(pages)
    assert {row["key"] for row in data["plugins"]} == {choice.key for choice in CHOICES}
