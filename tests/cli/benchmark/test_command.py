"""`colossal benchmark` as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import colossal
from colossal._src.cli.benchmark.command import AXES as OFFERED_AXES
from colossal._src.cli.benchmark.command import OPS, command
from colossal._src.cluster import AXES, LINK_OPS
from colossal.cluster import LinkCost

pytestmark = pytest.mark.slow

SOURCE = Path(colossal.__file__).parents[1]
SMALL = ["-b", "2", "-s", "4", "-d", "8", "-l", "1", "-w", "1", "-p", "2"]
QUICK = ["--collectives", "--min_bytes", "1024", "--max_bytes", "65536", "--seconds", "0.01"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m"]


def run(*words: str, folder: Path, launcher: tuple[str, ...] = ("-m",)) -> subprocess.CompletedProcess[str]:
    """``colossal benchmark <words>`` in a fresh interpreter."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, *launcher, "colossal.cli", "benchmark", *words]
    return subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=500
    )


def test_a_table_of_what_exists(tmp_path) -> None:
    done = run(*SMALL, "--gpus", "2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    title, head, *rows = done.stdout.splitlines()
    assert title == "input (2, 4, 8), 1 blocks, float32, cpu"
    assert head.split()[:3] == ["case", "parallelism", "ranks"]
    assert [row.split()[2:5] for row in rows[:4]] == [
        ["none", "1", "2"],
        ["none", "1", "2"],
        ["data", "2", "1"],
        ["data", "2", "2"],
    ]
    assert rows[4].split()[2:6] == ["tensor", "1d", "2", "2"]
    assert len(rows) == 5
    assert done.stdout.count("fastest") == 1


@pytest.mark.parametrize("launcher", [("-m",), tuple(TORCHRUN)])
def test_the_same_as_json_alone_and_under_torchrun(launcher, tmp_path) -> None:
    done = run(*SMALL, "--json", folder=tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["version"] == 1
    assert report["settings"]["ranks"] == 2
    sizes = [row["ranks"] for row in report["rows"]]
    assert sizes == ([1, 1, 2, 2, 2] if launcher == ("-m",) else [2, 2, 2])
    assert all(row["seconds"] > 0 and row["tflops"] > 0 for row in report["rows"])
    assert all((row["speedup"] is None) == (launcher != ("-m",)) for row in report["rows"])


def test_links_of_two_ranks_are_written_to_a_file_that_a_mesh_reads(tmp_path) -> None:
    done = run(*QUICK, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["link_cost.json"]
    costs = LinkCost.load(tmp_path / "link_cost.json")
    assert {axis: cost.size for axis, cost in costs.axes.items()} == {"dp": 2}
    assert set(costs.axes["dp"].ops) == set(LINK_OPS)
    assert f"export COLOSSAL_LINK_COST={tmp_path / 'link_cost.json'}" in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith("shm on cpu, 2 ranks, ")
    assert [line.split()[2] for line in lines[2:9]] == [*LINK_OPS, "all"]

    program = "import colossal\nprint(colossal.launch_from_torch(verbose=False).link_cost.axes['dp'].size)"
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "COLOSSAL_LINK_COST": str(tmp_path / "link_cost.json")}
    read = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=100
    )
    assert read.stdout == "2\n"


def test_links_of_two_axes(tmp_path) -> None:
    words = ("--tp", "2", "--ranks", "4", "--op", "all_gather", "--op", "p2p", "-o", "links.json", "--json")
    done = run(*QUICK, *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["output"] == str(tmp_path / "links.json")
    costs = LinkCost.load(tmp_path / "links.json")
    assert {axis: (cost.size, set(cost.ops)) for axis, cost in costs.axes.items()} == {
        "dp": (2, {"all_gather", "p2p"}),
        "tp": (2, {"all_gather", "p2p"}),
    }
    sizes = [num_bytes for num_bytes, _ in costs.axes["tp"].ops["p2p"].timings]
    assert sizes == [1024, 4096, 16384, 65536]
    assert costs.origin
    assert costs.origin.world_size == 4


def test_links_under_torchrun(tmp_path) -> None:
    done = run(*QUICK, "--tp", "2", "--op", "all_reduce", folder=tmp_path, launcher=tuple(TORCHRUN))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all_reduce") == 1
    assert list(LinkCost.load(tmp_path / "link_cost.json").axes) == ["tp"]


def test_the_offered_axes_and_operations_are_those_of_the_library() -> None:
    assert OPS == LINK_OPS
    assert OFFERED_AXES == AXES


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--ranks", "0"], "0 is not in the range"),
        (["--dtype", "int8"], "'int8' is not one of"),
        (["--device", "cuda"], "Found 'cuda' with torch"),
        (["--tp", "2"], "--tp has a meaning only with --collectives"),
        (["--op", "p2p"], "--op has a meaning only with --collectives"),
        (["--collectives", "--batch-size", "2"], "--batch_size has a meaning only without --collectives"),
        (["--collectives", "--tp", "2", "--dp", "2", "--ranks", "6"], "the axes dp 2 x tp 2 make 4 ranks, not 6"),
        (["--collectives", "--tp", "3", "--ranks", "4"], "the axes tp 3 make 3 ranks, not 4"),
        (["--collectives", "--ranks", "1"], "a link has two ends"),
        (["--collectives", "--max-bytes", "1024", "--op", "all-reduce"], "a line needs two points"),
        (["--collectives", "-o", "absent/links.json"], "there is no folder"),
        (["--collectives", "--op", "gossip"], "'gossip' is not one of"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(words, found, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 2, done.output
    assert found in done.output


def test_the_ranks_of_a_launcher_are_not_others(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    done = CliRunner().invoke(command, ["--ranks", "2"])
    assert done.exit_code == 2
    assert "the launcher has started 3, not 2" in done.output


def test_what_a_rank_dies_of_is_told(monkeypatch) -> None:
    monkeypatch.setenv("COLOSSAL_BACKEND", "gloo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    done = CliRunner().invoke(command, [*SMALL, "--ranks", "2"])
    assert done.exit_code == 1
    assert "Error: Of 1 ranks, rank 0 ended with code 1. The last it printed:" in done.output


def test_a_benchmark_that_takes_too_long_is_ended() -> None:
    done = CliRunner().invoke(command, [*SMALL, "--timeout", "0.05"])
    assert done.exit_code == 1
    assert "rank 0 was ended after 0.05 s" in done.output
