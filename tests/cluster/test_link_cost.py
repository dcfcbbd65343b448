# pyright: reportArgumentType=false
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from colossal._src.cluster import LINK_OPS, LinkOrigin
from colossal._src.cluster.link_cost import (
    FORMAT,
    collective_cost_factors,
    fit_axis,
    fit_link,
    link_cost_from_environment,
    typical,
)
from colossal.cluster import AxisCost, Link, LinkCost, ParallelMesh, current_mesh
from colossal.errors import ConfigError, MeshError
from colossal.testing import fake_world, run_processes

ORIGIN = LinkOrigin(("node0", "node1"), "gloo", "cpu", 4, "2.13.0", "2026-01-01T00:00:00+00:00")
COSTS = LinkCost(
    {
        "dp": AxisCost(2, Link(1e-4, 1e-9, 0.1, ((1024, 1e-4), (4096, 2e-4)))),
        "tp": AxisCost(4, Link(1e-5, 1e-10), {"all_reduce": Link(2e-5, 2e-10, 0.05)}),
    },
    ORIGIN,
)


# ------------------------------------------------------------------------------------------ the model


@pytest.mark.parametrize("op", LINK_OPS)
def test_the_steps_are_those_of_the_algorithm(op) -> None:
    """Counts messages and bytes along the longest chain of a simulated algorithm among p ranks."""
    for size in (2, 3, 4, 7, 8):
        messages, share = collective_cost_factors(op, size)
        if op == "broadcast":
            informed, rounds = 1, 0
            while informed < size:  # everyone who has the message passes it on
                informed, rounds = 2 * informed, rounds + 1
            assert (messages, share) == (rounds, rounds)
        elif op == "p2p":
            assert (messages, share) == (1, 1)
        else:
            passes = 2 if op == "all_reduce" else 1
            parts = [1 / size for _ in range(passes) for _ in range(size - 1)]  # a ring sends one part a step
            assert messages == len(parts)
            assert share == pytest.approx(sum(parts))


def test_a_cost_is_messages_times_alpha_plus_bytes_times_beta() -> None:
    assert COSTS.seconds("all_gather", "dp", 1000) == pytest.approx(1e-4 + 500 * 1e-9)
    assert COSTS.seconds("all_reduce", "tp", 1000) == pytest.approx(6 * 2e-5 + 1500 * 2e-10)  # the operation's own link
    assert COSTS.seconds("broadcast", "tp", 1000) == pytest.approx(2 * 1e-5 + 2000 * 1e-10)  # the axis's link
    assert COSTS.seconds("all_gather", "dp", 1000, size=8) == pytest.approx(7 * 1e-4 + 875 * 1e-9)
    assert COSTS.seconds("all_gather", "dp", 1000, size=1) == 0
    assert COSTS.seconds("all_gather", "pp", 1000, size=1) == 0


def test_what_has_no_cost_is_refused() -> None:
    with pytest.raises(
        MeshError, match="Found dp, tp, and not 'sp'. Measure it: colossal benchmark --collectives --sp"
    ):
        COSTS.seconds("all_gather", "sp", 1)
    with pytest.raises(ConfigError, match="Found 'gossip'"):
        COSTS.seconds("gossip", "dp", 1)
    with pytest.raises(ConfigError, match="num_bytes=-1"):
        COSTS.seconds("p2p", "dp", -1)


@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf, "fast", True])
def test_a_link_is_made_of_numbers_that_make_sense(bad) -> None:
    for name in ("alpha", "beta", "error"):
        with pytest.raises(ConfigError, match=f"A link's {name} is a number"):
            Link(**{"alpha": 1.0, "beta": 1.0, name: bad})
    with pytest.raises(ConfigError, match="from 2 ranks on"):
        AxisCost(1, Link(1, 1))
    with pytest.raises(ConfigError, match="Found 'gossip'"):
        AxisCost(2, Link(1, 1), {"gossip": Link(1, 1)})
    with pytest.raises(ConfigError, match="Found 'xp'"):
        LinkCost({"xp": AxisCost(2, Link(1, 1))})


# ------------------------------------------------------------------------------------------ the fit

SIZES = [4**power for power in range(5, 12)]


def measured(op: str, size: int, alpha: float, beta: float, noise: float, outliers: float, seed: int) -> list:
    """What a measurement gives: of each size 25 noisy samples, some of them a hundred times too long."""
    draw = random.Random(seed)  # noqa: S311 (no secret)
    messages, share = collective_cost_factors(op, size)
    found = []
    for num_bytes in SIZES:
        exact = alpha * messages + beta * share * num_bytes
        samples = [
            exact * (1 + abs(draw.gauss(0, noise))) * (100 if draw.random() < outliers else 1) for _ in range(25)
        ]
        found.append((num_bytes, typical(samples)))
    return found


@pytest.mark.parametrize("op", LINK_OPS)
@pytest.mark.parametrize(("alpha", "beta"), [(1e-4, 1e-9), (5e-6, 1e-11), (3e-3, 2e-8)])
def test_exact_times_give_back_alpha_and_beta(op, alpha, beta) -> None:
    link = fit_axis(4, {op: measured(op, 4, alpha, beta, 0, 0, 0)}).ops[op]
    assert (link.alpha, link.beta) == (pytest.approx(alpha), pytest.approx(beta))
    assert link.error == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("outliers", [0, 0.25, 0.5])
def test_noise_and_outliers_move_alpha_and_beta_little(seed, outliers) -> None:
    timings = {op: measured(op, 4, 1e-4, 1e-9, 0.1, outliers, seed) for op in LINK_OPS}
    cost = fit_axis(4, timings)
    for link in (cost.link, *cost.ops.values()):
        assert link.alpha == pytest.approx(1e-4, rel=0.25)
        assert link.beta == pytest.approx(1e-9, rel=0.25)
    assert cost.ops["p2p"].timings == tuple(timings["p2p"])


def test_one_size_that_is_all_wrong_does_not_bend_the_line() -> None:
    timings = measured("p2p", 2, 1e-4, 1e-9, 0, 0, 0)
    for index in range(len(timings)):
        spoiled = [(size, seconds * 50 if at == index else seconds) for at, (size, seconds) in enumerate(timings)]
        link = fit_axis(2, {"p2p": spoiled}).ops["p2p"]
        assert (link.alpha, link.beta) == (pytest.approx(1e-4), pytest.approx(1e-9))


def test_the_fit_is_the_best_there_is() -> None:
    """No point of a fine grid is better: the candidates hold the minimum."""
    draw = np.random.default_rng(5)
    points = [(1.0, float(n), float(1e-4 + 1e-9 * n) * float(draw.uniform(0.5, 2))) for n in SIZES]
    best = fit_link(points)

    def deviation(alpha: float, beta: float) -> float:
        return sum(abs((alpha * a + beta * b) / t - 1) for a, b, t in points)

    grid = [deviation(a, b) for a in np.linspace(0, 4e-4, 120) for b in np.linspace(0, 4e-9, 120)]
    assert deviation(best.alpha, best.beta) <= min(grid) + 1e-9


def test_neither_number_becomes_negative() -> None:
    falling = fit_link([(1, 1000, 2e-4), (1, 100000, 1e-4), (1, 1000000, 0.5e-4)])
    assert falling.alpha >= 0
    assert falling.beta >= 0
    steep = fit_link([(1, 1000, 1e-6), (1, 100000, 1e-3)])
    assert steep.alpha >= 0
    assert steep.beta > 0


# ------------------------------------------------------------------------------------------ the file


def test_what_is_saved_is_what_is_loaded(tmp_path) -> None:
    path = tmp_path / "links.json"
    COSTS.save(path)
    assert LinkCost.load(path) == COSTS
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["format"] == FORMAT
    assert content["origin"]["hosts"] == ["node0", "node1"]
    assumed = LinkCost(COSTS.axes)
    assumed.save(path)
    assert LinkCost.load(str(path)) == assumed
    assert [file.name for file in tmp_path.iterdir()] == ["links.json"]


def test_a_save_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch) -> None:
    path = tmp_path / "links.json"
    COSTS.save(path)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        LinkCost({}).save(path)
    assert LinkCost.load(path) == COSTS
    assert [file.name for file in tmp_path.iterdir()] == ["links.json"]
    with pytest.raises(ConfigError, match="cannot be written"):
        COSTS.save(tmp_path / "absent" / "links.json")


def spoil(**changes: object) -> str:
    content = json.loads(json.dumps({"format": FORMAT, "version": 1, "origin": None, "axes": {}}))
    return json.dumps(content | changes)


DP = {"size": 2, "link": {"alpha": 1, "beta": 1, "error": 0, "timings": []}, "ops": {}}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, "No such file"),
        ("{", "Expecting"),
        ("[]", "something else"),
        ("{}", "something else"),
        (spoil(format="other"), "something else"),
        (spoil(version=2), "its version is 2"),
        (spoil(axes=[]), "."),
        (spoil(axes={"dp": {}}), "no 'size'"),
        (spoil(axes={"xp": DP}), "Found 'xp'"),
        (spoil(axes={"dp": DP | {"size": 1}}), "from 2 ranks on"),
        (spoil(axes={"dp": DP | {"link": DP["link"] | {"alpha": -1}}}), "alpha is a number, at least 0"),
        (spoil(axes={"dp": DP | {"link": DP["link"] | {"timings": [1]}}}), "."),
        (spoil(axes={"dp": DP | {"ops": {"gossip": DP["link"]}}}), "Found 'gossip'"),
        (spoil(origin={"hosts": []}), "missing"),
        (spoil(origin=ORIGIN.__dict__ | {"mood": "good"}), "mood"),
        ("\x00\xff", "."),
    ],
)
def test_a_file_that_is_none_is_refused_by_name(text, found, tmp_path) -> None:
    path = tmp_path / "links.json"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match="links.json") as raised:
        LinkCost.load(path)
    assert found in str(raised.value)
    assert str(raised.value).startswith("The costs of links are read from a file of colossal benchmark --collectives.")


# ------------------------------------------------------------------------------------------ the mesh


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "links.json"
    COSTS.save(path)
    return path


def test_a_mesh_takes_costs_or_a_file(file) -> None:
    with fake_world(8):
        assert ParallelMesh(tp=4).link_cost is None
        for given in (COSTS, file, str(file)):
            assert ParallelMesh(tp=4, link_cost=given).link_cost == COSTS


def test_a_mesh_takes_the_costs_of_the_mesh_around_it_and_then_of_the_environment(file, monkeypatch) -> None:
    other = LinkCost({})
    with fake_world(8):
        with ParallelMesh(tp=4, link_cost=other):
            assert ParallelMesh(tp=2).link_cost is other
        monkeypatch.setenv("COLOSSAL_LINK_COST", str(file))
        assert current_mesh().link_cost == COSTS
        assert ParallelMesh(link_cost=other).link_cost is other
        monkeypatch.setenv("COLOSSAL_LINK_COST", "")
        assert link_cost_from_environment() is None


def test_a_file_that_is_missing_is_an_error_of_the_mesh(tmp_path, monkeypatch) -> None:
    with fake_world(2):
        with pytest.raises(ConfigError, match="nowhere.json"):
            ParallelMesh(link_cost=tmp_path / "nowhere.json")
        monkeypatch.setenv("COLOSSAL_LINK_COST", str(tmp_path / "nowhere.json"))
        with pytest.raises(ConfigError, match="nowhere.json"):
            ParallelMesh()


def mesh_error(costs: LinkCost) -> str:
    try:
        ParallelMesh(link_cost=costs)
    except MeshError as error:
        return str(error)
    return ""


def test_costs_of_another_backend_are_refused() -> None:
    gpus = LinkCost(COSTS.axes, LinkOrigin(("node7",), "nccl", "cuda", 4, "2.13.0", "2026-01-01T00:00:00+00:00"))
    (found,) = set(run_processes(mesh_error, 2, gpus, environment={"COLOSSAL_BACKEND": "gloo"}))
    assert "those of the backend in use, gloo on cpu. Found costs of nccl on cuda, measured on node7" in found
    assert set(run_processes(mesh_error, 2, COSTS, environment={"COLOSSAL_BACKEND": "gloo"})) == {""}
    with fake_world(2):  # plans for a cluster are made on a laptop
        assert ParallelMesh(link_cost=gpus).link_cost is gpus
