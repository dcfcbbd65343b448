# pyright: reportArgumentType=false, reportCallIssue=false
"""The CUDA kernel of Adam: its arithmetic on the CPU, its build where there is a compiler, and all of it on a GPU."""

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from colossal._src import _native
from colossal._src.kernel.adam import native, op
from colossal._src.kernel.adam.reference import reference_adam_step, run_fused
from colossal._src.kernel.adam.step import Columns
from colossal.errors import UnsupportedError
from colossal.kernel import AdamStep, AdamTensors, adam_step

pytestmark = pytest.mark.slow

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STEPS = (
    AdamStep(step=7, lr=0.02, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.3, grad_scale=0.25),
    AdamStep(step=3, lr=0.02, weight_decay=0.3, is_decoupled=False, bias_correction=False),
)
CHUNK = 16 * 256 * 4  # of the kernel
SHIM = Path(__file__).with_name("cuda_on_cpu")

needs_nvcc = pytest.mark.skipif(
    not _native._found(_native._LANGUAGES[".cu"]), reason="needs nvcc, the compiler of CUDA, and there is none here"
)


def make(
    numel: int, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None], seed: int, before: int = 0
) -> AdamTensors:
    """Tensors that begin ``before`` elements behind an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    param, grad, copy = dtypes
    values = torch.randn(4, numel + before, generator=generator)
    values[3] = values[3].square() / 10 + 0.02
    kinds = (param, grad, torch.float32, torch.float32)
    made = [each.to(kind).clone()[before:] for each, kind in zip(values, kinds, strict=True)]
    return AdamTensors(*made, None if copy is None else torch.zeros(numel + before, dtype=copy)[before:])


def columns_of(tensors: list[AdamTensors]) -> Columns:
    names = ("param", "grad", "exp_avg", "exp_avg_sq", "copy")
    columns = [[getattr(one, name) for one in tensors] for name in names]
    return [*columns[:4], [copy for copy in columns[4] if copy is not None]]


def moved(tensors: AdamTensors, device: str) -> AdamTensors:
    fields = (getattr(tensors, name) for name in ("param", "grad", "exp_avg", "exp_avg_sq", "copy"))
    return AdamTensors(*(None if field is None else field.to(device, copy=True) for field in fields))


def assert_same(own: list[AdamTensors], expected: list[AdamTensors]) -> None:
    """To float32's precision, and to a step of the dtype where the result was rounded."""
    for one, other in zip(columns_of(own), columns_of(expected), strict=True):
        for tensor, wanted in zip(one, other, strict=True):
            precision = max(torch.finfo(tensor.dtype).eps, 2e-6)
            torch.testing.assert_close(tensor.cpu(), wanted, rtol=precision, atol=1e-6)


CASES = [
    *([make(1500, dtypes, 0)] for dtypes in itertools.product(DTYPES, DTYPES, (None, *DTYPES))),
    *([make(1501, (torch.float32, torch.bfloat16, torch.float16), 0, before)] for before in (1, 2, 3, 4)),
    *([make(numel, (torch.float32,) * 3, numel)] for numel in (1, 3, 4, 5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7)),
    [make(size, (torch.float32, torch.bfloat16, torch.bfloat16), size) for size in (0, *range(1, 60), CHUNK + 5, 0, 9)],
    [make(size, (torch.bfloat16, torch.bfloat16, None), size) for size in range(100)],
]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory):  # noqa: ANN201 (a function of ours)
    """The kernel, compiled for the CPU by a header that stands in for CUDA's."""
    if not shutil.which("c++"):
        pytest.skip("needs a C++ compiler, and there is none here")
    source, target = _native._sources() / "cuda" / "adam.cu", tmp_path_factory.mktemp("shim") / "adam.so"
    flags = ["-x", "c++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I", str(SHIM)]
    subprocess.run(["c++", *flags, "-o", str(target), str(source)], check=True, timeout=120)
    return native.launcher(native.ctypes.CDLL(str(target)))


@pytest.mark.parametrize("step", STEPS)
def test_its_arithmetic_equals_the_reference(on_cpu, step) -> None:
    for case in CASES:
        own, expected = ([moved(one, "cpu") for one in case] for _ in range(2))
        on_cpu(columns_of(own), step, 0, 0)
        reference_adam_step(expected, step)
        assert_same(own, expected)


def test_its_rounding_is_torch_s(on_cpu) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    edges = torch.tensor([65504.0, 65519.9, 65520.0, 1e-8, 2**-25, 2**-24, 1e38, float("inf"), float("nan")])
    noise = 1 + torch.randn(2**16, generator=torch.Generator().manual_seed(1)) * 2**-9
    for low in (torch.float16, torch.bfloat16):
        every = patterns.view(low)
        for values in (every, every.float() * noise, edges):
            zeros, copy = torch.zeros(values.numel()), torch.empty(values.numel(), dtype=low)
            columns = [[values.clone()], [zeros], [zeros.clone()], [zeros.clone()], [copy]]
            on_cpu(columns, AdamStep(step=1, lr=0.0), 0, 0)
            torch.testing.assert_close(copy, values.to(low), rtol=0, atol=0, equal_nan=True)


def test_a_device_that_refuses_is_said(on_cpu) -> None:
    with pytest.raises(UnsupportedError, match="Found on cuda:1: invalid device ordinal"):
        on_cpu(columns_of(CASES[0]), STEPS[0], 1, 0)


@needs_nvcc
def test_nvcc_builds_it() -> None:
    assert native.launcher(_native.library("cuda/adam"))


# ------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS)
def test_on_a_gpu_it_equals_the_reference(step) -> None:
    """With nvcc in own code, and without it in torch's fused update."""
    for case in CASES:
        own, fused = ([moved(one, "cuda") for one in case] for _ in range(2))
        expected = [moved(one, "cpu") for one in case]
        adam_step(own, step)
        run_fused(columns_of(fused), step, 0)
        reference_adam_step(expected, step)
        assert_same(own, expected)
        assert_same(fused, expected)


@pytest.mark.gpu
@needs_nvcc
def test_on_a_gpu_own_code_runs_on_the_current_stream() -> None:
    assert op.runner_of("cuda") is not run_fused
    (tensors,) = [moved(make(1 << 22, (torch.float32,) * 3, 0), "cuda")]
    expected = moved(tensors, "cpu")
    reference_adam_step([expected], STEPS[0])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        tensors.grad.mul_(1.0)
        adam_step([tensors], STEPS[0])
        assert not stream.query()
    torch.cuda.synchronize()
    assert_same([tensors], [expected])
