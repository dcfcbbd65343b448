"""Activations of several operations, compiled into one kernel."""

import os
import shutil
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from colossal.accelerator import get_accelerator
from colossal.errors import UnsupportedError

_OPTION = "enable_jit_fused"

# Several operations each; the python variants of GELU are recognized by their function.
_IN_PARTS = (
    "AccurateGELUActivation",
    "BloomGelu",
    "ClippedGELUActivation",
    "FastGELUActivation",
    "LaplaceActivation",
    "NewGELUActivation",
    "QuickGELUActivation",
    "ReLUSquaredActivation",
)
_ONE_KERNEL = ("GELUActivation", "GELUTanh", "SiLUActivation", "MishActivation", "LinearActivation")
_OF_TORCH = torch.nn.modules.activation.__name__
_COMPILERS = ("g++", "clang++", "c++", "cl")


def check_compiled_activations(model: nn.Module) -> str:
    """Find the activations of a model to compile."""
    if any(map(_is_in_parts, model.modules())):
        _check_compiler()
        return "compiled"
    if any(type(each).__name__ in _ONE_KERNEL or type(each).__module__ == _OF_TORCH for each in model.modules()):
        return "torch's"
    raise UnsupportedError(
        f"{_OPTION} compiles activations that are modules: those of transformers and torch.nn. Found "
        f"{type(model).__name__}, which has none of them. Leave the option out, or call torch.compile on what is slow."
    )


def compile_activations(model: nn.Module) -> None:
    """Compile the activations of a model that are several operations. That is done when they first run.

    Only these: to fuse a bias or a dropout into them, the forward methods of their layers would have to be others.
    """
    for module in model.modules():
        if _is_in_parts(module):
            module.compile(fullgraph=True, dynamic=True)


def _is_in_parts(module: nn.Module) -> bool:
    function: Any = getattr(module, "act", None)
    is_python = type(module).__name__ in _ONE_KERNEL and getattr(function, "__name__", "").endswith("_python")
    return is_python or type(module).__name__ in _IN_PARTS


def _check_compiler() -> None:
    """Ask for what compiles on the device of this process: parameters may be in host memory yet, or nowhere."""
    accelerator = get_accelerator()
    needs = "a C++ compiler" if accelerator.is_cpu else "triton"
    if accelerator.is_cpu:
        is_there = any(map(shutil.which, (os.environ.get("CXX") or "", *_COMPILERS)))
    else:  # a device of another project brings the Scheduling of torch.compile in its module
        is_there = find_spec("triton") or hasattr(torch.get_device_module(accelerator.name), "Scheduling")
    if not is_there:
        raise UnsupportedError(
            f"{_OPTION} compiles with {needs} on {accelerator.name!r}. Found none. Install "
            f"{'g++' if accelerator.is_cpu else needs}, or leave the option out."
        )
