"""A step of training a large layer on the CPU: HybridAdam by the Booster, beside fused AdamW of torch and DeepSpeed.

Each contender has a process of its own, as its user would start it: ours imports colossal, which asks torch for huge
pages before the first tensor, and the others do not. In every round each takes one step, in an order that rotates; the
ratios are those of medians, of the optimizer's step alone and of the whole step with forward and backward pass.

    python benchmarks/adam_step.py --width 10000 --rounds 21 --threads 1 2
"""

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

SAMPLES, LR, WEIGHT_DECAY = 8, 1e-3, 0.01
OURS, PEERS = "HybridAdam by the Booster", ("torch fused", "DeepSpeed")


class Times(NamedTuple):
    """Of one step, in ns for an element, and the loss before it."""

    step: float
    whole: float
    loss: float


def contend(name: str, width: int, threads: int) -> None:
    """Be a contender: take a step for each line of standard input, and print its times."""
    if name == OURS:
        import colossal  # noqa: F401 (before the first tensor, as at the head of a program)
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(width, width, bias=False)
    optimizer: Any = None
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward
    if name == OURS:
        from colossal.booster import Booster
        from colossal.nn.optimizer import HybridAdam

        optimizer = HybridAdam(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
        model, optimizer, *_ = Booster(device="cpu").boost(model, optimizer)
        backward = optimizer.backward
    elif name == "DeepSpeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    inputs = torch.linspace(-1, 1, SAMPLES * width).sin().view(SAMPLES, width)
    print("ready", flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        optimizer.zero_grad()
        loss = (model(inputs) - 1).square().mean()
        backward(loss)
        computed = time.perf_counter()
        optimizer.step()
        ended = time.perf_counter()
        nanoseconds = 1e9 / width**2
        print((ended - computed) * nanoseconds, (ended - begun) * nanoseconds, float(loss.detach()), flush=True)


class Contender:
    """A process that takes steps."""

    def __init__(self, name: str, width: int, threads: int) -> None:
        words = ["--contend", name, "--width", str(width), "--threads", str(threads)]
        environment = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"OMP_NUM_THREADS": str(threads)},
        )
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"A contender ended with {self._process.wait()}.")
        return line

    def step(self) -> Times:
        """Take one."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Times(*map(float, self._read().split()))

    def end(self) -> None:
        """Let the process end."""
        self._process.communicate()


def race(width: int, rounds: int, threads: int) -> None:
    """Print the medians and their ratios."""
    peers = [name for name in PEERS if name != "DeepSpeed" or importlib.util.find_spec("deepspeed")]
    contenders = {name: Contender(name, width, threads) for name in [OURS, *peers]}
    names, times = list(contenders), {name: list[Times]() for name in contenders}
    for number in range(-2, rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found = contenders[name].step()
            if number >= 0:
                times[name].append(found)
    for contender in contenders.values():
        contender.end()
    for name in peers:
        for ours, theirs in zip(times[OURS], times[name], strict=True):
            assert abs(ours.loss - theirs.loss) < 1e-3 * theirs.loss, (ours, theirs)
    print(f"{width**2} elements, {threads} threads, load {os.getloadavg()[0]:.1f}")
    for part in ("step", "whole"):
        medians = {name: statistics.median(getattr(each, part) for each in found) for name, found in times.items()}
        best = min(peers, key=lambda name: medians[name])
        figures = ", ".join(f"{name} {median:.3f} ns/element" for name, median in medians.items())
        what = "optimizer" if part == "step" else "forward, backward and optimizer"
        print(f"  {what}: {figures}; over {best}: {medians[OURS] / medians[best]:.3f}")


def main() -> None:
    """Run the race for each number of threads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--contend", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contend is not None:
        contend(options.contend, options.width, options.threads[0])
        return
    if not importlib.util.find_spec("deepspeed"):
        print("DeepSpeed is not installed here, so it does not compete.")
    for threads in options.threads:
        race(options.width, options.rounds, threads)


if __name__ == "__main__":
    main()
