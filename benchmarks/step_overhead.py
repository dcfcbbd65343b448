"""What the Python code of a training step costs, beside the same step of another checkout.

Models have many parameters of few elements, so that the time of a step is that of the code between kernels; a larger
width shows what of it is left beside that of kernels. Each plugin
trains in two worlds of two ranks, one of each checkout, which take turns; and counts, which no other load of the
machine changes, are taken of one more step on rank 0: calls of Python functions, and reads of tensors by the host
(`item`, `tolist`, and what calls them), of which those of tensors on an accelerator wait for it. On a machine with
other work, the least times tell more than the medians.

    git worktree add /tmp/before main
    python benchmarks/step_overhead.py --beside /tmp/before
    python benchmarks/step_overhead.py --beside /tmp/before --only 'zero*' --parameters 400 --turns 0
    python benchmarks/step_overhead.py --beside /tmp/before --only ddp tp --width 512 --clock cpu_ms --steps 4
"""

import argparse
import fnmatch
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from worlds import World

ROOT = Path(__file__).resolve().parents[1]
WARM_UP, TOLERANCE = 4, 1e-3  # steps 1, 2, 4, 8, ... also compare hyperparameters between ranks
OF_LLAMA_LAYER, OF_LLAMA_ENDS, OF_LINEAR = 9, 3, 2
READS = ("item", "tolist", "__bool__", "__int__", "__float__")
BAR = 1.01


class Recipe(NamedTuple):
    """A plugin, its options, and what a step does besides."""

    plugin: str
    options: dict[str, Any] = {}  # noqa: RUF012 (nothing writes to it)
    max_norm: float = 0.0
    accumulate: int = 1
    precision: str | None = None

    @property
    def is_hybrid(self) -> bool:
        """Whether the model is one of transformers, whose layers or tensors are sharded."""
        return self.plugin == "HybridParallelPlugin"


def _variants() -> dict[str, Recipe]:
    """Each plugin as it is, with a limit of the norm, and with two passes in a step."""
    plain = {
        "ddp": Recipe("TorchDDPPlugin"),
        "naive": Recipe("TorchDDPPlugin", precision="fp16_naive"),
        "zero1": Recipe("LowLevelZeroPlugin", {"precision": "bf16"}),
        "zero2": Recipe("LowLevelZeroPlugin", {"precision": "bf16", "stage": 2}),
        "gemini": Recipe("GeminiPlugin", {"precision": "bf16"}),
        "fsdp": Recipe("TorchFSDPPlugin"),
        "tp": Recipe("HybridParallelPlugin", {"tp_size": 2, "pp_size": 1, "precision": "bf16"}),
        "pp": Recipe("HybridParallelPlugin", {"tp_size": 1, "pp_size": 2, "num_microbatches": 2, "precision": "bf16"}),
    }
    found = dict(plain)
    for name, recipe in plain.items():
        found[f"{name}-clip"] = recipe._replace(max_norm=1.0)
        found[f"{name}-accumulate"] = recipe._replace(accumulate=2)
    return found


RECIPES = _variants()


def build_model(recipe: Recipe, num_parameters: int, width: int) -> Any:
    """The same model in every process, of as many parameters or up to an eighth fewer."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if not recipe.is_hybrid:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(num_parameters // OF_LINEAR)))
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = (num_parameters - OF_LLAMA_ENDS) // OF_LLAMA_LAYER
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": width,
        "vocab_size": width,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers))


def build_step(name: str, num_parameters: int, width: int = 16) -> Callable[[], Any]:
    """Return a training step, which returns its loss."""
    import torch

    from colossal.booster import Booster, plugin

    recipe = RECIPES[name]
    model = build_model(recipe, num_parameters, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    booster = Booster(
        device="cpu",
        plugin=getattr(plugin, recipe.plugin)(**recipe.options),
        mixed_precision=recipe.precision,
        max_norm=recipe.max_norm,
    )
    boosted, optim, *_ = booster.boost(model, optimizer)
    assert optim is not None
    ids = torch.arange(4 * 8).view(4, 8) * 7 % width
    features = torch.linspace(-1, 1, 4 * width).view(4, width)

    def run_pass() -> Any:
        if recipe.is_hybrid:
            batch = {"input_ids": ids, "labels": ids}
            return booster.execute_pipeline(iter([batch]), boosted, lambda outputs, _batch: outputs.loss, optim)["loss"]
        loss = boosted(features).float().square().mean()
        booster.backward(loss, optim)
        return loss

    def step() -> torch.Tensor:
        loss = torch.zeros(())
        for number in range(recipe.accumulate):
            waits = number + 1 < recipe.accumulate and not recipe.is_hybrid
            with booster.no_sync(boosted) if waits else nullcontext():
                loss = run_pass()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    return step


def count_calls(step: Callable[[], Any]) -> int:
    """Count the Python functions that a step calls."""
    counts = {"call": 0}

    def note(_frame: Any, event: str, _argument: Any) -> None:
        if event in counts:
            counts[event] += 1

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return counts["call"]


def count_reads(step: Callable[[], Any]) -> int:
    """Count how often the host reads values of tensors in a step."""
    import torch

    num_reads = 0

    @contextmanager
    def counted(name: str) -> Iterator[None]:
        read = getattr(torch.Tensor, name)

        def note(*args: Any) -> Any:
            nonlocal num_reads
            num_reads += 1
            return read(*args)

        with mock.patch.object(torch.Tensor, name, note):
            yield

    with ExitStack() as stack:
        for name in READS:
            stack.enter_context(counted(name))
        step()
    return num_reads


def serve() -> None:
    """Be a rank: answer each line of the standard input by one of JSON."""
    import torch
    from torch import distributed as dist

    import colossal

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints
    torch.set_num_threads(1)
    # not shared memory, whose ranks look for each other in Python: the number of calls would depend on the machine
    colossal.launch_from_torch(backend="gloo", verbose=False)
    step: Callable[[], torch.Tensor] = lambda: torch.zeros(())  # noqa: E731 (until one is built)

    def run(steps: int) -> dict[str, Any]:
        dist.barrier()
        started, used, loss = time.perf_counter(), time.process_time(), torch.zeros(())
        for _ in range(steps):
            loss = step()
        spent = {"ms": time.perf_counter() - started, "cpu_ms": time.process_time() - used}
        return {key: 1e3 * seconds / steps for key, seconds in spent.items()} | {"loss": float(loss)}

    def count() -> dict[str, Any]:
        for _ in range(WARM_UP):
            step()
        return {"calls": count_calls(step), "reads": count_reads(step)}

    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        match line.split():
            case "build", name, number, width:
                step = build_step(name, int(number), int(width))
                print(json.dumps({"built": name}), file=answers)
            case "go", number:
                print(json.dumps(run(int(number))), file=answers)
            case _:
                print(json.dumps(count()), file=answers)
    dist.destroy_process_group()


def compare(name: str, worlds: Sequence[World], options: argparse.Namespace) -> str:
    """Let both checkouts take their turns, and return a row of the report."""
    times: dict[str, list[float]] = {world.name: [] for world in worlds}
    for world in worlds:
        world.ask(f"build {name} {options.parameters} {options.width}\n")
    counts = [world.ask("count\n")[0] for world in worlds]
    for turn in range(-1, options.turns):
        losses = []
        for world in worlds[:: 1 if turn % 2 else -1]:
            said = world.ask(f"go {options.steps}\n")
            losses.append(said[-1]["loss"])  # of the last stage
            if turn >= 0:
                times[world.name].append(max(each[options.clock] for each in said))
        assert abs(losses[0] - losses[1]) <= TOLERANCE * abs(losses[0]), losses
    calls, reads = ([each[key] for each in counts] for key in ("calls", "reads"))
    row = f"{name:18}{calls[0]:8}{calls[1]:8}{calls[1] / calls[0]:8.3f}{reads[0]:7}{reads[1]:6}"
    if options.turns > 1:
        before, now = times.values()
        low, middle, high = statistics.quantiles([new / old for old, new in zip(before, now, strict=True)], n=4)
        medians = f"{statistics.median(before):9.2f}{statistics.median(now):9.2f}"
        row += f"{medians}{middle:8.3f} ({low:.3f} to {high:.3f}){min(now) / min(before):8.3f}"
    return row


@contextmanager
def two_worlds(beside: str) -> Iterator[list[World]]:
    """Start the ranks of both checkouts."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        worlds = []
        for side, checkout in (("before", beside), ("now", ROOT)):
            env = {"PYTHONPATH": str(Path(checkout).resolve() / "src"), "TORCH_CPP_LOG_LEVEL": "ERROR"}
            worlds.append(World(side, [sys.executable, __file__, "--serve"], 2, folder, env))
            stack.callback(worlds[-1].close)
        for world in worlds:
            world.answers()
        yield worlds


def main() -> None:
    """Print a row for each plugin; or, started by itself, be a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", default=str(ROOT), metavar="CHECKOUT", help="what the steps are compared with")
    parser.add_argument("--only", nargs="+", default=["*"], help=f"names, or patterns, of {', '.join(RECIPES)}")
    parser.add_argument("--parameters", type=int, default=48)
    parser.add_argument("--width", type=int, default=16, help="features of a layer, and words of a vocabulary")
    parser.add_argument("--turns", type=int, default=20, help="0 only counts")
    parser.add_argument("--steps", type=int, default=20, help="steps of one turn")
    parser.add_argument("--clock", choices=("ms", "cpu_ms"), default="ms", help="of the wall, or of the processor")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    sizes = f"{options.parameters} parameters of width {options.width}, 2 ranks"
    print(f"{sizes}, {options.turns} turns of {options.steps} steps, beside {options.beside}   (bar: {BAR})")
    clock = f"{options.clock} a step"
    print(f"{'':18}{'Python calls':>16}{'ratio':>8}{'reads':>13}{clock:>18}   ratio (quartiles)    of least")
    with two_worlds(options.beside) as worlds:
        for name in RECIPES:
            if any(fnmatch.fnmatch(name, pattern) for pattern in options.only):
                print(compare(name, worlds, options), flush=True)


if __name__ == "__main__":
    main()
