# pyright: reportArgumentType=false, reportCallIssue=false
"""Names that wrappers gave: of files of other programs, and of models that torch.compile wraps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from plugins import plugins
from safetensors.torch import load_file, save_file
from torch import nn

from colossal.booster import Booster
from colossal.checkpoint_io import CheckpointIO
from colossal.errors import CheckpointError, UnsupportedError
from colossal.testing import run_processes

PLUGINS = plugins("DDP", "FSDP", "ZeRO-1", "Gemini", "Hybrid", "tp2", "Gemini, tp2", "pp2")
NEED_NAMES = ("Hybrid", "tp2", "Gemini, tp2", "pp2")
PREFIXES = ("module.", "_orig_mod.", "module._orig_mod.", "module.module.")


# ---------------------------------------------------------------------- in one process


def net(value: float = 0.0) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    return model


def save(content: Mapping[str, Any], path: Path) -> Path:
    (save_file if path.suffix == ".safetensors" else torch.save)(content, path)
    return path


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("prefix", [*PREFIXES, ""])
def test_names_of_wrappers_are_read(prefix: str, strict: bool, suffix: str, tmp_path: Path) -> None:
    state = {f"{prefix}{name}": value for name, value in net(3.0).state_dict().items()}
    model = CheckpointIO().load_model(net(), save(state, tmp_path / f"m.{suffix}"), strict=strict)
    assert all(bool((value == 3.0).all()) for value in model.state_dict().values())


def test_names_of_compiled_blocks_are_read_and_exact_names_count_first(tmp_path: Path) -> None:
    state = {name.replace(".", "._orig_mod."): value for name, value in net(3.0).state_dict().items()}
    assert "0._orig_mod.weight" in state
    path = save(state | {"0.weight": torch.full((4, 4), 5.0)}, tmp_path / "m.pt")
    model = CheckpointIO().load_model(net(), path, strict=False)
    assert sorted({float(value.double().mean()) for value in model.state_dict().values()}) == [3.0, 5.0]
    inner = nn.ModuleDict({"module": net()})  # names of its own that begin as those of a wrapper
    CheckpointIO().load_model(inner, save(nn.ModuleDict({"module": net(3.0)}).state_dict(), tmp_path / "n.pt"))
    assert all(bool((value == 3.0).all()) for value in inner.state_dict().values())


FOREIGN: dict[str, tuple[dict[str, Any], str]] = {
    "nested": ({"model": net(3.0).state_dict(), "epoch": 3}, "with a dict under 'model'.*save what is under 'model'"),
    "empty": ({}, "Found in .* (nothing|7 missing from the file)"),
    "other": ({"layers.0.weight": torch.ones(4, 4)}, "only other names, such as 'layers.0.weight'"),
    "other with module.": ({"module.layers.0.weight": torch.ones(4, 4)}, "only other names, such as 'module.layers"),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_that_has_nothing_of_the_model_is_an_error(what: str, strict: bool, tmp_path: Path) -> None:
    content, message = FOREIGN[what]
    path, model = save(content, tmp_path / "m.pt"), net()
    with pytest.raises(CheckpointError, match=message) as error:
        CheckpointIO().load_model(model, path, strict=strict)
    assert "pass strict=False" not in str(error.value)
    assert not any(value.any() for value in model.state_dict().values())


def test_a_model_without_tensors_has_nothing_to_load(tmp_path: Path) -> None:
    CheckpointIO().load_model(nn.ReLU(), save({}, tmp_path / "m.pt"))


# ---------------------------------------------------------------------- under plugins


def boosted(plugin: str, model: Any) -> tuple[Booster, Any]:
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    return booster, booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]


def load_and_save(plugins: list[str], folder: str) -> None:
    names = set(build("llama").state_dict())
    for plugin in plugins:
        with torch.no_grad():
            for parameter in (model := build("llama").float()).parameters():
                parameter.zero_()
        booster, model = boosted(plugin, model)
        booster.load_model(model, f"{folder}/module.pt", strict=plugin != "DDP")
        compiled: Any = torch.compile(model, backend="eager")  # never called: nothing is compiled
        booster.save_model(compiled, path := f"{folder}/{plugin}.safetensors")
        booster.load_model(compiled, path)
        torch.distributed.barrier()
        found = load_file(path)
        assert set(found) == names, plugin
        assert all(torch.equal(found[n], v) for n, v in build("llama").float().state_dict().items()), plugin
        with pytest.raises(CheckpointError, match="also with strict=False"):
            booster.load_model(compiled, f"{folder}/other.pt", strict=False)
        wrapped: Any = torch.compile(build("llama").float(), backend="eager")
        if plugin in NEED_NAMES:
            with pytest.raises(UnsupportedError, match=r"model\.compile\(\) instead"):
                boosted(plugin, wrapped)
            continue
        booster, model = boosted(plugin, wrapped)
        booster.save_model(model, path)
        torch.distributed.barrier()
        assert set(load_file(path)) == names, plugin


@pytest.mark.slow
@pytest.mark.parametrize("plugins", [list(PLUGINS)[:4], list(PLUGINS)[4:]])
def test_names_of_wrappers_under_plugins(plugins: list[str], tmp_path: Path) -> None:
    save(
        {f"module.{name}": value for name, value in build("llama").float().state_dict().items()}, tmp_path / "module.pt"
    )
    save({"other": torch.ones(2)}, tmp_path / "other.pt")
    run_processes(load_and_save, 2, plugins, str(tmp_path))
