import pytest
import torch

from colossal.accelerator import Accelerator, auto_set_accelerator, get_accelerator, get_current_device, set_accelerator
from colossal.errors import ConfigError
from colossal.testing import run_processes


def test_the_cpu_has_every_verb() -> None:
    cpu = Accelerator("cpu")
    assert cpu.communication_backend == "gloo"
    assert cpu.device_count() == 1
    cpu.set_device(7)
    cpu.synchronize()
    cpu.empty_cache()
    cpu.manual_seed(5)
    first = torch.rand(())
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(()))


def use_memory() -> None:
    cpu, size = Accelerator("cpu"), 256 * 2**20
    before = cpu.memory_allocated()
    cpu.reset_peak_memory_stats()
    block = torch.ones(size, dtype=torch.uint8)
    held = cpu.memory_allocated()
    assert held - before > 0.9 * size
    assert cpu.max_memory_allocated() >= held
    del block
    assert cpu.memory_allocated() < 0.9 * held <= cpu.max_memory_allocated()
    cpu.reset_peak_memory_stats()
    assert cpu.max_memory_allocated() < held


def test_memory_of_the_cpu_is_that_of_the_process() -> None:
    run_processes(use_memory, 1)  # a new one, in which no freed memory is used again


def test_the_environment_chooses_the_device(monkeypatch) -> None:
    monkeypatch.setenv("COLOSSAL_DEVICE", "cpu")
    assert get_accelerator().name == "cpu"
    assert get_current_device() == torch.device("cpu")
    monkeypatch.setenv("COLOSSAL_DEVICE", "abacus")
    with pytest.raises(ConfigError, match="Found 'abacus'"):
        get_accelerator()


@pytest.mark.gpu
def test_a_gpu_is_preferred_and_measured(monkeypatch) -> None:
    monkeypatch.delenv("COLOSSAL_DEVICE")
    gpu = get_accelerator()
    assert gpu.name == "cuda"
    assert gpu.get_current_device().type == "cuda"
    assert gpu.communication_backend == "nccl"
    gpu.reset_peak_memory_stats()
    before = gpu.memory_allocated()
    block = torch.ones(2**20, device=gpu.get_current_device())
    gpu.synchronize()
    assert gpu.memory_allocated() - before >= block.numel() * 4
    assert gpu.max_memory_allocated() >= gpu.memory_allocated()
    if gpu.device_count() == 1:  # as a launcher shows each process its own, whatever its number
        gpu.set_device(99)
        assert gpu.get_current_device().index == 0
    else:
        with pytest.raises(ConfigError, match="local rank 99"):
            gpu.set_device(99)


def test_the_accelerator_is_chosen_until_it_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOSSAL_DEVICE", "nothing")  # which is restored after the test
    with pytest.raises(ConfigError, match="nothing"):
        get_accelerator()
    set_accelerator("cpu")
    assert get_accelerator().name == "cpu"
    with pytest.raises(ConfigError, match="abacus"):
        set_accelerator("abacus")
    set_accelerator(get_accelerator("cpu"))
    assert get_accelerator() is get_accelerator("cpu")
    monkeypatch.setenv("COLOSSAL_DEVICE", "nothing")
    auto_set_accelerator()
    assert get_accelerator().name != "nothing"
