"""A checkpoint lies where its path points when it is saved: at home, and in the working directory of that moment."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from colossal.booster import Booster
from colossal.errors import CheckpointError


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("home", "first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "first")
    return tmp_path


def boosted() -> tuple[Booster, nn.Module, object]:
    net = nn.Linear(4, 4)
    booster = Booster(device="cpu")
    model, optimizer, *_ = booster.boost(net, torch.optim.Adam(net.parameters()))
    booster.backward(model(torch.ones(2, 4)).sum(), optimizer)
    optimizer.step()
    return booster, model, optimizer


def test_a_tilde_is_the_home_directory(places: Path) -> None:
    booster, model, optimizer = boosted()
    booster.save("~/run", model, optimizer, step=3)  # type: ignore[arg-type]
    assert booster.latest_step("~/run") == 3
    assert booster.load("~/run", model, optimizer) == 3  # type: ignore[arg-type]
    for shard in (False, True):
        target = f"~/model{shard}"
        booster.save_model(model, target, shard=shard, use_safetensors=shard)
        booster.load_model(model, target)
        assert (places / "home" / target[2:]).exists()
    booster.save_optimizer(optimizer, "~/optimizer")  # type: ignore[arg-type]
    booster.load_optimizer(optimizer, "~/optimizer")  # type: ignore[arg-type]
    assert (places / "home/run/step-00000003/model").is_dir()
    assert list((places / "first").iterdir()) == []


def test_a_save_in_the_background_ends_where_it_began(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    booster, model, optimizer = boosted()
    booster.save("run", model, optimizer, step=1, use_async=True)  # type: ignore[arg-type]
    booster.save_model(model, "model", shard=True, use_safetensors=True, use_async=True)
    booster.save_optimizer(optimizer, "optimizer", shard=True, use_async=True)  # type: ignore[arg-type]
    monkeypatch.chdir(places / "second")
    booster.checkpoint_io.synchronize()
    assert list((places / "second").iterdir()) == []
    assert sorted(path.name for path in (places / "first").iterdir()) == ["model", "optimizer", "run"]
    assert [path.name for path in (places / "first/run").iterdir()] == ["step-00000001"]
    monkeypatch.chdir(places / "first")
    assert booster.load("run", model, optimizer) == 1  # type: ignore[arg-type]


def test_a_damaged_checkpoint_names_an_earlier_one_which_is_loaded_once_it_is_deleted(places: Path) -> None:
    booster, model, optimizer = boosted()
    for step in (3, 6):
        booster.save("run", model, optimizer, step=step)  # type: ignore[arg-type]
    damaged = places / "first/run/step-00000006"
    for file in damaged.rglob("*.safetensors"):
        file.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"pass step=3 to load it, or delete run/step-00000006\.$"):
        booster.load("run", model, optimizer)  # type: ignore[arg-type]
    shutil.rmtree(damaged)
    assert booster.load("run", model, optimizer) == 3  # type: ignore[arg-type]


@pytest.mark.usefixtures("places")
def test_a_step_below_those_that_are_there_is_said_not_to_be_the_latest(capfd: pytest.CaptureFixture[str]) -> None:
    booster, model, optimizer = boosted()
    for step in (2, 4):
        booster.save("run", model, optimizer, step=step)  # type: ignore[arg-type]
    booster.load("run", model, optimizer, step=2)  # type: ignore[arg-type]
    assert "highest step" not in "".join(capfd.readouterr())
    booster.save("run", model, optimizer, step=3)  # type: ignore[arg-type]
    message = "".join(capfd.readouterr())
    assert "Found that step 3 was saved to" in message
    assert "which has 4," in message
    assert booster.latest_step("run") == 4
