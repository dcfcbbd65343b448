"""The pretend accelerator catches faults of device handling, and every plugin trains on it as one process does."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import build
from safetensors.torch import load_file

from colossal.booster import Booster
from colossal.nn.optimizer import HybridAdam

NUM_PLUGINS = 19
"""Kinds of plugin that the program for GPUs compares with one process."""

NUM_IN_FILES = 3
"""Kinds of states or parameters that the program for files trains with."""

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
SEEN_BY = {
    "a_host_tensor_in_a_loss": "on the same device",
    "a_host_tensor_in_a_collective": "passed to a collective",
    "numbers_of_16_bits_in_a_message": "not supported for NCCL process group: torch.int16",
    "a_batch_that_was_not_moved": "aten::addmm",
    "a_read_of_what_a_side_stream_still_copies": "A wait is missing",
    "a_read_on_the_host_before_the_copy_is_over": "the host reads 0.0 in place of 2.0",
    "a_copy_into_pageable_memory_that_is_not_to_block": "needs page-locked memory",
    "a_tensor_made_on_the_default_device": "on the same device",
    "a_hard_wired_cuda": "CUDA|NVIDIA",
    "a_generator_of_the_host": "device type for generator",
    "a_wait_of_the_host_in_a_loop": "item makes it wait",
    "a_stale_event": "A wait is missing",
    "a_result_of_a_collective_that_was_not_waited_for": "c10d::allreduce",
    "memory_that_is_freed_while_a_side_stream_reads_it": "takes memory that was freed",
    "a_side_stream_that_does_not_wait_for_the_first": "A wait is missing",
}
OFFLOADED = {"a copy to the device that blocks": 1, "a copy to the host that blocks": 1}  # of the only chunk
PAGE_LOCKED = {"Event.synchronize": 1}  # for the gradients of the only bucket or chunk
WAITS = {
    "ZeRO-2, offloaded": PAGE_LOCKED,
    "Gemini, page-locked": PAGE_LOCKED,
    "Gemini, from the host": OFFLOADED,
    "Gemini, auto": OFFLOADED,
    "DDP, fp16": {"item": 1},  # whether a gradient has overflowed
    "ZeRO-1, fp16": {"item": 1},
    "Gemini, fp16": {"item": 1},
    "Hybrid, fp16": {"item": 1},
}
"""What makes the host wait in a step, by the plugin; nothing in any other, in bf16 and with clipping."""
COPIED = {"synchronize": 1}  # for all tensors
COMPARED = COPIED | {"a copy to the host that blocks": 1}  # and before them for the checksums of all replicas
IN_SAVING: dict[str, dict[str, int]] = {
    **{name: {} for name in ("FSDP, offloaded", "Gemini, from the host", "Gemini, page-locked", "Gemini, auto")},
    **dict.fromkeys(("FSDP", "Gemini", "Gemini, tp2", "Hybrid, pp2", "Hybrid, pp2, zbv"), COPIED),
}
"""What makes it wait in saving: nothing for a model in its own memory, `COPIED` without replicas, else `COMPARED`."""

pytestmark = [
    pytest.mark.skipif(
        not shutil.which(os.environ.get("CXX") or "g++"),
        reason="the device is built by a C++ compiler, and there is none",
    ),
    pytest.mark.slow,
]


def run(program: str, *words: str, ranks: int = 0) -> str:
    paths = [HERE, ROOT / "src", ROOT / "tests" / "gpu", ROOT / "tests" / "helpers"]
    own = {"COLOSSAL_DEVICE": "pretend", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, str(HERE / program), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | own, timeout=300, check=False)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return json.loads(run("faults.py").splitlines()[-1])


@pytest.mark.parametrize("name", SEEN_BY)
def test_a_planted_fault_is_seen(found, name) -> None:
    assert re.search(SEEN_BY[name], found[name])


def test_no_planted_fault_is_left_out(found) -> None:
    assert found.keys() == SEEN_BY.keys()


@pytest.mark.parametrize("half", ["0", "1"])
def test_every_plugin_trains_on_two_ranks_as_one_process_does(half, tmp_path) -> None:
    apart = json.loads(run("plugins.py", str(tmp_path), half, ranks=2).splitlines()[-1])
    assert len(apart) == len(range(int(half), NUM_PLUGINS, 2))
    assert max(apart.values()) <= 1, apart


@pytest.mark.parametrize("half", ["0", "1"])
def test_the_host_waits_for_nothing_that_is_not_listed(half) -> None:
    found = json.loads(run("waits.py", half, ranks=2).splitlines()[-1])
    assert found == {name: [WAITS.get(name, {})] * 2 for name in found}
    assert len(found) >= NUM_PLUGINS // 2


def test_a_backend_that_cannot_move_the_tensors_of_the_device_is_refused() -> None:
    required, found, advice = run("launches.py").strip().split(". ")
    assert required == "The backend must move tensors of the device 'pretend'"
    assert found == "Found 'gloo', which moves those of 'cpu' and 'cuda'"
    assert advice == "Leave backend out to use 'pretend', or stay on the CPU with COLOSSAL_DEVICE=cpu."


def test_states_in_files_are_computed_with_on_the_host_and_cost_the_device_nothing(tmp_path) -> None:
    found = json.loads(run("on_disk.py", str(tmp_path), ranks=2).splitlines()[-1])
    refusal = found.pop("refusal")
    assert "in host memory. Found one in torch.float32 on pretend:0" in refusal
    assert "Leave nvme_offload_fraction out, or update on the host" in refusal
    assert len(found) == NUM_IN_FILES
    assert {name: each["apart"] for name, each in found.items() if each["apart"]} == {}
    assert all(each["waits"] == each["waits in memory"] for each in found.values()), "no copy of its own, to be pinned"


def tensors_of(place: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory of safetensors, or of a file of torch's own; this process has no accelerator."""
    if place.is_file():
        return torch.load(place)
    return {name: value for file in place.glob("*.safetensors") for name, value in load_file(file).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not value.equal(expected[name])] == []


@pytest.mark.parametrize("half", ["0", "1"])
def test_batches_and_checkpoints_go_from_the_host_and_to_it_under_every_plugin(half, tmp_path) -> None:
    found = json.loads(run("round_trip.py", str(tmp_path), half, ranks=2).splitlines()[-1])
    assert len(found) == len(range(int(half), NUM_PLUGINS, 2))
    assert {name: each["apart"] for name, each in found.items() if each["apart"]} == {}
    assert {name: each["waits"] for name, each in found.items()} == {
        name: IN_SAVING.get(name, COMPARED) for name in found
    }
    for name, each in found.items():
        folder = tmp_path / str(each["number"])
        model, state = tensors_of(folder / "now"), tensors_of(folder / "optimizer")
        assert len(model) > 1, name
        assert len(state) > len(model), name
        assert_equal(tensors_of(folder / "later"), model)
        for place in (folder / "again", goes_through_the_cpu(folder)):
            assert_equal(tensors_of(place / "now"), model)
            assert_equal(tensors_of(place / "optimizer"), state)
        for file in ("torch.pt", "later.pt"):
            whole = tensors_of(folder / file)
            assert {value.device.type for value in whole.values()} == {"cpu"}
            assert_equal({key: whole[key] for key in model}, model)


def goes_through_the_cpu(folder: Path) -> Path:
    """Load model and optimizer in this process, which has no accelerator, and save them."""
    model, booster = build("llama-tied", num_layers=4), Booster(device="cpu")
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters()))
    assert optimizer is not None
    booster.load_model(model, folder / "now")
    booster.load_optimizer(optimizer, folder / "optimizer")
    booster.save_model(model, folder / "cpu" / "now", shard=True, use_safetensors=True)
    booster.save_optimizer(optimizer, folder / "cpu" / "optimizer", shard=True)
    return folder / "cpu"


def test_two_ranks_on_one_device_are_refused_on_both() -> None:
    found = [json.loads(line) for line in run("shared.py", "GPU-1", "GPU-1", ranks=2).splitlines()]
    assert len(found) == 2
    assert all("Each process needs a device of its own. Found ranks 0 and 1 on one: " in each for each in found)
    assert all("GPU-1" in each for each in found)
    assert [json.loads(line) for line in run("shared.py", "GPU-1", "GPU-2", ranks=2).splitlines()] == ["", ""]


def test_links_of_a_pipeline_are_opened_once_before_its_first_step() -> None:
    found = [json.loads(line) for line in run("links.py", ranks=3).splitlines()]
    assert sorted(each["opened"] for each in found) == [2, 2, 4]  # both ways, to each neighbour
    assert {each["opened_again"] for each in found} == {0}
    assert [each["numbers"] for each in found if each["numbers"]] == [[-2400, 2400] * 2]


def test_a_link_of_a_pipeline_that_is_not_opened_is_named() -> None:
    (found,) = [json.loads(line) for line in run("links.py", "gone", ranks=2).splitlines()]
    assert "Found that ranks 0 and 1 could not within 20 s; what rank 0 saw of rank 1: " in found
    assert "Look for the first error of rank 1." in found
