"""What may be done with a parameter after what."""

import itertools

import pytest
import torch
from chunked import BATCHES, Deep, loss_of, model_of, own_rows, wrap

from colossal.errors import ConfigError
from colossal.testing import run_threads
from colossal.zero.gemini import TensorState

FREE, HOLD, COMPUTE, AFTER, READY = TensorState
STEPS = {
    FREE: {HOLD, READY},
    HOLD: {FREE, COMPUTE, READY},
    COMPUTE: {HOLD, AFTER},
    AFTER: {COMPUTE, READY, HOLD, FREE},
    READY: {HOLD, FREE, COMPUTE},
}


@pytest.mark.parametrize(("old", "new"), list(itertools.product(TensorState, repeat=2)))
def test_each_step(old: TensorState, new: TensorState) -> None:
    if new is old or new in STEPS[old]:
        assert old.transition_to(new) is new
    else:
        with pytest.raises(ConfigError, match=rf"After {old.name} a parameter can be .*Found a\s+step to {new.name}"):
            old.transition_to(new)


def watch(model: torch.nn.Module) -> list[set[TensorState]]:
    """Return the states of all parameters before, between and after passes."""
    wrapped, optimizer = wrap(model, chunk_numel=1)
    seen = []

    def note() -> None:
        seen.append({state for chunk in wrapped.chunks.chunks for state in chunk.states})

    note()
    loss = loss_of(wrapped, own_rows(BATCHES[0]))
    note()
    loss.register_hook(lambda _grad: note())
    optimizer.backward(loss)
    note()
    optimizer.step()
    note()
    return seen


def test_between_passes_nothing_is_done() -> None:
    for before, forward, begin, backward, step in run_threads(watch, 2, model_of(Deep)):
        assert before == step == {FREE}
        assert forward == begin == backward == {FREE, HOLD}
