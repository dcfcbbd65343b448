"""Host memory for what is saved: nothing is copied that is there, and nothing stays behind that a file would hold."""

from pathlib import Path

import torch

from colossal._src.checkpoint_io import file_writers as snapshot
from colossal._src.checkpoint_io.file_writers import Arena, Arenas, batches, copy_regions_to_host
from colossal.checkpoint_io import CheckpointIO


def test_what_is_in_host_memory_is_lent_as_it_is() -> None:
    tensors = [torch.ones(3), torch.ones(2, 2).t()]
    with Arenas().on_host(tensors) as lent:
        assert [id(tensor) for tensor in lent] == [id(tensor) for tensor in tensors]
    assert list(batches([*tensors, torch.zeros(1 << 10)] * 3)) == [slice(0, 9)]


def test_what_is_on_a_device_is_divided_by_what_may_be_held(monkeypatch) -> None:
    monkeypatch.setattr(snapshot, "_STAGE_BYTES", 4096)
    far, near = torch.empty(512, device="meta"), torch.empty(1 << 16)
    assert list(batches([far, far, near, far, near])) == [slice(0, 3), slice(3, 5)]
    large = torch.empty(1 << 12, device="meta")
    assert list(batches([large, large, far])) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert list(batches([])) == [slice(0, 0)]


def test_copies_have_storages_of_their_own_size(tmp_path: Path) -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.zeros(0, 4), torch.ones((), dtype=torch.bfloat16)]
    for copies in (Arena(1 << 12, pin=False).copy(tensors), copy_regions_to_host(tensors)):
        assert all(copy.equal(tensor) for copy, tensor in zip(copies, tensors, strict=True))
        assert [copy.untyped_storage().nbytes() for copy in copies] == [tensor.nbytes for tensor in tensors]
        torch.save(copies, tmp_path / "copies.pt")
        assert (tmp_path / "copies.pt").stat().st_size < 1 << 12


def test_an_asynchronous_save_in_the_format_of_torch_copies_once(tmp_path: Path, monkeypatch) -> None:
    cloned: list[int] = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, **keywords: cloned.append(1) or clone(self, **keywords))
    io, model = CheckpointIO(), torch.nn.Linear(8, 8)
    io.save_model(model, tmp_path / "model.pt", use_async=True)
    io.synchronize()
    assert torch.load(tmp_path / "model.pt")["weight"].equal(model.weight)
    assert cloned == []
