"""The accelerator has the verbs of the older documentation."""

import os
from unittest import mock

import pytest
import torch
from torch import nn

from colossal import accelerator as today
from colossal.errors import ConfigError, UnsupportedError
from colossal.legacy.accelerator import BaseAccelerator, CpuAccelerator, get_accelerator, set_accelerator


def test_the_cpu_has_the_verbs_that_it_can_have() -> None:
    cpu = CpuAccelerator()
    assert (cpu.name, cpu.is_synchronous, cpu.get_version(), cpu.device_count()) == ("cpu", True, "", 1)
    assert cpu.is_available()
    cpu.reset_peak_memory_stats()
    assert 0 < cpu.memory_allocated() <= 2 * cpu.max_memory_allocated()
    cpu.synchronize()
    cpu.empty_cache()
    cpu.reset_max_memory_allocated()
    cpu.reset_max_memory_cached()
    assert 0 < cpu.memory_reserved() <= 2 * cpu.max_memory_reserved()
    assert cpu.get_device_name()
    cpu.set_stream(cpu.default_stream())


def test_random_numbers_go_on_from_a_state() -> None:
    cpu = CpuAccelerator()
    cpu.manual_seed_all(7)
    assert cpu.initial_seed() == 7
    state = cpu.get_rng_state()
    first = torch.rand(3)
    cpu.set_rng_state(state)
    states = cpu.get_rng_state_all()
    assert torch.equal(torch.rand(3), first)
    cpu.set_rng_state_all(states)
    assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize("name", ["memory_allocated", "max_memory_reserved", "reset_peak_memory_stats", "synchronize"])
def test_a_device_is_taken_where_torch_takes_one(name: str) -> None:
    cpu = CpuAccelerator()
    for device in (cpu.get_current_device(), "cpu", 0, None):
        getattr(cpu, name)(device)
        getattr(cpu, name)(device=device)
    state = cpu.get_rng_state("cpu")
    cpu.set_rng_state(state, device="cpu")
    assert torch.equal(cpu.get_rng_state(), state)
    with pytest.raises(ConfigError, match="Found the device 'cuda:1'"):
        getattr(cpu, name)("cuda:1")


def test_models_move_and_compute_in_lower_precision() -> None:
    cpu = CpuAccelerator()
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert cpu.set_to_device(layers) is layers
    assert cpu.set_to_device(layers[0]).weight.device == cpu.get_current_device()
    with cpu.autocast(dtype=torch.bfloat16):
        assert layers[0](torch.ones(1, 2)).dtype == torch.bfloat16
    with cpu.autocast(enabled=False):
        assert layers[0](torch.ones(1, 2)).dtype == torch.float32


def test_what_a_device_does_not_have_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Found no torch\.cpu\.memory_stats"):
        CpuAccelerator().memory_stats()
    with pytest.raises(AttributeError, match="'CpuAccelerator' object has no attribute 'nothing'"):
        _ = CpuAccelerator().nothing
    with pytest.raises(ConfigError, match="Found 'abacus'"):
        BaseAccelerator("abacus")


def test_the_accelerator_is_chosen_by_name_or_object() -> None:
    with mock.patch.dict(os.environ):
        for chosen in ("cpu", CpuAccelerator(), today.get_accelerator("cpu")):
            os.environ.pop("COLOSSAL_DEVICE", None)
            set_accelerator(chosen)
            assert os.environ["COLOSSAL_DEVICE"] == "cpu"
            assert isinstance(get_accelerator(), CpuAccelerator)
