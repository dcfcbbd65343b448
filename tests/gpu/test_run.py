"""The program for GPUs, tried out on a CPU: it goes on where it was, and says what fails and what is missing."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import largest
import overlap
import run
import table
from worlds import World, WorldError, once

pytestmark = pytest.mark.slow

MACHINE = {"device": "a card", "count": 2, "is_toy": False, "python": "3", "torch": "2", "cuda": "13", "nccl": ""}


@pytest.fixture
def results(tmp_path) -> Path:
    return tmp_path / "gpu.json"


def local_regions_of(*cases: run.Case) -> dict[str, object]:
    return {"rates": lambda _setting: iter(cases)}


def test_what_is_done_is_not_done_again_and_a_failure_is(results, tmp_path, monkeypatch, capsys) -> None:
    done: list[str] = []

    def fine() -> dict[str, float]:
        done.append("fine")
        return {"value": 1.5}

    def broken() -> dict[str, float]:
        done.append("broken")
        raise RuntimeError("no\nluck")

    monkeypatch.setattr(
        run, "PARTS", local_regions_of(run.Case("rates", "a", 1, fine), run.Case("rates", "b", 1, broken))
    )
    words = ["--device", "cpu", "--results", str(results), "--table", str(tmp_path / "gpu.md")]
    assert run.main(words) == run.main(words) == 1
    assert done == ["fine", "broken", "broken"]
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert "ok" in first
    assert '{"value": 1.5}' in first
    assert second.endswith("luck")
    assert not (tmp_path / "gpu.md").exists()


def test_it_ends_before_its_time_and_goes_on_later(results, monkeypatch) -> None:
    monkeypatch.setattr(
        run, "PARTS", local_regions_of(run.Case("rates", "long", 100, dict), run.Case("rates", "short", 1, dict))
    )
    words = ["--device", "cpu", "--results", str(results)]
    assert run.main([*words, "--minutes", "1"]) == run.UNFINISHED
    assert [row["name"] for row in json.loads(results.read_text())["results"]] == ["short"]
    assert run.main(words) == 0


def test_other_code_makes_results_stale(results) -> None:
    book = run.Book(results, MACHINE)
    book.keep(run.Result("rates", "a", "ok"))
    case = run.Case("rates", "a", 1, dict)
    assert run.Book(results, MACHINE).find(case)
    assert not run.Book(results, MACHINE | {"count": 1}).find(case)
    kept = json.loads(results.read_text()) | {"code": "other"}
    results.write_text(json.dumps(kept))
    assert not run.Book(results, MACHINE).find(case)


def test_what_is_missing_is_left_out(tmp_path) -> None:
    setting = run.Setting("cuda", 1, False, tmp_path)
    cases = {case.name: case for case in run.pages(setting)}
    assert len(cases) > 30
    result = run.run_case(cases["features/2D_tensor_parallel"])
    assert (result.status, result.remark) == ("left out", "needs 4 devices")


def test_a_rank_that_fails_is_named(tmp_path) -> None:
    with pytest.raises(WorldError, match="rank 0: KeyError: 'no such plugin'"):
        once("equal:exact", {"name": "no such plugin", "folder": str(tmp_path)}, tmp_path, 1, "cpu", 60)


def test_a_rank_that_is_late_is_ended(tmp_path) -> None:
    with (
        World("subprocess:run", {"args": ["sleep", "60"]}, tmp_path, 1, "cpu") as world,
        pytest.raises(WorldError, match="not done after 1 s"),
    ):
        world.ask(1.0)


@pytest.mark.parametrize("name", ["Gemini, from the host", "Hybrid, tp2"])
def test_plugins_equal_plain_torch(name, tmp_path) -> None:
    ranks = once("equal:exact", {"name": name, "folder": str(tmp_path)}, tmp_path, 2, "cpu", 200)
    assert all(rank["worst"] <= 1 for rank in ranks)


def test_a_difference_that_is_no_number_is_a_difference() -> None:
    assert not run.equal.worst_of([0.5, float("nan"), 0.1]) <= 1


def test_half_precision_is_bounded_by_rounding(tmp_path) -> None:
    (rank,) = once("equal:rounded", {"name": "ZeRO-1, bf16", "folder": str(tmp_path)}, tmp_path, 1, "cpu", 200)
    assert 0 < rank["worst"] <= 1


def test_contenders_of_a_race_learn_alike(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        run.training, "RACES", {"few": ("torch DDP", "LowLevelZeroPlugin, stage 2", "DeepSpeed ZeRO-1")}
    )
    (case,) = run.speed(run.Setting("cpu", 1, True, tmp_path))
    found = case.run()
    assert found["DeepSpeed ZeRO-1"] == {"left out": "deepspeed is not installed"}
    first, second = (found[name] for name in ("torch DDP", "LowLevelZeroPlugin, stage 2"))
    assert first["first_loss"] == pytest.approx(second["first_loss"], rel=1e-2)
    assert first["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("spans", "whole"),
    [([(0, 2), (1, 3)], [(0, 3)]), ([(4, 5), (0, 1)], [(0, 1), (4, 5)]), ([], [])],
)
def test_spans_are_joined(spans, whole) -> None:
    assert overlap.joined(spans) == whole


def test_what_lies_beside_is_counted_once() -> None:
    computing = overlap.joined([(0, 10), (20, 30)])
    assert overlap.shared(computing, overlap.joined([(5, 12), (25, 26)])) == 6


@pytest.mark.parametrize(("limit", "found"), [(100, 100), (90, 75), (30, 12)])
def test_the_largest_is_searched_downwards(limit, found) -> None:
    def train(layers: int) -> dict[str, float]:
        if layers > limit:
            raise WorldError("full", "OutOfMemoryError")
        return {"parameters": float(layers), "peak_bytes": 1.0}

    known = {"parameters": 12.0, "peak_bytes": 1.0}
    assert largest.search_down(train, 100, 12, known)["layers"] == pytest.approx(found, abs=5)


def test_an_error_that_is_not_about_memory_is_not_a_limit() -> None:
    def train(_layers: int) -> dict[str, float]:
        raise WorldError("other")

    with pytest.raises(WorldError, match="other"):
        largest.search_down(train, 100, 12, {})


def test_the_table_has_machine_races_and_reasons() -> None:
    race = {"ours": {"tokens_per_second": 2000.0, "flops_per_second": 4e14, "peak_bytes": 3e9}}
    rows = [
        {"part": "rates", "name": "device", "status": "ok", "remark": "",
         "values": {"flops_per_second": 8e14, "copy_bytes_per_second": 2e12}},
        {"part": "speed", "name": "few", "status": "ok", "remark": "", "values": race | {"theirs": {"left out": "no"}}},
        {"part": "adam", "name": "ours", "status": "ok", "remark": "", "values": {"bytes_per_second": 1e12}},
        {"part": "pages", "name": "a page", "status": "left out", "remark": "needs | 4", "values": {}},
    ]  # fmt: skip
    text = "\n".join(table.lines(MACHINE, rows))
    assert "2 x a card; python 3, torch 2, cuda 13; commit " in text
    assert "| few | ours | 2,000 | 0.500 | 3.00 |" in text
    assert "| few | theirs | no | | |" in text
    assert "of the rate of a copy 0.5 |" in text
    assert "| a page | left out | needs \\| 4 |" in text
