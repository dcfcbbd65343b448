# pyright: reportMissingImports=false
"""Train by every other plugin, each as one process does, and print the distance: ``plugins.py FOLDER HALF``."""

import json
import sys
from pathlib import Path

import equal
import torch
from equality import exactly_apart
from families import build

import colossal


def main(folder: str, half: str) -> None:
    mesh = colossal.launch_from_torch(verbose=False)

    def made() -> torch.nn.Module:
        torch.manual_seed(0)
        return build(equal.MODEL, num_layers=equal.LAYERS).double()

    values, norms = equal.alone(made())
    apart = {}
    for number, name in enumerate(list(equal.EXACT)[int(half) :: 2]):
        _, kind, options = equal.EXACT[name]
        found, found_norms = equal.boosted(made(), kind, options, None, Path(folder, f"{number}.pt"))
        pairs = [(found[key], value) for key, value in values.items()]
        pairs.append((torch.tensor(found_norms, dtype=torch.float64), torch.tensor(norms, dtype=torch.float64)))
        apart[name] = equal.worst_of(exactly_apart(*pair) for pair in pairs)
    if mesh.global_rank == 0:
        sys.stdout.write(f"{json.dumps(apart)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
