"""The step of Adam in own code: tables of addresses for C++ and CUDA."""

import ctypes
from array import array
from collections.abc import Callable

import torch

from colossal._src._native import library
from colossal._src.kernel.adam.step import FLOATS, AdamStep, Columns, Runner
from colossal.errors import UnsupportedError

_CODES = {dtype: code for code, dtype in enumerate(FLOATS, start=1)}  # 0: there is no tensor
_WIDEST_VECTORS = 2


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_float) for name in ("step_size", "beta1", "beta2", "rest1", "rest2", "eps")),
        *((name, ctypes.c_float) for name in ("decay", "root_scale", "grad_scale")),
        ("is_decoupled", ctypes.c_int32),
    )


def on_cpu() -> Runner:
    """Return the kernel for tensors in host memory."""
    function = library("cpu/adam").colossal_adam
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
    function.restype = None

    def run(columns: Columns, step: AdamStep, num_threads: int, level: int = _WIDEST_VECTORS) -> None:
        table = _table(columns)
        threads = num_threads or torch.get_num_threads()
        function(table.buffer_info()[0], len(columns[0]), ctypes.byref(_numbers(step)), threads, level)

    return run


def on_cuda() -> Runner:
    """Return the kernel for tensors on a GPU of NVIDIA, after a trial on the one in use."""
    launch = launcher(library("cuda/adam"))

    def run(columns: Columns, step: AdamStep, _num_threads: int = 0) -> None:
        device = columns[0][0].device
        with torch.cuda.device(device):
            launch(columns, step, device.index, torch.cuda.current_stream().cuda_stream)

    # code that does not run on this GPU shows here, where the caller can still take torch's operations
    run([*([torch.zeros(1, device="cuda")] for _ in range(4)), []], AdamStep(step=1))
    return run


def launcher(built: ctypes.CDLL) -> Callable[[Columns, AdamStep, int, int], None]:
    """Return the function of a library that was built from ``cuda/adam``."""
    function = built.colossal_adam
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
    function.restype = ctypes.c_char_p

    def launch(columns: Columns, step: AdamStep, device: int, stream: int) -> None:
        table = _table(columns)
        numbers = _numbers(step)
        message = function(table.buffer_info()[0], len(columns[0]), ctypes.byref(numbers), device, stream)
        if message:
            raise UnsupportedError(
                f"A step of Adam needs a device that runs its kernel. Found on cuda:{device}: {message.decode()}. "
                "Update the driver, or let NVCC name the compiler of an older version of CUDA."
            )

    return launch


def _table(columns: Columns) -> "array[int]":  # a string for Python 3.11
    """Seven numbers for each parameter: five addresses, how many elements, and a byte for each type."""
    params, grads, *_, copies = columns
    addresses = [[tensor.data_ptr() for tensor in column] for column in columns]
    codes = [_CODES[param.dtype] + 256 * _CODES[grad.dtype] for param, grad in zip(params, grads, strict=True)]
    if copies:
        codes = [code + 65536 * _CODES[copy.dtype] for code, copy in zip(codes, copies, strict=True)]
    else:
        addresses[-1] = [0] * len(params)
    table = array("q")
    for row in zip(*addresses, (param.numel() for param in params), codes, strict=True):
        table.extend(row)
    return table


def _numbers(step: AdamStep) -> _Step:
    decay = step.weight_decay * (step.lr if step.is_decoupled else 1.0)
    # in double precision: float32 has few correct digits of 1 - 0.999
    complements = (1 - beta for beta in step.betas)
    coefficients = (step.step_size, *step.betas, *complements, step.eps)
    return _Step(*coefficients, decay, 1 / step.root_of_correction, step.grad_scale, step.is_decoupled)
