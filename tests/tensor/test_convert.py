# pyright: reportAttributeAccessIssue=false
import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

from colossal.errors import UnsupportedError
from colossal.tensor import Layout, dtensor_placements, full_tensor_of, layout_of, local_of, placement_of
from colossal.testing import fake_world, run_processes

PLACEMENTS = (
    (Replicate(), Replicate()),
    (Replicate(), Shard(0)),
    (Shard(1), Replicate()),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(1), Shard(1)),
)


def check_bridge() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    rank = torch.distributed.get_rank()
    whole = torch.arange(35.0).reshape(5, 7)
    for placements in PLACEMENTS:
        tensor = torch.nn.Parameter(distribute_tensor(whole.clone(), mesh, placements))
        layout = layout_of(tensor)
        local = local_of(tensor)
        assert not local.requires_grad
        assert torch.equal(local, whole[layout.region(rank).slices]), placements
        with torch.no_grad():
            local += 1
        assert torch.equal(full_tensor_of(tensor), whole + 1), "the local part shares the memory"
        cutting = [mesh.get_group(axis) for axis, cut in enumerate(placements) if isinstance(cut, Shard)]
        assert list(placement_of(tensor).shard_groups) == cutting
        assert layout_of(tensor) is layout_of(torch.nn.Parameter(tensor.detach().clone())), "layouts are shared"


def test_layouts_are_those_of_dtensor() -> None:
    run_processes(check_bridge, 4)


def test_a_partial_maximum_has_no_layout() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(UnsupportedError, match=r"Found the placement P.*max.*Redistribute"):
            layout_of(DTensor.from_local(torch.ones(3), mesh, [Partial("max")]))


@pytest.mark.parametrize("text", ["RR", "S0R", "RS1", "S01R", "RS1P0", "RRP01"])
def test_a_layout_is_written_as_placements_and_back(text) -> None:
    layout = Layout.parse(text, (5, 7), grid=(2, 2))
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2))
        local = torch.zeros(layout.local_shape(0))
        tensor = DTensor.from_local(
            local, mesh, dtensor_placements(layout), run_check=False, shape=torch.Size((5, 7)), stride=(7, 1)
        )
        assert layout_of(tensor) == layout


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout.parse("S10R", (8, 8), grid=(2, 2)), "S10R"),
        (Layout.parse("S0R", (8, 8), grid=(2,), groups=[(4, 4), (8,)]), r"groups \(\(4, 4\)"),
    ],
)
def test_what_dtensor_cannot_say_is_refused(layout, words) -> None:
    with pytest.raises(UnsupportedError, match=words):
        dtensor_placements(layout)


def test_a_plain_tensor_is_whole_on_each_rank() -> None:
    tensor = torch.ones(2, 3, requires_grad=True)
    assert layout_of(tensor, (4, 5)) == Layout((2, 3), (4, 5))
    assert local_of(tensor) is tensor
    assert full_tensor_of(tensor) is tensor
    assert placement_of(tensor).groups == ()
