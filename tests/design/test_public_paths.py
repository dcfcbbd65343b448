"""What a public module exports says that module, as pickles, logs and tracebacks show it."""

import importlib
import pickle
import sys
import typing
from pathlib import Path
from subprocess import run

import pytest
from public_names import LIBRARY, public_modules

import colossal
from colossal import errors
from colossal.cluster import Link
from colossal.shardformer import ShardConfig

MODULES = [(module, names) for module, names in public_modules(LIBRARY).items() if names]
ONLY_FOR_TYPE_CHECKERS = {"ShardConfig": ShardConfig}  # what a private module imports under TYPE_CHECKING


@pytest.mark.parametrize(("module", "names"), MODULES, ids=[module for module, _ in MODULES])
def test_exported_objects_say_a_public_path_that_leads_back_to_them(module: str, names: list[str]) -> None:
    for name in names:
        value = getattr(importlib.import_module(module), name)
        if not isinstance(value, type) and type(value).__name__ != "function":
            continue
        assert value.__module__.split(".")[0] == "colossal"
        assert "_src" not in value.__module__, f"{module}.{name} says {value.__module__}"
        assert getattr(importlib.import_module(value.__module__), value.__qualname__) is value


def test_annotations_of_exported_classes_are_still_found() -> None:
    unknown = []
    for module, names in MODULES:
        for value in (getattr(importlib.import_module(module), name) for name in names):
            if isinstance(value, type):
                try:
                    typing.get_type_hints(value, localns=ONLY_FOR_TYPE_CHECKERS)
                except NameError as error:
                    unknown.append(f"{value.__module__}.{value.__qualname__}: {error}")
    assert not unknown


def test_pickles_hold_public_paths_and_come_back() -> None:
    error = errors.CheckpointError("no file")
    assert str(pickle.loads(pickle.dumps(error))) == "no file"  # noqa: S301 (our own)
    options = Link(alpha=1e-6, beta=1e-9)
    packed = pickle.dumps([options, colossal.Booster, colossal.launch])
    assert b"_src" not in packed
    assert pickle.loads(packed) == [options, colossal.Booster, colossal.launch]  # noqa: S301 (our own)


def test_pickles_that_hold_private_paths_are_read() -> None:
    packed = b"ccolossal._src.booster.booster\nBooster\n."
    assert pickle.loads(packed) is colossal.Booster  # noqa: S301 (our own)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["colossal._src.booster", "colossal.legacy.utils", "colossal"])
def test_the_path_does_not_depend_on_what_was_imported_first(first: str, tmp_path: Path) -> None:
    program = f"import {first}\nimport colossal, colossal.accelerator\n"
    program += "print(colossal.Booster, colossal.accelerator.get_current_device.__module__)"
    found = run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    assert found == "<class 'colossal.booster.Booster'> colossal.accelerator\n"
