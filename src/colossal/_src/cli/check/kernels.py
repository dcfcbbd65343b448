"""Which fast implementations are at hand, and what takes their place where they are not."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, final

from colossal._src.cli.check.report import Row, Section

TITLE = "kernels"


@final
@dataclass(frozen=True)
class Kernel:
    """A fast implementation."""

    name: str  # what it computes
    fallback: str  # what is used without it
    trial: Callable[[], str]  # runs it once on the device in use and says what ran; raises if it is not there

    def row(self) -> Row:
        """Try it."""
        try:
            found = self.trial()
        except Exception as error:  # noqa: BLE001 (whatever keeps it from running makes the fallback run)
            reason = (str(error) or type(error).__name__).splitlines()[0]
            found, advice = f"falls back: {self.fallback}", f"It works, only slower. The reason: {reason}"
            return Row(TITLE, self.name, "note", found, False, advice)
        return Row(TITLE, self.name, "ok", found, True)


def _adam(choice: Literal["fused", "foreach"]) -> str:
    import torch

    from colossal.accelerator import get_current_device

    parameter = torch.ones(8, device=get_current_device(), requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    torch.optim.Adam([parameter], fused=choice == "fused", foreach=choice == "foreach").step()
    return f"torch's, on {parameter.device.type}"


def _one_pass_adam() -> str:
    import torch

    from colossal._src._native import library
    from colossal._src.kernel import AdamStep, AdamTensors, adam_step
    from colossal._src.kernel.adam import reference_adam_step
    from colossal.accelerator import get_current_device

    device = get_current_device()
    library(f"{device.type}/adam")
    numbers = torch.linspace(-2, 2, 10_007, device=device)
    one, other = (
        AdamTensors(numbers.clone(), numbers.bfloat16(), *torch.zeros(2, numbers.numel(), device=device))
        for _ in range(2)
    )
    adam_step([one], AdamStep(step=1))
    reference_adam_step([other], AdamStep(step=1))
    if not torch.allclose(one.param, other.param, rtol=1e-5, atol=1e-6):
        raise ArithmeticError(f"a step differs from its reference on {device.type}")
    return f"built, on {device.type}"


def _float8() -> str:
    import torch

    from colossal._src.amp import has_float8
    from colossal.accelerator import get_current_device

    device = get_current_device()
    left, right = (torch.ones(16, 16, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    product = torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: SLF001 (it has no public name)
    if product.float().tolist() != [[16.0] * 16] * 16:
        raise ArithmeticError(f"the product of ones is wrong on {device.type}")
    if not has_float8(device):
        raise NotImplementedError("only GPUs of capability 8.9 and newer are faster at it")
    return f"torch's, on {device.type}"


def _stream_copy() -> str:
    import torch

    from colossal._src._native import library
    from colossal._src.kernel import stream_copy

    library("cpu/copy")
    source = torch.arange(100_003, device="cpu")
    target = torch.zeros_like(source)
    stream_copy(target.data_ptr(), source.data_ptr(), source.nbytes)
    if not torch.equal(source, target):
        raise ArithmeticError("a copy differs from its original")
    return "built, on cpu"


def _collectives() -> str:
    import torch
    from torch import distributed as dist

    from colossal._src.comm._shm import Kind, instruction_set, make_engine

    engine = make_engine(dist.HashStore(), rank=0, global_ranks=[0])
    numbers = torch.arange(100_003.0, device="cpu")
    total = numbers.clone()
    engine.run(Kind.ALL_REDUCE, total.dtype, total.numel(), (), (total.data_ptr(),), seconds=10.0)
    if not torch.equal(total, numbers):
        raise ArithmeticError("the sum over one rank differs from its numbers")
    return f"built, {instruction_set()}, for the ranks of one host"


def _xxhash() -> str:
    import xxhash

    if xxhash.xxh3_64_hexdigest(b"colossal") != xxhash.xxh3_64(b"colossal").hexdigest():
        raise ArithmeticError("two ways to compute one checksum differ")
    return f"xxHash {xxhash.XXHASH_VERSION}"


KERNELS = (
    Kernel("fused Adam", "one kernel for each operation of the update", lambda: _adam("fused")),
    Kernel("one-pass Adam", "torch's fused update, with passes before and after it", _one_pass_adam),
    Kernel("foreach Adam", "a loop over the parameters", lambda: _adam("foreach")),
    Kernel("float8 matrix product", "the product in a wider type, rounded through float8", _float8),
    Kernel("streaming copy", "an ordinary copy, for which asynchronous saves block longer", _stream_copy),
    Kernel("shared-memory collectives", "gloo, which takes several times as long", _collectives),
    Kernel("xxHash checksums", "none: the package is required", _xxhash),
)
"""What the library uses of torch, of its packages, and of its own."""


def look() -> Iterator[Row]:
    """Try every kernel of the table."""
    for kernel in KERNELS:
        yield kernel.row()


SECTION = Section(TITLE, look)
