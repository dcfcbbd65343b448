from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from colossal._src.cli.benchmark import cases
from colossal._src.cli.benchmark.cases import FAMILIES, Case, cases_of
from colossal._src.cli.benchmark.measure import Result, columns_of, is_fastest, measure_cases, speedup_of
from colossal._src.cli.benchmark.settings import LinkSettings, Settings
from colossal.testing import run_processes

SMALL = Settings(4, 4, 8, 16, 2, "float32", "cpu", 1, 2)


def test_the_table_has_one_process_and_every_parallelism_that_fits() -> None:
    found = [(case.name, case.parallelism, case.size, case.batch_per_rank) for case in cases_of(SMALL)]
    assert found == [
        ("matrix product", "none", 1, 4),
        ("training step", "none", 1, 4),
        ("training step", "data", 2, 2),
        ("training step", "data", 2, 4),
        ("training step", "data", 4, 1),
        ("training step", "data", 4, 4),
        ("training step", "tensor 1d", 2, 4),
        ("training step", "tensor 1d", 4, 4),
        ("training step", "tensor 2d", 4, 4),
    ]


@pytest.mark.parametrize(
    ("size", "modes"),
    [
        (2, ["1d"]),
        (8, ["1d", "2.5d x2", "3d"]),
        (9, ["1d", "2d"]),
        (12, ["1d", "2.5d x3"]),
        (64, ["1d", "2d", "2.5d x4", "2.5d x16", "3d"]),
    ],
)
def test_tensor_parallelism_has_every_mode_that_fits(size, modes) -> None:
    found = [case.parallelism for case in cases_of(replace(SMALL, ranks=size)) if case.size == size]
    assert [one.removeprefix("tensor ") for one in found if one.startswith("tensor")] == modes


def test_a_batch_that_does_not_divide_is_not_divided() -> None:
    found = [(case.size, case.batch_per_rank) for case in cases_of(replace(SMALL, batch_size=3, ranks=2))]
    assert found == [(1, 3), (1, 3), (2, 3), (2, 3)]
    assert {case.size for case in cases_of(replace(SMALL, ranks=6))} == {1, 2, 3, 6}
    assert {case.size for case in cases_of(replace(SMALL, ranks=1))} == {1}


def test_a_kind_of_parallelism_adds_its_cases_to_the_table(monkeypatch) -> None:
    case = Case("training step", "tensor", 2, 4, 1.0, lambda _settings, _batch: lambda: None)
    monkeypatch.setattr(cases, "FAMILIES", (*FAMILIES, lambda _settings: iter([case])))
    assert cases_of(SMALL)[-1] is case


def counted(name: str) -> list[tuple[float, float, int]]:
    """What a case says that it computes, what torch counts on this rank, and the samples of all ranks."""
    size = torch.distributed.get_world_size()
    found = []
    for case in cases_of(SMALL):
        if (case.name, case.size) == (name, size):
            step = case.prepare(SMALL, case.batch_per_rank)
            with FlopCounterMode(display=False) as counter:
                step()
            found.append((case.flops, float(counter.get_total_flops()), case.batch_size))
    return found


@pytest.mark.parametrize(
    ("name", "size"), [("matrix product", 1), ("training step", 1), ("training step", 2), ("training step", 4)]
)
def test_the_operations_are_those_that_torch_counts(name, size) -> None:
    ranks = run_processes(counted, size, name)
    for row in zip(*ranks, strict=True):
        said, _, samples = row[0]
        gradient_of_the_input = 2 * samples * SMALL.seq_len * 4 * SMALL.hidden_dim**2  # nobody needs the first layer's
        expected = said if name == "matrix product" else said - gradient_of_the_input
        assert sum(own for _, own, _ in row) == expected


def measure(settings: Settings, size: int) -> list[Result]:
    return measure_cases(settings, size)


def test_all_ranks_have_the_same_results() -> None:
    first, second = run_processes(measure, 2, replace(SMALL, ranks=2), 2)
    assert first == second
    assert [one.batch_per_rank for one in first] == [2, 4, 4]
    for one in first:
        assert one.seconds > 0
        replicas = 2 if one.parallelism == "data" else 1
        assert one.samples_per_second == pytest.approx(replicas * one.batch_per_rank / one.seconds)
        assert one.memory_bytes > 0
    parameters = 4 * SMALL.layers * (2 * 4 * SMALL.hidden_dim**2 + 5 * SMALL.hidden_dim)
    activations = 4 * 4 * SMALL.seq_len * SMALL.hidden_dim
    sums = 2 * SMALL.layers - 1  # of outputs, and of gradients of inputs, of which nobody needs the first
    assert [one.sent_bytes for one in first] == [parameters, parameters, sums * activations]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_dtype_is_measured(dtype) -> None:
    (results,) = run_processes(measure, 1, replace(SMALL, dtype=dtype), 1)
    assert [one.case for one in results] == ["matrix product", "training step"]


def test_the_speedup_compares_samples_a_second_with_one_rank() -> None:
    alone = Result("training step", "none", 1, 8, 2.0, 4.0, 1.0, 2**20, 0)
    both = Result("training step", "data", 2, 4, 1.0, 8.0, 2.0, 2**20, 2**19)
    assert speedup_of(both, [alone, both]) == 2.0
    assert speedup_of(both, [both]) is None
    assert columns_of(both, [alone, both])["speed-up"] == "2.00"
    assert columns_of(both, [both])["speed-up"] == ""
    assert columns_of(both, [both])["MiB sent"] == "0.50"


def test_the_fastest_is_marked_among_those_with_the_same_batch() -> None:
    alone = Result("training step", "none", 1, 8, 2.0, 4.0, 1.0, 1, 0)
    both = Result("training step", "data", 2, 4, 1.0, 8.0, 2.0, 1, 1)
    tensor = Result("training step", "tensor 1d", 2, 8, 0.9, 8 / 0.9, 2.0, 1, 1)
    larger = Result("training step", "data", 2, 8, 0.8, 20.0, 2.0, 1, 1)
    results = [alone, both, tensor, larger]
    assert [is_fastest(one, results) for one in results] == [False, False, True, False]
    assert [columns_of(one, results)[""] for one in results] == ["", "", "fastest", ""]


def test_settings_travel_as_one_word() -> None:
    assert Settings.of_word(SMALL.as_word()) == SMALL
    links = LinkSettings({"tp": 2}, ["p2p"], [1, 2], 0.5, "cpu", "x.json")
    assert LinkSettings.of_word(links.as_word()) == links
