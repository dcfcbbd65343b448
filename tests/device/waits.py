# pyright: reportMissingImports=false
"""Count how often the host waits in one step of each plugin, after it has become steady: ``waits.py HALF``."""

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

RING = {"tp_size": 1, "pp_size": 1, "sp_size": 2, "enable_sequence_parallelism": True}
CASES = {name: (kind, options, "bf16") for name, (_, kind, options) in equal.EXACT.items() if name != "FSDP, offloaded"}
CASES["Hybrid, sp2, ring_attn"] = (equal.HYBRID, {**RING, "sequence_parallelism_mode": "ring_attn"}, "bf16")
CASES |= {name: (kind, options, own) for name, (own, kind, options) in equal.ROUNDED.items() if own == "fp16"}
STEPS_BEFORE = 3


def loss_of(outputs: Any, _: Any) -> torch.Tensor:
    return outputs.loss


def waits_of(kind: str, options: dict[str, Any], precision: str) -> list[dict[str, int]]:
    """Count in a step whose batch comes from the host, and in one whose batch is on the device."""
    torch.manual_seed(0)
    model = build(equal.MODEL, num_layers=equal.LAYERS)
    own = {} if kind.startswith("Torch") else {"precision": precision}
    booster = Booster(
        plugin=getattr(plugins, kind)(**options, **own),
        mixed_precision=None if own else precision,
        max_norm=equal.MAX_NORM,
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), **equal.ADAM)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    on_host = equal.batch_of(0)["input_ids"].pin_memory()

    def step(ids: torch.Tensor) -> None:
        booster.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), boosted, loss_of, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS_BEFORE):
        step(on_host)
    found = list[dict[str, int]]()
    for ids in (on_host, on_host.to("pretend")):
        with pretend_device.counted_waits() as waits:
            step(ids)
        found.append(waits)
    return found


def main(half: str) -> None:
    mesh = colossal.launch_from_torch(verbose=False)
    found = {name: waits_of(*CASES[name]) for name in list(CASES)[int(half) :: 2]}
    if mesh.global_rank == 0:
        sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
