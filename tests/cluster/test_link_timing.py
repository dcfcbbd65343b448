from typing import Any

import pytest
from torch import distributed as dist

from colossal._src.cluster import LINK_OPS
from colossal.cluster import LinkCost, ParallelMesh, measure_link_cost
from colossal.errors import ConfigError, UnsupportedError
from colossal.testing import fake_world, run_processes

pytestmark = pytest.mark.slow

SIZES = (1024, 16384, 262144, 1048576)


def measure(shape: dict[str, Any]) -> tuple[LinkCost, int]:
    mesh = ParallelMesh(**shape)
    return measure_link_cost(mesh, sizes=SIZES, seconds=0.01), mesh.size("dp")


@pytest.mark.parametrize(("size", "shape"), [(2, {}), (4, {"tp": 2}), (4, {"pp": 4})])
def test_every_axis_with_ranks_is_measured_and_all_ranks_agree(size, shape) -> None:
    results = run_processes(measure, size, shape)
    costs, dp = results[0]
    assert all(other == (costs, dp) for other in results)
    expected = {axis: ranks for axis, ranks in ({"dp": dp} | shape).items() if ranks > 1}
    assert {axis: cost.size for axis, cost in costs.axes.items()} == expected
    assert costs.origin
    assert (costs.origin.backend, costs.origin.device, costs.origin.world_size) == ("shm", "cpu", size)
    for axis, cost in costs.axes.items():
        assert set(cost.ops) == set(LINK_OPS)
        for op, link in cost.ops.items():
            assert [num_bytes for num_bytes, _ in link.timings] == list(SIZES)
            assert all(seconds > 0 for _, seconds in link.timings)
            predicted = [costs.seconds(op, axis, num_bytes) for num_bytes in SIZES]
            assert predicted[0] > 0
            assert predicted == sorted(predicted)
        assert cost.link.alpha + cost.link.beta > 0


def test_a_size_that_ranks_cannot_share_is_rounded_up() -> None:
    costs = run_processes(measure_link_cost, 3, ops=["reduce_scatter"], sizes=[1, 1000], seconds=0.01)[0]
    assert [num_bytes for num_bytes, _ in costs.axes["dp"].ops["reduce_scatter"].timings] == [12, 1008]


def errors(**arguments: object) -> str:
    try:
        measure_link_cost(**arguments)  # type: ignore[arg-type]
    except (ConfigError, UnsupportedError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"ops": ["gossip"]}, "Found ['gossip']"),
        ({"ops": []}, "Found none"),
        ({"sizes": [1024]}, "sizes=[1024]"),
        ({"sizes": [1024, 1024]}, "sizes=[1024, 1024]"),
        ({"sizes": [0, 1024]}, "sizes=[0, 1024]"),
        ({"seconds": 0}, "seconds=0"),
    ],
)
def test_what_cannot_be_measured_is_refused_on_all_ranks(arguments, found) -> None:
    for message in run_processes(errors, 2, **arguments):
        assert found in message


def test_one_process_and_a_fake_world_have_no_links() -> None:
    assert "Found a world of 1 process" in run_processes(errors, 1)[0]
    with fake_world(4):
        assert "Found the backend 'fake'" in errors()
    assert not dist.is_initialized()
