# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
"""Models come back as they were, from files that others read as well."""

import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import nn

from colossal._src.checkpoint_io import safetensors_file
from colossal.checkpoint_io import CheckpointIndexFile, CheckpointIO
from colossal.errors import CheckpointError, ConfigError, UnsupportedError
from colossal.interface import ModelWrapper

IO = CheckpointIO()
KILOBYTE = 1 / 1024  # a size_per_shard, in MB


class Net(nn.Module):
    """Several dtypes, persistent and other buffers, a tie, a view of larger memory, and an empty tensor."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8).bfloat16())
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.view = nn.Parameter(torch.randn(100, 8)[3])
        self.none = nn.Parameter(torch.empty(0))
        self.register_buffer("scratch", torch.randn(3), persistent=False)
        with torch.no_grad():
            self.body[1](torch.randn(4, 8))


FORMATS = [
    pytest.param({"shard": shard, "use_safetensors": safe}, id=f"{'shard' if shard else 'file'}-{suffix}")
    for shard in (False, True)
    for safe, suffix in ((False, "bin"), (True, "safetensors"))
]
READING = [
    pytest.param({}, id="mapped"),
    pytest.param({"low_cpu_mem_mode": False}, id="read"),
    pytest.param({"num_threads": 3}, id="threads"),
]


def assert_same_state(model: nn.Module, other: nn.Module) -> None:
    state, expected = model.state_dict(), other.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
        assert state[name].dtype == value.dtype


@pytest.mark.parametrize("saving", FORMATS)
@pytest.mark.parametrize("loading", READING)
def test_a_model_comes_back(tmp_path: Path, saving: dict[str, Any], loading: dict[str, Any]) -> None:
    saved, fresh = Net(), Net(seed=1)
    scratch = fresh.scratch.clone()
    IO.save_model(saved, tmp_path / "new" / "model", size_per_shard=0.3 * KILOBYTE, **saving)
    assert IO.load_model(fresh, str(tmp_path / "new" / "model"), **loading) is fresh
    assert_same_state(fresh, saved)
    assert torch.equal(fresh.scratch, scratch)
    assert fresh.head.weight is fresh.embed.weight


@pytest.mark.parametrize("saving", FORMATS)
def test_an_empty_state_comes_back(tmp_path: Path, saving: dict[str, Any]) -> None:
    IO.save_model(nn.ReLU(), tmp_path / "model", **saving)
    IO.load_model(nn.ReLU(), tmp_path / "model")


def test_wrappers_leave_no_trace(tmp_path: Path) -> None:
    saved, fresh = nn.Linear(4, 2), ModelWrapper(ModelWrapper(nn.Linear(4, 2)))
    IO.save_model(ModelWrapper(saved), tmp_path / "model.pt")
    assert list(torch.load(tmp_path / "model.pt")) == ["weight", "bias"]
    assert IO.load_model(fresh, tmp_path / "model.pt") is fresh
    assert_same_state(fresh.unwrap(), saved)


def test_a_single_file_is_what_torch_saves(tmp_path: Path) -> None:
    saved, fresh = Net(), Net(seed=1)
    IO.save_model(saved, tmp_path / "model.pt")
    content = torch.load(tmp_path / "model.pt")
    fresh.load_state_dict(content)
    assert_same_state(fresh, saved)
    assert content._metadata == saved.state_dict()._metadata
    assert content["view"].untyped_storage().nbytes() == 32
    torch.save(Net(seed=2).state_dict(), tmp_path / "other.pt", _use_new_zipfile_serialization=False)
    assert_same_state(IO.load_model(fresh, tmp_path / "other.pt"), Net(seed=2))


def test_loading_keeps_dtype_and_needs_no_gradient(tmp_path: Path) -> None:
    saved, fresh = nn.Linear(4, 2), nn.Linear(4, 2).bfloat16()
    IO.save_model(saved, tmp_path / "model.pt")
    IO.load_model(fresh, tmp_path / "model.pt")
    assert fresh.weight.dtype == torch.bfloat16
    assert torch.equal(fresh.weight, saved.weight.bfloat16())
    assert fresh.weight.requires_grad


def test_shards_are_filled_in_order(tmp_path: Path) -> None:
    model = nn.ParameterDict({name: torch.zeros(size) for name, size in (("a", 64), ("b", 64), ("c", 500), ("d", 1))})
    IO.save_model(model, tmp_path, shard=True, size_per_shard=0.5 * KILOBYTE, prefix="best")
    index = CheckpointIndexFile.from_file(tmp_path / "best.pytorch_model.bin.index.json")
    assert {name: file[-18:] for name, file in index.weight_map.items()} == {
        "a": "00001-of-00003.bin",
        "b": "00001-of-00003.bin",
        "c": "00002-of-00003.bin",
        "d": "00003-of-00003.bin",
    }
    assert index.metadata["total_size"] == 4 * (64 + 64 + 500 + 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best.pytorch_model-00001-of-00003.bin",
        "best.pytorch_model-00002-of-00003.bin",
        "best.pytorch_model-00003-of-00003.bin",
        "best.pytorch_model.bin.index.json",
    ]


def test_a_new_save_clears_away_the_old_one_of_its_prefix(tmp_path: Path) -> None:
    for prefix in (None, "best"):
        IO.save_model(Net(), tmp_path, shard=True, size_per_shard=KILOBYTE, prefix=prefix)
    IO.save_optimizer(torch.optim.SGD(Net().parameters()), tmp_path, shard=True)
    (tmp_path / "notes.txt").touch()
    kept = {path.name for path in tmp_path.iterdir() if not path.name.startswith("pytorch_model")}
    IO.save_model(Net(seed=1), tmp_path, shard=True, use_safetensors=True)
    assert {path.name for path in tmp_path.iterdir()} - kept == {
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    }
    assert "best.pytorch_model.bin.index.json" in kept
    with pytest.raises(CheckpointError, match=r"several checkpoints, best\.pytorch_model\.bin\.index\.json, model\."):
        IO.load_model(Net(), tmp_path)
    assert_same_state(IO.load_model(Net(seed=2), tmp_path / "model.safetensors.index.json"), Net(seed=1))


def test_a_directory_with_a_single_file_of_hugging_face_loads(tmp_path: Path) -> None:
    IO.save_model(Net(), tmp_path / "model.safetensors", use_safetensors=True)
    assert_same_state(IO.load_model(Net(seed=1), tmp_path), Net())


def test_strict_loading_lists_everything_and_changes_nothing(tmp_path: Path) -> None:
    IO.save_model(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(3, 2)}), tmp_path, shard=True)
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(4, 2, bias=False), "c": nn.Linear(1, 1, bias=False)})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        IO.load_model(model, tmp_path)
    message = str(caught.value)
    assert "b.weight (file [2, 3], model [2, 4])" in message
    assert "1 missing from the file: c.weight" in message
    assert "1 unexpected in the file: b.bias" in message
    assert "strict=False" not in message, "it would not help with the shape"
    with pytest.raises(CheckpointError, match="another shape"):
        IO.load_model(model, tmp_path, strict=False)
    with pytest.raises(CheckpointError, match="or pass strict=False to load_model for the names that agree"):
        IO.load_model(nn.ModuleDict({"a": nn.Linear(2, 2)}), tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_loading_without_strict_takes_what_agrees(tmp_path: Path) -> None:
    saved = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    IO.save_model(saved, tmp_path / "model.pt")
    IO.load_model(model, tmp_path / "model.pt", strict=False)
    assert torch.equal(model["a"].weight, saved["a"].weight)


def test_long_lists_are_cut(tmp_path: Path) -> None:
    IO.save_model(nn.ReLU(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="and 10 more"):
        IO.load_model(nn.Sequential(*(nn.Linear(1, 1) for _ in range(10))), tmp_path / "model.pt")


class Harmful:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


def _damage(tmp_path: Path, what: str) -> Path:
    path = tmp_path / what
    if what == "truncated":
        IO.save_model(Net(), path)
        path.write_bytes(path.read_bytes()[:-200])
    elif what == "truncated safetensors":
        IO.save_model(Net(), path, use_safetensors=True)
        path.write_bytes(path.read_bytes()[:-20])
    elif what == "harmful":
        torch.save({"weight": Harmful()}, path)
    elif what == "tensor":
        torch.save(torch.zeros(2), path)
    elif what == "old":
        path.write_bytes(b"\x80\x02nonsense")
    elif what in ("text", "empty"):
        path.write_text("hello world" if what == "text" else "")
    return path


@pytest.mark.parametrize(
    "what", ["truncated", "truncated safetensors", "harmful", "tensor", "old", "text", "empty", "missing"]
)
@pytest.mark.parametrize("mapped", [True, False])
def test_a_damaged_file_is_named_and_never_executed(
    tmp_path: Path, what: str, mapped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _damage(tmp_path, what)
    with pytest.raises(CheckpointError) as caught:
        IO.load_model(Net(), path, low_cpu_mem_mode=mapped)
    assert str(path) in str(caught.value)
    assert "executed" not in capsys.readouterr().out
    if what == "harmful":
        assert "Unsupported global: GLOBAL print was not an allowed global" in str(caught.value)
        assert "Please use" not in str(caught.value), "torch's advice is to trust the file"
        assert "Save the tensors alone" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../a.bin"}}',
        '{"weight_map": {}, "metadata": 1}',
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "pytorch_model.bin.index.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin\.index\.json"):
        IO.load_model(Net(), tmp_path)


def test_shards_must_be_there_and_belong_to_the_index(tmp_path: Path) -> None:
    IO.save_model(Net(), tmp_path, shard=True, size_per_shard=KILOBYTE)
    first, second = sorted(tmp_path.glob("*-of-*"))[:2]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match=rf"{first.name} without"):
        IO.load_model(Net(), tmp_path)
    first.unlink()
    with pytest.raises(CheckpointError, match=first.name):
        IO.load_model(Net(), tmp_path)
    first.write_bytes(content)
    (tmp_path / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"none among its files: .*00001-of"):
        IO.load_model(Net(), tmp_path)


def test_paths_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="pass shard=True"):
        IO.save_model(Net(), tmp_path)
    with pytest.raises(CheckpointError, match="pass shard=False"):
        IO.save_model(Net(), tmp_path / "file", shard=True)
    with pytest.raises(CheckpointError, match="cannot be created"):
        IO.save_model(Net(), tmp_path / "file" / "model.pt")
    with pytest.raises(CheckpointError, match="cannot be created"):
        IO.save_model(Net(), tmp_path / "file" / "directory", shard=True)


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="gather_dtensor"):
        IO.save_model(Net(), tmp_path / "model", gather_dtensor=False)
    with pytest.raises(UnsupportedError, match="gather_dtensor"):
        IO.save_optimizer(torch.optim.SGD(Net().parameters()), tmp_path / "optim", gather_dtensor=False)
    with pytest.raises(ConfigError, match="prefix"):
        IO.save_model(Net(), tmp_path, shard=True, prefix="a/b")
    with pytest.raises(ConfigError, match="size_per_shard=0"):
        IO.save_model(Net(), tmp_path, shard=True, size_per_shard=0)
    with pytest.raises(ConfigError, match="num_threads=0"):
        IO.load_model(Net(), tmp_path, num_threads=0)
    assert not list(tmp_path.iterdir())
    IO.synchronize()


def test_the_package_safetensors_reads_our_files_and_we_read_its(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    IO.save_model(Net(), tmp_path / "ours", use_safetensors=True)
    state = safetensors.load_file(tmp_path / "ours")
    expected = Net().state_dict()
    assert set(expected) - set(state) == {"head.weight"}
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    safetensors.save_file(state, tmp_path / "theirs")
    assert_same_state(IO.load_model(Net(seed=1), tmp_path / "theirs"), Net())


def test_our_files_need_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    IO.save_model(Net(), tmp_path / "model", use_safetensors=True)
    assert_same_state(IO.load_model(Net(seed=1), tmp_path / "model"), Net())


def test_a_model_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    IO.save_model(nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="meta device: weight, bias"):
        IO.save_model(nn.Linear(2, 2, device="meta"), tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="meta device"):
        IO.load_model(nn.Linear(2, 2, device="meta"), tmp_path / "model.pt")


class Stateful(nn.Linear):
    state: object = None

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state


def test_extra_state_comes_back_if_it_is_plain(tmp_path: Path) -> None:
    saved, fresh = Stateful(2, 2), Stateful(2, 2)
    saved.state = {"steps": [1, 2]}
    IO.save_model(saved, tmp_path, shard=True)
    assert IO.load_model(fresh, tmp_path).state == {"steps": [1, 2]}
    with pytest.raises(CheckpointError, match=r"_extra_state.*use_safetensors=False"):
        IO.save_model(saved, tmp_path / "safe", use_safetensors=True)
    saved.state = Harmful()
    with pytest.raises(CheckpointError, match="plain data"):
        IO.save_model(saved, tmp_path / "model.pt")


def test_neither_transformers_nor_safetensors_is_imported() -> None:
    paths = list(Path(safetensors_file.__file__).parent.glob("*.py"))
    assert len(paths) > 5
    for path in paths:
        lines = path.read_text().splitlines()
        assert not [line for line in lines if re.match(r"\s*(import|from) (transformers|safetensors)", line)]


def test_a_dtype_that_safetensors_do_not_know_is_refused(tmp_path: Path) -> None:
    model = nn.ParameterDict({"wide": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match=r"Found wide \(torch.complex128\).*use_safetensors=False"):
        IO.save_model(model, tmp_path / "model", use_safetensors=True)
    IO.save_model(model, tmp_path / "model")
    assert torch.equal(IO.load_model(nn.ParameterDict({"wide": model.wide + 1}), tmp_path / "model").wide, model.wide)


def test_the_index_is_json_that_hugging_face_reads(tmp_path: Path) -> None:
    IO.save_model(nn.Linear(2, 2), tmp_path, shard=True, use_safetensors=True)
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 24, "save": ANY},
        "weight_map": dict.fromkeys(("weight", "bias"), "model-00001-of-00001.safetensors"),
    }
