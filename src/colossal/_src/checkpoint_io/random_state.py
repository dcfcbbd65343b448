"""The states of all generators of random numbers of a process."""

import random
from typing import Any

import numpy as np
import torch

from colossal.accelerator import get_accelerator


def random_state() -> dict[str, Any]:
    """Collect the states of the generators of Python, NumPy, torch and, where there is one, of the accelerator."""
    version, words, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - what transforms draw from
    state = {
        "python": [version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss],
        "numpy": {
            **numpy,
            "state": {**numpy["state"], "key": torch.from_numpy(numpy["state"]["key"].astype(np.int64))},
        },
        "torch": torch.get_rng_state(),
    }
    accelerator = get_accelerator()
    of_device = accelerator.get_rng_state()
    return state | ({} if of_device is None else {accelerator.name: of_device})


def restore_random_state(states: list[dict[str, Any]], place: int) -> None:
    """Let the generators go on.

    A process that had no counterpart begins a stream of its own, drawn from that of another and from its place.
    """
    state = states[place % len(states)]
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    numpy = state["numpy"]
    key = numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    accelerator = get_accelerator()
    if accelerator.name in state:
        accelerator.set_rng_state(state[accelerator.name])
    if place >= len(states):
        _branch_off(place)


def _branch_off(place: int) -> None:
    seed = int(torch.randint(2**62, (), device="cpu").item()) ^ place
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)
