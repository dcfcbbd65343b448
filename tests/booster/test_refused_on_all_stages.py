"""What only one stage of a pipeline would find is refused on all of them, with the same message."""

import torch
from families import build, inputs_of
from plugins import HYBRID

from colossal._src.testing.processes import PRELOADED
from colossal.booster import Booster
from colossal.errors import ShapeError, UnsupportedError
from colossal.testing import run_processes

PRELOADED.append("transformers.models.llama.modeling_llama")


def refusals() -> tuple[str, ...]:
    found = list[str]()
    plugin = HYBRID(
        2, 2, num_microbatches=2, enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather"
    )
    booster, model = Booster(device="cpu", plugin=plugin), build("llama")
    weight = model.get_parameter("model.layers.1.mlp.down_proj.weight")
    handle = weight.register_hook(lambda grad: grad * 2)
    try:
        booster.boost(model)
    except UnsupportedError as error:  # in building the last stage
        found.append(str(error))
    handle.remove()
    model = build("llama")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = inputs_of("llama")
    for length in (11, 12):
        part = {name: value[:, :length] for name, value in batch.items()}
        try:
            booster.execute_pipeline(iter([part]), model, lambda outputs, _: outputs.loss, optimizer)
        except ShapeError as error:  # in the first stage
            found.append(str(error))
    return *found, "went on"


def test_refused_on_all_stages() -> None:
    ((hooked, uneven, end),) = {*run_processes(refusals, 4)}
    assert "Found a hook on layers.1.mlp.down_proj.weight. Remove it" in hooked
    assert "Found 11 tokens. Pad batches to a multiple of 2, such as 12" in uneven
    assert end == "went on"
