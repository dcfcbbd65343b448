# pyright: reportMissingImports=false
"""Join a world whose ranks have the devices that are named, and print what comes of it: ``shared.py NAME...``."""

import json
import os
import sys
from types import SimpleNamespace

import torch

import colossal
from colossal.errors import LaunchError


def main(names: list[str]) -> None:
    own = names[int(os.environ["RANK"])]
    module = torch.get_device_module()
    module.get_device_properties = lambda _: SimpleNamespace(uuid=own)  # as that of CUDA
    try:
        colossal.launch_from_torch(verbose=False)
        found = ""
    except LaunchError as error:
        found = str(error)
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
