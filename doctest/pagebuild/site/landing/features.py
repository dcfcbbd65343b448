"""The matrix of features: one column per plugin, and cells that were tried, not typed."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pagebuild.site.landing.plugins import CHOICES, DEVICES, WORKS, PluginChoice
from pagebuild.site.landing.texts import labels_of
from pagebuild.site.landing.trial import NO, YES, TrialProgram, has_own_precision, single_process_group, try_action
from pagetest.model.tree import LANGUAGES

PARTIAL = "partial"
DEVICE = "devices"


@dataclass(frozen=True)
class Feature:
    """A row."""

    key: str
    group: str
    page: str = ""  # the page about it; empty where there is none
    # Makes use of it on the bench; None for rows that the plugin's own tables answer.
    try_feature: Callable[[TrialProgram], object] | None = None


def _accumulate(bench: TrialProgram) -> None:
    with bench.booster.no_sync(bench.model):
        bench.backward()
    bench.step()


def _clip(bench: TrialProgram, by: str) -> None:
    bench.backward()
    getattr(bench.optimizer, f"clip_grad_by_{by}")(1.0)
    bench.optimizer.step()


def _pipeline(bench: TrialProgram) -> None:
    import torch

    from colossal.errors import UnsupportedError

    if "pp" not in bench.booster.plugin.supported_axes:
        raise UnsupportedError(
            "The layers of a model are partitioned over the pp axis. Found a plugin without that axis."
        )
    make: Any = bench.make_plugin
    if make is not None and "num_microbatches" in inspect.signature(type(bench.booster.plugin)).parameters:
        bench = TrialProgram(partial(make, num_microbatches=2), bench.folder)
    batches = iter([torch.ones(2, 16)])
    bench.booster.execute_pipeline(batches, bench.model, lambda outputs, _: outputs.sum(), bench.optimizer)
    bench.optimizer.step()


def _enable_lora(bench: TrialProgram) -> None:
    import torch
    from peft import LoraConfig

    layers = torch.nn.Sequential(torch.nn.Linear(16, 16))
    bench.booster.enable_lora(layers, lora_config=LoraConfig(target_modules=["0"]))


def _save_model(bench: TrialProgram, place: str, files: str, **options: Any) -> None:
    """Saves the model, loads it, and sees that the files are there."""
    bench.booster.save_model(bench.model, bench.folder / place, **options)
    bench.booster.load_model(bench.model, bench.folder / place)
    assert any(bench.folder.rglob(files)), f"{place}: no {files} was written"


def _save_safetensors(bench: TrialProgram) -> None:
    _save_model(bench, "safe", "model-*.safetensors", shard=True, use_safetensors=True)


def _resume_optimizer(bench: TrialProgram) -> None:
    bench.step()
    bench.booster.save_optimizer(bench.optimizer, bench.folder / "optimizer", shard=True)
    bench.booster.load_optimizer(bench.optimizer, bench.folder / "optimizer")
    bench.step()


_PRECISION_PAGE = "features/mixed_precision_training_with_booster"
_CLIPPING_PAGE = "features/gradient_clipping_with_booster"
_SAVING_PAGE = "basics/booster_checkpoint"

FEATURES = (
    Feature("cpu", DEVICE),
    Feature("cuda", DEVICE),
    Feature("fp16", "precision", _PRECISION_PAGE),
    Feature("fp16_naive", "precision", _PRECISION_PAGE),
    Feature("bf16", "precision", _PRECISION_PAGE),
    Feature("fp8", "precision", _PRECISION_PAGE),
    Feature("accumulation", "training", "features/gradient_accumulation_with_booster", _accumulate),
    Feature("clip_norm", "training", _CLIPPING_PAGE, partial(_clip, by="norm")),
    Feature("clip_value", "training", _CLIPPING_PAGE, partial(_clip, by="value")),
    Feature("pipeline", "training", "features/pipeline_parallel", _pipeline),
    Feature("lora", "training", "features/lora", _enable_lora),
    Feature("whole", "checkpoints", _SAVING_PAGE, partial(_save_model, place="a.pt", files="a.pt")),
    Feature(
        "sharded", "checkpoints", _SAVING_PAGE, partial(_save_model, place="a", files="pytorch_model*.json", shard=True)
    ),
    Feature("safetensors", "checkpoints", _SAVING_PAGE, _save_safetensors),
    Feature("resume", "checkpoints", _SAVING_PAGE, _resume_optimizer),
    Feature("async", "checkpoints", _SAVING_PAGE, partial(_save_model, place="b.pt", files="b.pt", use_async=True)),
)


def feature_matrix(proof: Mapping[str, Any]) -> dict[str, Any]:
    """Tries every feature with every plugin that exists; what is planned has no column, for no one can try it."""
    # Where no tutorial ran on any device, devices have no rows: nothing is known about them.
    working = [choice for choice in CHOICES if choice.state == WORKS]
    states = {choice.key: _feature_states(choice) for choice in working}
    return {
        "columns": [{"key": choice.key, "label": _column_label(choice), "state": choice.state} for choice in working],
        "rows": [
            _feature_row(feature, states, proof) for feature in FEATURES if feature.group != DEVICE or proof["verified"]
        ],
    }


def _column_label(choice: PluginChoice) -> dict[str, str]:
    return dict.fromkeys(LANGUAGES, choice.name) if choice.name else labels_of("notes", "no_plugin")


def _feature_row(feature: Feature, states: dict[str, dict[str, str]], proof: Mapping[str, Any]) -> dict[str, Any]:
    cells = {key: found[feature.key] for key, found in states.items()}
    note = _why_unverified(feature.key, proof) if feature.group == DEVICE else None
    if note:
        cells = {key: PARTIAL if state == YES else state for key, state in cells.items()}
    row = {"key": feature.key, "label": labels_of("features", feature.key), "group": labels_of("groups", feature.group)}
    return row | {"note": note, "page": feature.page or None, "cells": cells}


def _why_unverified(device: str, proof: Mapping[str, Any]) -> dict[str, str] | None:
    """Why the plugins are not verified on a device; None where all tutorials are verified there."""
    verified, programs = proof["verified"].get(device), proof["programs"]
    if verified is None:
        return labels_of("notes", "unproved")
    if verified == programs:
        return None
    note = labels_of("notes", "verified")
    return {language: words.format(verified=verified, programs=programs) for language, words in note.items()}


def _feature_states(choice: PluginChoice) -> dict[str, str]:
    """The state of each feature under one plugin."""
    with single_process_group() as folder:
        return {
            feature.key: _feature_state(feature, choice, TrialProgram(_plugin_maker(choice), folder))
            for feature in FEATURES
        }


def _plugin_maker(choice: PluginChoice) -> Callable[[], Any] | None:
    return None if choice.plugin is None else choice.make_plugin


def _feature_state(feature: Feature, choice: PluginChoice, bench: TrialProgram) -> str:
    if feature.group == DEVICE:
        return YES if feature.key in (bench.booster.plugin.supported_devices or DEVICES) else NO
    plugin = choice.plugin
    if feature.group == "precision" and plugin is not None and has_own_precision(plugin):
        return try_action(lambda: TrialProgram(partial(choice.make_plugin, precision=feature.key), bench.folder).step())
    if feature.group == "precision":
        state = try_action(lambda: TrialProgram(_plugin_maker(choice), bench.folder, feature.key).step())
        listed = feature.key in bench.booster.plugin.supported_precisions
        assert listed == (state == YES), f"{choice.name}.supported_precisions is wrong about {feature.key}: {state}"
        return state
    assert feature.try_feature, f"nothing tries {feature.key}"
    return try_action(partial(feature.try_feature, bench))
