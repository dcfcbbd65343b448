# pyright: reportMissingImports=false
"""Train by every plugin on batches from host memory while the accelerator is the default device, and save that.

``round_trip.py FOLDER HALF`` prints for each plugin how far the loss of a batch from host memory is from that of one on
the device, what makes the host wait in a save, and what differs after loading. A process on the CPU reads the files.
"""

import json
import sys
from pathlib import Path
from typing import Any

import equal
import pretend_device
import torch
from families import build
from torch import distributed as dist

import colossal
from colossal.accelerator import get_current_device
from colossal.booster import Booster
from colossal.booster import plugin as plugins
from colossal.nn.optimizer import HybridAdam

SAFE: dict[str, Any] = {"shard": True, "use_safetensors": True}


def made(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return build(equal.MODEL, num_layers=equal.LAYERS)


def boosted(kind: str, options: dict[str, Any], seed: int) -> tuple[Booster, Any, Any]:
    own = {} if kind.startswith("Torch") else {"precision": "fp32"}
    booster = Booster(plugin=getattr(plugins, kind)(**options, **own), max_norm=equal.MAX_NORM)
    model = made(seed)
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=0.01))
    return booster, model, optimizer


def trained(booster: Booster, model: Any, optimizer: Any, options: dict[str, Any]) -> float:
    """Two steps; return the distance of the losses of the same batch from the two kinds of memory."""
    with torch.device("cpu"):
        ids = equal.batch_of(0)["input_ids"]
    near, far = ({"input_ids": each, "labels": each} for each in (ids, ids.to(get_current_device())))
    if options.get("pp_size", 1) > 1:
        for _ in range(2):
            booster.execute_pipeline(iter([near]), model, lambda outputs, _: outputs.loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return 0.0
    apart = 0.0
    for _ in range(2):
        with torch.no_grad():
            wanted = model(**far).loss.item()
        loss = model(**near).loss
        apart = max(apart, abs(loss.item() - wanted))
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return apart


def saved(booster: Booster, model: Any, optimizer: Any, folder: Path) -> dict[str, int]:
    """Save; return what makes the host wait in saving the model."""
    with pretend_device.counted_waits() as waits:
        booster.save_model(model, folder / "now", **SAFE)
    booster.save_optimizer(optimizer, folder / "optimizer", shard=True)
    return waits


def case(folder: Path, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    booster, model, optimizer = boosted(kind, options, seed=0)
    apart = trained(booster, model, optimizer, options)
    waits = saved(booster, model, optimizer, folder)
    booster.save_model(model, folder / "torch.pt")
    booster.save_model(model, folder / "later", use_async=True, **SAFE)
    booster.save_model(model, folder / "later.pt", use_async=True)
    booster.checkpoint_io.synchronize()
    dist.barrier()
    booster, model, optimizer = boosted(kind, options, seed=1)
    booster.load_model(model, folder / "now")
    booster.load_optimizer(optimizer, folder / "optimizer")
    saved(booster, model, optimizer, folder / "again")
    return {"apart": apart, "waits": waits}


def main(folder: str, half: str) -> None:
    mesh = colossal.launch_from_torch(verbose=False)
    torch.set_default_device(get_current_device())
    found = {}
    for number, name in enumerate(list(equal.EXACT)[int(half) :: 2]):
        _, kind, options = equal.EXACT[name]
        found[name] = case(Path(folder, str(number)), kind, options) | {"number": number}
    if mesh.global_rank == 0:
        sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
