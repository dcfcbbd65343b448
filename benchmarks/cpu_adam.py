"""A step of Adam on the CPU, against the best of torch and DeepSpeed and against the bandwidth of the memory.

"plain" is float32 throughout: ours with its states in huge pages, or parameters and gradients as well, as where they
lie in buckets of our own; torch's fused AdamW and DeepSpeed's as a user runs them; and "stream", a loop with the same
accesses (reads 16 bytes and writes 12 for each element) and next to no arithmetic. "mixed" is the whole step of mixed
precision: gradients in bfloat16, unscaled and clipped, float32 masters, and weights in bfloat16; ours in one pass, the
others as sequences of what torch has. In every round each contender takes one step, in an order that rotates; each
ratio is one of medians.

    python benchmarks/cpu_adam.py --numel 100000000 --rounds 11 --threads 1 2
"""

import argparse
import ctypes
import importlib.util
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from colossal.kernel import AdamStep, AdamTensors, adam_step, huge_zeros

Step = Callable[[], object]

LR, SCALE = 1e-3, 1 / 1024 * 0.7  # of a loss scale and of a clipped norm
STREAM = """
#include <cstdint>
extern "C" void stream(float* p, const float* g, float* m, float* v, int64_t n) {
#pragma omp parallel for simd
  for (int64_t i = 0; i < n; ++i) {
    const float a = m[i] * 0.5f + g[i], b = v[i] * 0.5f + g[i];
    m[i] = a;
    v[i] = b;
    p[i] -= a + b;
  }
}
"""


def stream_loop() -> Callable[..., None]:
    """The loop that shows what the memory gives."""
    flags = ["-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp", "-shared", "-fPIC"]
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "stream.cpp", Path(folder) / "stream.so"
        source.write_text(STREAM, encoding="utf-8")
        subprocess.run([os.environ.get("CXX", "c++"), *flags, "-o", library, source], check=True)
        function = ctypes.CDLL(str(library)).stream
    function.argtypes = (*(ctypes.c_void_p,) * 4, ctypes.c_int64)
    return function


def fresh(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values as small as weights, in memory that torch allocates."""
    return torch.empty(numel, dtype=dtype).uniform_(-0.05, 0.05)


def in_arena(numel: int, count: int) -> list[torch.Tensor]:
    """Float32 tensors in huge pages, the first of which holds values."""
    tensors = huge_zeros([(numel,)] * count)
    tensors[0].uniform_(-0.05, 0.05)
    return tensors


def torch_adamw(param: torch.Tensor, grad: torch.Tensor) -> torch.optim.AdamW:
    """The fused optimizer of torch, with its own states."""
    param.grad = grad
    return torch.optim.AdamW([param], lr=LR, fused=True)


def stepper(param: torch.Tensor, grad: torch.Tensor, *rest: torch.Tensor, scale: float = 1.0) -> Step:
    """Our step over one parameter: its means, and perhaps a copy, are the rest."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        numbers = AdamStep(count, lr=LR, weight_decay=0.01, grad_scale=scale)
        adam_step([AdamTensors(param, grad, *rest)], numbers)

    return step


def streamer(param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> Step:
    """The loop over tensors like those of one parameter."""
    loop = stream_loop()
    tensors = (param, grad, exp_avg, exp_avg_sq)
    return lambda: loop(*(tensor.data_ptr() for tensor in tensors), param.numel())


def plain(numel: int) -> dict[str, Step]:
    """The contenders in float32."""
    ways = {
        "ours": stepper(fresh(numel), fresh(numel), *huge_zeros([(numel,)] * 2)),
        "ours, all in huge pages": stepper(*in_arena(numel, 4)),
        "stream, all in huge pages": streamer(*in_arena(numel, 4)),
        "torch fused": torch_adamw(torch.nn.Parameter(fresh(numel)), fresh(numel)).step,
    }
    if importlib.util.find_spec("deepspeed"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

        theirs = torch.nn.Parameter(fresh(numel))
        theirs.grad = fresh(numel)
        ways["DeepSpeed"] = DeepSpeedCPUAdam([theirs], lr=LR, weight_decay=0.01).step
    else:
        print("DeepSpeed is not installed here, so it does not compete.")
    return ways


def mixed(numel: int) -> dict[str, Step]:
    """The contenders in mixed precision; each has masters and weights of its own."""
    grad = fresh(numel, torch.bfloat16)
    param, *means = in_arena(numel, 3)
    weight = torch.empty(numel, dtype=torch.bfloat16)
    master = torch.nn.Parameter(fresh(numel))
    optimizer = torch_adamw(master, torch.empty(numel))
    working, wide = torch.empty(numel, dtype=torch.bfloat16), master.grad
    assert wide is not None
    inverse = torch.tensor(1 / SCALE)
    factor = torch.tensor([SCALE])  # of one dimension: the product is taken in float32, not in that of the gradients

    @torch.no_grad()
    def cast_and_scale() -> None:
        wide.copy_(grad)
        wide.mul_(SCALE)
        optimizer.step()
        working.copy_(master)

    @torch.no_grad()
    def scale_while_casting() -> None:
        torch.mul(grad, factor, out=wide)
        optimizer.step()
        working.copy_(master)

    @torch.no_grad()
    def scale_in_the_step() -> None:
        wide.copy_(grad)
        optimizer.grad_scale = inverse  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale  # type: ignore[attr-defined]
        working.copy_(master)

    return {
        "ours": stepper(param, grad, *means, weight, scale=SCALE),
        "cast, scale, fused, copy": cast_and_scale,
        "scale while casting, fused, copy": scale_while_casting,
        "cast, fused with grad_scale, copy": scale_in_the_step,
    }


def check() -> None:
    """Compare one step of ours with those of torch, in float32 and from half precision, over the same numbers."""
    numel = 10_007
    param, grad = fresh(numel), fresh(numel, torch.bfloat16)
    for scale, gradient in ((1.0, grad.float()), (SCALE, grad)):
        other, ours, weight = torch.nn.Parameter(param.clone()), param.clone(), torch.empty(numel, dtype=torch.bfloat16)
        torch_adamw(other, gradient.float() * scale).step()
        stepper(ours, gradient, *torch.zeros(2, numel), weight, scale=scale)()
        torch.testing.assert_close(ours, other.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(weight, ours.bfloat16())


def race(ways: dict[str, Step], rounds: int, numel: int) -> dict[str, float]:
    """Print and return the median of each contender in ns for an element."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(-2, rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started = time.perf_counter()
            ways[name]()
            if number >= 0:
                times[name].append((time.perf_counter() - started) / numel * 1e9)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        print(f"  {name:<34} median {medians[name]:.3f} ns/element   {min(values):.3f} to {max(values):.3f}")
    return medians


def main() -> None:
    """Run both races for each number of threads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    check()
    for name, prepare in (("plain", plain), ("mixed", mixed)):
        ways = prepare(options.numel)
        for threads in options.threads:
            torch.set_num_threads(threads)  # OpenMP's too, which the stream runs on
            print(f"{name}, {options.numel} elements, {threads} threads, load {os.getloadavg()[0]:.1f}")
            medians = race(ways, options.rounds, options.numel)
            own = {each: medians.pop(each) for each in list(medians) if each.startswith("ours")}
            stream = medians.pop("stream, all in huge pages", None)
            best = min(medians, key=lambda each: medians[each])
            for each, median in own.items():
                bar = 0.90 if name == "plain" else 0.60
                print(f"  {each}, over the best of the others, {best}: {median / medians[best]:.3f}   (bar: {bar:.2f})")
            if stream is not None:
                reached = stream / own["ours, all in huge pages"]
                print(f"  bandwidth of the stream that ours reaches: {reached:.3f}   (bar: 0.85)")


if __name__ == "__main__":
    main()
