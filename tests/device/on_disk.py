# pyright: reportMissingImports=false
"""Train with states or parameters in files, and with the same in memory, beside an accelerator: ``on_disk.py FOLDER``.

Prints what makes the host wait in a step of each, how far the parameters are apart, and what is said where it cannot
be done.
"""

import json
import sys
from typing import Any

import equal
import pretend_device
import torch
from families import build

import colossal
from colossal.booster import Booster
from colossal.booster import plugin as plugins
from colossal.errors import UnsupportedError
from colossal.nn.optimizer import HybridAdam

ON_HOST: dict[str, Any] = {"placement_policy": "static", "offload_optim_frac": 1.0, "offload_param_frac": 1.0}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ZeRO-2, states": (equal.ZERO, {"stage": 2, "cpu_offload": True}, {}),
    "Gemini, states": (equal.GEMINI, {**equal.CHUNKS, **ON_HOST}, {}),
    "Gemini, parameters": (equal.GEMINI, {**equal.CHUNKS, **ON_HOST}, {"nvme_param_frac": 1.0}),
}
STEPS = 3


def trained(kind: str, options: dict[str, Any], fraction: float, folder: str) -> tuple[dict[str, torch.Tensor], Any]:
    torch.manual_seed(0)
    model = build(equal.MODEL, num_layers=equal.LAYERS).float()
    adam = HybridAdam(model.parameters(), lr=0.01, nvme_offload_fraction=fraction, nvme_offload_dir=folder)
    booster = Booster(plugin=getattr(plugins, kind)(**options, precision="fp32"))
    boosted, optimizer, *_ = booster.boost(model, adam)
    assert optimizer is not None
    found = []
    for step in range(STEPS):
        batch = equal.batch_of(step)
        with pretend_device.counted_waits() as waits:
            booster.execute_pipeline(iter([batch]), boosted, lambda outputs, _: outputs.loss, optimizer)
            optimizer.step()
        optimizer.zero_grad()
        found.append(waits)
    return boosted.state_dict(only_rank_0=False), found[-1]


def refusal(folder: str) -> str:
    """What is said of states on disk whose parameters are on the accelerator."""
    model = torch.nn.Linear(8, 8)
    adam = HybridAdam(model.parameters(), nvme_offload_fraction=1.0, nvme_offload_dir=folder)
    booster = Booster(plugin=plugins.TorchDDPPlugin())
    boosted, optimizer, *_ = booster.boost(model, adam)
    assert optimizer is not None
    booster.backward(boosted(torch.ones(1, 8)).sum(), optimizer)
    try:
        optimizer.step()
    except UnsupportedError as error:
        return str(error)
    return ""


def main(folder: str) -> None:
    mesh = colossal.launch_from_torch(verbose=False)
    found: dict[str, Any] = {"refusal": refusal(folder)}
    for name, (kind, options, in_files) in CASES.items():
        expected, waits = trained(kind, options, 0.0, folder)
        values, own = trained(
            kind, options | in_files | ({"nvme_offload_dir": folder} if in_files else {}), 1.0, folder
        )
        apart = max((values[key] - value).abs().max().item() for key, value in expected.items())
        found[name] = {"apart": apart, "waits": own, "waits in memory": waits}
    if mesh.global_rank == 0:
        sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
