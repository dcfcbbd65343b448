"""Helpers of the older API: timers, loaders, reports, questions about the mesh, and what ranks do together."""

import copy
import gc
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import IterableDataset, TensorDataset

from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError, UnsupportedError
from colossal.legacy import utils
from colossal.legacy.context import ParallelMode, global_context
from colossal.logging import get_dist_logger
from colossal.testing import fake_world, run_processes, run_threads

# ------------------------------------------------------------------------------------------ timers


def test_a_timer_measures_and_keeps_a_history() -> None:
    timer = utils.Timer()
    lengths = []
    for pause in (0.01, 0.03):
        timer.start()
        time.sleep(pause)
        lengths.append(timer.stop(keep_in_history=True))
        assert timer.get_elapsed_time() == lengths[-1] >= pause
    timer.start()
    timer.stop()
    assert timer.get_history_sum() == sum(lengths)
    assert timer.get_history_mean() == sum(lengths) / 2
    assert timer.has_history
    timer.reset()
    assert (timer.get_history_sum(), timer.get_history_mean(), timer.get_elapsed_time()) == (0, 0, 0)
    assert not timer.has_history


def test_a_timer_refuses_to_stop_before_its_start_and_to_report_before_its_end() -> None:
    timer = utils.Timer()
    with pytest.raises(ConfigError, match="start"):
        timer.stop()
    timer.start()
    with pytest.raises(ConfigError, match="running"):
        timer.get_elapsed_time()
    assert timer.lap() <= timer.lap() <= timer.stop()


def test_timers_by_name_can_be_switched_off() -> None:
    timers = utils.MultiTimer()
    for name in ("a", "b"):
        timers.start(name)
        assert timers.stop(name, keep_in_history=True) is not None
    assert [name for name, _ in timers] == ["a", "b"]
    timers.reset("a")
    assert [timer.has_history for _, timer in timers] == [False, True]
    timers.reset()
    assert not timers.get_timer("b").has_history
    timers.set_status(False)
    assert not timers.is_on()
    timers.start("c")
    assert timers.stop("c") is None
    with pytest.raises(ConfigError, match="'c', and there is a, b"):
        timers.get_timer("c")


# ------------------------------------------------------------------------------------------ loaders


def samples_of(loader: Any) -> list[int]:
    return [int(value) for (batch,) in loader for value in batch]


def test_each_data_parallel_rank_gets_its_samples() -> None:
    dataset = TensorDataset(torch.arange(10))

    def program() -> list[Any]:
        with ParallelMesh(tp=2) as mesh:
            loader = utils.get_dataloader(dataset, shuffle=True, seed=3, batch_size=2)
            return [mesh.rank("dp"), samples_of(loader), samples_of(loader), len(loader)]

    results = run_threads(program, 4)
    for epoch in (1, 2):
        by_rank = {result[0]: result[epoch] for result in results}
        assert sorted(sample for samples in by_rank.values() for sample in samples) == list(range(10))
        assert all(result[epoch] == by_rank[result[0]] for result in results)
    assert results[0][1] != results[0][2]
    assert {result[3] for result in results} == {3}


def test_a_loader_without_sampler_gives_all_samples_to_each_rank() -> None:
    dataset = TensorDataset(torch.arange(5))

    def program() -> list[int]:
        return samples_of(utils.get_dataloader(dataset, add_sampler=False, batch_size=2, drop_last=True))

    assert run_threads(program, 2) == [[0, 1, 2, 3]] * 2
    assert samples_of(utils.get_dataloader(dataset)) == [0, 1, 2, 3, 4]


def test_a_sampler_drops_or_repeats_samples() -> None:
    def program() -> list[list[int]]:
        dataset: Any = range(5)
        return [list(utils.DataParallelSampler(dataset, drop_last=drop)) for drop in (False, True)]

    assert run_threads(program, 2) == [[[0, 2, 4], [0, 2]], [[1, 3, 0], [1, 3]]]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_a_loader_refuses_what_it_cannot_split() -> None:
    with pytest.raises(UnsupportedError, match="Stream"):
        utils.get_dataloader(Stream())
    with pytest.raises(ConfigError, match="batch_sampler"):
        utils.get_dataloader(TensorDataset(torch.ones(2)), batch_sampler=[[0]])
    assert [int(each) for each in utils.get_dataloader(Stream(), add_sampler=False)] == [0, 1, 2]


def test_workers_of_ranks_draw_different_numbers() -> None:
    class Drawing(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(()), np.random.rand()  # noqa: NPY002 (as transforms do)

    def program() -> list[float]:
        loader = utils.get_dataloader(Drawing(torch.arange(4)), batch_size=4, num_workers=0)
        return [float(loader.generator.initial_seed())]

    assert len({tuple(each) for each in run_threads(program, 2)}) == 2


# ------------------------------------------------------------------------------------------ the mesh


def test_says_what_a_rank_is() -> None:
    def questions() -> list[bool]:
        return [
            utils.is_dp_rank_0(),
            utils.is_tp_rank_0(),
            utils.is_no_pp_or_last_stage(),
            utils.is_using_ddp(),
            utils.is_using_pp(),
            utils.is_using_sequence(),
        ]

    assert questions() == [True, True, True, False, False, False]
    with fake_world(16, rank=0), ParallelMesh(tp=2, pp=2, sp=2):
        assert questions() == [True, True, False, True, True, True]
    with fake_world(16, rank=15), ParallelMesh(tp=2, pp=2, sp=2):
        assert questions() == [False, False, True, True, True, True]
    with fake_world(2, rank=1):
        assert questions() == [False, True, True, True, False, False]


def test_data_parallel_ranks_get_the_values_of_the_first() -> None:
    def program() -> tuple[int, float, float]:
        with ParallelMesh(tp=2) as mesh:
            model = nn.BatchNorm1d(2)
            nn.init.constant_(model.weight, dist.get_rank())
            mean = model.get_buffer("running_mean").fill_(dist.get_rank())
            utils.sync_model_param(model)
            return mesh.rank("tp"), model.weight[0].item(), mean[0].item()

    for tp_rank, weight, mean in run_threads(program, 4):
        assert weight == mean == tp_rank


def test_ranks_of_a_mode_get_the_values_of_its_first() -> None:
    def program() -> list[float]:
        values = []
        for mode in (ParallelMode.DATA, ParallelMode.TENSOR, ParallelMode.GLOBAL):
            with ParallelMesh(tp=2):
                model = nn.Linear(1, 1, bias=False)
                nn.init.constant_(model.weight, dist.get_rank())
                utils.sync_model_param(model, mode)
                values.append(model.weight.item())
        return values

    assert run_threads(program, 4) == [[0, 0, 0], [1, 0, 0], [0, 2, 0], [1, 2, 0]]


def clipped_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU())


def clip_under(model: nn.Module, plugin: Any, zeros: bool) -> list[float]:
    """The norm, the largest gradient afterwards, and the zeros, of a model under a plugin."""
    model = copy.deepcopy(model)  # threads share one random generator: a model of their own would differ
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    booster = Booster(device="cpu", plugin=plugin)
    boosted, wrapper, criterion, *_ = booster.boost(model, optimizer, lambda outputs, _=None: outputs.square().sum())
    inputs = torch.ones(2, 6)
    mesh = getattr(plugin, "mesh", None)
    with mesh if mesh is not None else ParallelMesh():
        if mesh is not None and mesh.size("pp") > 1:
            booster.execute_pipeline(iter([(inputs,)]), boosted, criterion, wrapper)
        else:
            booster.backward(criterion(boosted(inputs)), wrapper)
        wrapper.unscale_grad()
        found = [float(utils.count_zeros_fp32(wrapper.parameters))] if zeros else []
        return [utils.clip_grad_norm_fp32(wrapper.parameters, 0.5), *found]


def clip_pipeline() -> list[float]:
    plugin = HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, precision="fp32")
    return clip_under(clipped_model(), plugin, zeros=True)


def expected_clip() -> list[float]:
    model = clipped_model()
    model(torch.ones(2, 6)).square().sum().backward()
    zeros = sum(int((parameter.grad == 0).sum()) for parameter in model.parameters())
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    return [nn.utils.get_total_norm(grads).item(), float(zeros)]


def test_clips_to_the_norm_over_all_shards() -> None:
    expected = expected_clip()
    model = clipped_model()
    for found in run_threads(lambda: clip_under(model, LowLevelZeroPlugin(stage=2, precision="fp32"), zeros=True), 2):
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert found[1] == expected[1] > 0


def test_clips_to_the_norm_over_all_stages() -> None:
    expected = expected_clip()
    for found in run_processes(clip_pipeline, 2):
        # the loss is averaged over two micro-batches of one sample each: the same gradients in halves
        assert found[0] == pytest.approx(expected[0] / 2, rel=1e-5)
        assert found[1] == expected[1]


# ------------------------------------------------------------------------------------------ reports


@pytest.fixture
def _only_own_tensors() -> Iterator[None]:
    """Hide what other tests left: some of it ends with a later collection, between two looks at what is alive."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_reports_memory_of_this_rank(logged: Any) -> None:
    utils.report_memory_usage("after the start", report_cpu=True)
    [message] = logged()
    assert "after the start: " in message
    assert "host memory in use " in message
    assert float(message.partition("in use ")[2].partition(" MiB")[0]) > 10


def test_prints_on_the_first_rank_only(capsys: pytest.CaptureFixture[str], logged: Any) -> None:
    utils.print_rank_0("alone")
    utils.print_rank_0("by a logger", get_dist_logger())
    with fake_world(2, rank=1):
        utils.print_rank_0("not the first")
    assert capsys.readouterr().out == "alone\n"
    assert "by a logger" in logged()[0]


@pytest.mark.usefixtures("_only_own_tensors")
def test_finds_tensors_that_come_and_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(7, 5)
    detector = utils.TensorDetector(log=tmp_path / "tensors.txt", include_cpu=True, module=model)
    detector.detect()
    before = detector.num_bytes
    tensor = torch.zeros(1001)
    detector.detect()
    assert detector.num_bytes - before == 4004
    del tensor
    detector.detect()
    assert detector.num_bytes == before
    first, *others = capsys.readouterr().out.split("MiB\n+", 1)
    assert "weight" in first + "".join(others)
    text = (tmp_path / "tensors.txt").read_text(encoding="utf-8")
    assert [line[0] for line in text.splitlines() if " 1001 " in line] == ["+", "-"]
    detector.close()


# ------------------------------------------------------------------------------------------ small ones


def test_contexts_and_functions() -> None:
    with utils.conditional_context(torch.no_grad(), enable=True):
        assert not torch.is_grad_enabled()
    with utils.conditional_context(torch.no_grad(), enable=False):
        assert torch.is_grad_enabled()
    calls: list[int] = []
    once = utils.disposable(lambda value: calls.append(value) or value)
    assert [once(1), once(2)] == [1, None]
    assert calls == [1]


def test_seeds_all_generators() -> None:
    def draw() -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(()).item()]  # noqa: NPY002, S311 (what is seeded)

    utils.set_seed(5)
    first = draw()
    utils.set_seed(5)
    assert draw() == first
    utils.set_seed(6)
    assert draw() != first


def test_tensors_and_devices(tmp_path: Path) -> None:
    model, tensor = utils.set_to_cuda((nn.Linear(1, 1), torch.ones(2)))
    assert model.weight.device == tensor.device == utils.get_current_device()
    assert utils.set_to_cuda("anything else") == "anything else"
    utils.synchronize()
    utils.empty_cache()
    utils.free_storage(tensor)
    assert tensor.untyped_storage().nbytes() == 0
    with pytest.raises(AssertionError, match="another tensor"):
        utils.free_storage(torch.ones(3)[1:])
    parameter = nn.Parameter(torch.ones(1))
    assert not utils.is_ddp_ignored(parameter)
    parameter._ddp_to_ignore = True  # type: ignore[attr-defined]
    assert utils.is_ddp_ignored(parameter)
    binding = utils.DeviceBinding(utils.get_current_device().type)
    binding.bind()
    assert binding.configure_model(model) is model
    assert model.weight.device == utils.get_current_device()
    with pytest.raises(ConfigError, match="none_such"):
        utils.DeviceBinding("none_such")
    holder = nn.Sequential(nn.BatchNorm1d(1))
    holder.register_buffer("scale", torch.ones(1), persistent=False)
    assert utils.get_non_persistent_buffers_set(holder) == {"scale"}
    assert utils.get_non_persistent_buffers_set(holder, prefix="model") == {"model.scale"}
    assert utils.get_non_persistent_buffers_set(holder, {holder}) == set()
    utils.ensure_path_exists(tmp_path / "a" / "b" / "file")
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["b"]
    assert utils.multi_tensor_applier(lambda *args: args, "flag", [[tensor]], 2) == (65536, "flag", [[tensor]], 2)


def test_a_chunk_of_an_interleaved_pipeline_is_entered_and_left() -> None:
    with fake_world(2):
        with utils.switch_virtual_pipeline_parallel_rank(1):
            assert global_context.virtual_pipeline_parallel_rank == 1
        assert global_context.virtual_pipeline_parallel_rank is None


@pytest.mark.usefixtures("_only_own_tensors")
def test_the_detector_passes_over_tensors_that_have_no_memory() -> None:
    with FakeTensorMode():
        fake = torch.zeros(1000)
    alive = [fake, torch.nn.LazyLinear(2), torch.zeros(3, device="meta"), torch.eye(3).to_sparse()]
    detector = utils.TensorDetector(show_info=False)
    detector.detect()
    before, tensor = detector.num_bytes, torch.zeros(1000)
    detector.detect()
    assert detector.num_bytes - before == tensor.nbytes
    assert len(alive) == 4
