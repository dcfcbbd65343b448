"""What a step of ZeRO-1, ZeRO-2 and ZeRO-3 costs on one host, and its memory, against peers.

A GPT-2 learns Python from a source file of the standard library, in float32 with AdamW, one thread a rank. Ours runs
`LowLevelZeroPlugin` with HybridAdam and with torch's fused AdamW, over gloo and over shared memory, which is what users
get on one host. Peers: for stage 1 torch's ZeroRedundancyOptimizer over DDP, as it comes and with views of buckets, and
DeepSpeed; for stage 2 DeepSpeed, and FSDP2 that keeps the parameters after the forward pass, as ZeRO-2 does, or not;
for stage 3, where ours is `GeminiPlugin` with the chunks that it finds and with chunks of a block, DeepSpeed and FSDP2
that does not. Beside those: DDP, and ranks that train each for itself, which no communication can be faster than.

Every contender is a world of its own, whose processes sleep while it is another's turn, so memory is the contender's
own. Turns alternate, in an order that rotates. All see the same batches, and must learn alike.

    python benchmarks/zero.py
    python benchmarks/zero.py --model big --only 'zero1-*' 'redundancy*'
    python benchmarks/zero.py --only 'zero2-gloo-*' deepspeed2 --python-of deepspeed=/path/to/python
"""

import argparse
import fnmatch
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from worlds import World

Turns = dict[str, list[dict[str, float]]]
Said = dict[str, list[dict[str, Any]]]
MODELS = {
    "small": {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 8192, "n_positions": 128, "sequences": 4},
    "big": {"n_embd": 768, "n_layer": 8, "n_head": 12, "vocab_size": 16384, "n_positions": 128, "sequences": 1},
}
BARS = {1: 0.95, 2: 0.80, 3: 0.90}
ADAM = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
WARM_UP, COMPARED, TOLERANCE = 2, -1, 1e-3


@dataclass(frozen=True)
class Training:
    """What a contender made of the model.

    Args:
        forward: Takes a batch, returns the loss.
        backward: Takes the loss.
        update: The optimizer's step.
        clear: Throws gradients away.
        optimizer: Whose groups and states are counted; None if they are not to be read from outside.
    """

    forward: Callable[[Any], Any]
    backward: Callable[[Any], object]
    update: Callable[[], object]
    clear: Callable[[], object]
    optimizer: Any


def usual(model: Any, optimizer: Any, backward: Callable[[Any], object] = lambda loss: loss.backward()) -> Training:
    """A training step as torch's users write it."""
    forward = lambda batch: model(input_ids=batch, labels=batch).loss  # noqa: E731 (as short as its partner)
    return Training(forward, backward, optimizer.step, optimizer.zero_grad, optimizer)


def our_zero(stage: int, backend: str, adam: str, model: Any) -> Training:
    """Ours."""
    import torch

    import colossal
    from colossal.booster import Booster
    from colossal.booster.plugin import LowLevelZeroPlugin
    from colossal.nn.optimizer import HybridAdam

    colossal.launch_from_torch(backend=backend, verbose=False)
    makers = {"hybrid": HybridAdam, "torch": partial(torch.optim.AdamW, fused=True)}
    booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, precision="fp32"))
    boosted, optimizer, *_ = booster.boost(model, makers[adam](model.parameters(), **ADAM))
    assert optimizer is not None
    return usual(boosted, optimizer, lambda loss: booster.backward(loss, optimizer))


def our_gemini(backend: str, by_block: bool, model: Any) -> Training:
    """Ours of stage 3."""
    import colossal
    from colossal.booster import Booster
    from colossal.booster.plugin import GeminiPlugin
    from colossal.nn.optimizer import HybridAdam

    colossal.launch_from_torch(backend=backend, verbose=False)
    block = sum(parameter.numel() for parameter in model.transformer.h[0].parameters())
    sizes = {int(os.environ["WORLD_SIZE"]): {"chunk_size": block}} if by_block else None
    booster = Booster(plugin=GeminiPlugin(precision="fp32", chunk_config_dict=sizes, max_prefetch=int(by_block)))
    boosted, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), **ADAM))
    assert optimizer is not None
    step = usual(boosted, optimizer, lambda loss: booster.backward(loss, optimizer))
    return replace(step, optimizer=None)


def ddp(model: Any) -> Training:
    """Everything on every rank."""
    import torch
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    replicas = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return usual(replicas, torch.optim.AdamW(replicas.parameters(), fused=True, **ADAM))


def alone(model: Any) -> Training:
    """Each rank for itself: it learns from its own data only."""
    import torch
    from torch import distributed as dist

    dist.init_process_group("gloo")
    return usual(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAM))


def redundancy(views: bool, model: Any) -> Training:
    """DDP, whose optimizer is shared parameter by parameter."""
    import torch
    from torch import distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    replicas = DistributedDataParallel(model, gradient_as_bucket_view=views)
    kind, own = torch.optim.AdamW, {"parameters_as_bucket_view": views, "fused": True, **ADAM}
    optimizer = ZeroRedundancyOptimizer(replicas.parameters(), kind, **own)
    return usual(replicas, optimizer)


def fsdp2(reshard: bool, model: Any) -> Training:
    """Parameters sharded for each dimension; whole from a forward pass until the step, or only while in use."""
    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in [*model.transformer.h, model]:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return usual(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAM))


def deepspeed(stage: int, model: Any) -> Training:
    """DeepSpeed with its own fused Adam, and its own choice of how to communicate."""
    import importlib

    library = importlib.import_module("deepspeed")
    library.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=config)
    return Training(
        lambda batch: engine(input_ids=batch, labels=batch).loss, engine.backward, engine.step, lambda: None, None
    )


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Args:
        stage: Of ZeRO, by what it shards; the bar it belongs to.
        prepare: Joins the world, and makes a training of a model.
        package: What must be installed.
        is_ours: Whether the bar is about it, or it sets the bar.
        is_lazy: Whether the model is built without memory.
        is_alike: Whether it learns what the others learn.
    """

    stage: int
    prepare: Callable[[Any], Training]
    package: str = "torch"
    is_ours: bool = False
    is_lazy: bool = False
    is_alike: bool = True


CONTENDERS = {
    f"zero{stage}-{backend}-{adam}": Contender(stage, partial(our_zero, stage, backend, adam), "colossal", is_ours=True)
    for stage, backend, adam in itertools.product((1, 2), ("gloo", "shm"), ("hybrid", "torch"))
} | {
    "redundancy": Contender(1, partial(redundancy, False)),
    "redundancy-views": Contender(1, partial(redundancy, True)),
    "deepspeed1": Contender(1, partial(deepspeed, 1), "deepspeed"),
    "fsdp2": Contender(2, partial(fsdp2, False)),
    "fsdp2-reshard": Contender(2, partial(fsdp2, True)),
    "deepspeed2": Contender(2, partial(deepspeed, 2), "deepspeed"),
    "fsdp2-sharded": Contender(3, partial(fsdp2, True)),
    "deepspeed3": Contender(3, partial(deepspeed, 3), "deepspeed"),
    "ddp": Contender(3, ddp),
    "alone": Contender(3, alone, is_alike=False),
}
CONTENDERS |= {
    f"zero3-{backend}-{'blocks' if by_block else 'found'}": Contender(
        3, partial(our_gemini, backend, by_block), "colossal", is_ours=True, is_lazy=True
    )
    for backend, by_block in itertools.product(("gloo", "shm"), (False, True))
}


def batches(shape: dict[str, int]) -> list[Any]:
    """Pairs of bytes as tokens, each batch (sequences, length); other ones on each rank."""
    import torch

    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
    pairs = torch.frombuffer(bytearray(source[: len(source) // 2 * 2]), dtype=torch.uint8).view(-1, 2).long()
    stream = (256 * pairs[:, 0] + pairs[:, 1]) % shape["vocab_size"]
    rank, own = int(os.environ["RANK"]), (int(os.environ["WORLD_SIZE"]), shape["sequences"], shape["n_positions"])
    return list(stream[: len(stream) // math.prod(own) * math.prod(own)].view(-1, *own)[:, rank])


def build_model(shape: dict[str, int]) -> Any:
    """The same GPT-2 in every process."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {name: size for name, size in shape.items() if name != "sequences"}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def held_bytes(model: Any, optimizer: Any) -> dict[str, int]:
    """Bytes of what tensors of a kind lie in, on this rank, between a step and the next."""
    import torch

    inner = getattr(optimizer, "optim", optimizer)
    states = [value for state in inner.state.values() for value in state.values() if hasattr(value, "untyped_storage")]
    held = [parameter for group in inner.param_groups for parameter in group["params"]]
    parameters = [*model.parameters(), *held]
    # not by `.grad`, which a parameter refuses while the boosted optimizer holds its gradient
    grad: Any = torch.Tensor.grad
    gradients = [found for found in map(grad.__get__, parameters) if found is not None]
    return {"parameters": _storage(parameters), "gradients": _storage(gradients), "states": _storage(states)}


def _storage(tensors: Iterable[Any]) -> int:
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in local]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def serve(name: str, shape: dict[str, int]) -> None:
    """Be a rank of a contender: answer each line of the standard input by one of JSON."""
    import torch
    from torch import distributed as dist

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints
    torch.set_num_threads(1)
    with ExitStack() as stack:
        if CONTENDERS[name].is_lazy:
            from colossal.lazy import LazyInitContext

            stack.enter_context(LazyInitContext())
        model = build_model(shape)
    training = CONTENDERS[name].prepare(model)
    data = itertools.cycle(batches(shape))

    def run(steps: int, look: Callable[[], Any] = lambda: None) -> dict[str, Any]:
        dist.barrier()
        started, used, loss, seen = time.perf_counter(), time.process_time(), 0.0, None
        for _ in range(steps):
            found = training.forward(next(data))
            training.backward(found)
            training.update()
            seen = look()
            training.clear()
            loss = float(found.detach())
        spent = {"ms": time.perf_counter() - started, "cpu_ms": time.process_time() - used}
        return {key: 1e3 * seconds / steps for key, seconds in spent.items()} | {"loss": loss, "seen": seen}

    def memory() -> dict[str, Any]:
        look = dict if training.optimizer is None else partial(held_bytes, model, training.optimizer)
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return {"peak": 1024 * int(peak.split()[1]), "held": run(1, look)["seen"]}

    print(json.dumps({"ready": name}), file=answers)
    for line in sys.stdin:
        verb, *number = line.split()
        print(json.dumps(run(int(number[0])) if verb == "go" else memory()), file=answers)
    dist.destroy_process_group()


def start_world(name: str, python: str, options: argparse.Namespace) -> World:
    """The processes of one contender, run by an interpreter."""
    env = {"DS_ACCELERATOR": "cpu", "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}
    return World(
        name, [python, __file__, "--model", options.model, "--serve", name], options.ranks, options.folder, env
    )


def choose(options: argparse.Namespace) -> dict[str, str]:
    """Find the contenders that can run, and the interpreter of each."""
    pythons = dict(item.split("=", 1) for item in options.python_of)
    chosen = {}
    for name, contender in CONTENDERS.items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in options.only):
            continue
        python = pythons.get(name, pythons.get(contender.package, sys.executable))
        probe = f"import importlib.util as u, sys; sys.exit(u.find_spec({contender.package!r}) is None)"
        if subprocess.run([python, "-c", probe], check=False).returncode:
            print(f"left out: {name}, as {contender.package} is not installed")
        else:
            chosen[name] = python
    return chosen


def race(pythons: dict[str, str], options: argparse.Namespace) -> tuple[Turns, Said]:
    """Let all take their turns, and then say what memory they took."""
    times: Turns = {name: [] for name in pythons}
    with ExitStack() as stack:
        options.folder, worlds = stack.enter_context(tempfile.TemporaryDirectory()), []
        for name, python in pythons.items():
            worlds.append(start_world(name, python, options))
            stack.callback(worlds[-1].close)
            worlds[-1].answers()
        for turn in range(-WARM_UP, options.turns):
            first, losses = turn % len(worlds), {}
            for world in [*worlds[first:], *worlds[:first]]:
                said = world.ask(f"go {options.steps}\n")
                if CONTENDERS[world.name].is_alike:
                    losses[world.name] = statistics.mean(each["loss"] for each in said)
                spent = {"ms": max(each["ms"] for each in said), "cpu_ms": sum(each["cpu_ms"] for each in said)}
                times[world.name] += [spent] if turn >= 0 else []
            apart = (max(losses.values()) - min(losses.values())) / min(losses.values())
            assert turn > COMPARED or apart <= TOLERANCE, losses  # they round differently, and drift apart later
        return times, {world.name: world.ask("memory\n") for world in worlds}


def report(times: Turns, said: Said) -> None:
    """Print a row for each contender, then one for each pair of ours and a peer."""
    peaks = {name: max(each["peak"] for each in ranks) / 1e6 for name, ranks in said.items()}
    print(f"{'':18} ms a step (quartiles)      CPU-ms of all   peak MB   parameters + gradients + states of rank 0, MB")
    for name, turns in times.items():
        low, middle, high = statistics.quantiles([turn["ms"] for turn in turns], n=4)
        held = " + ".join(f"{size / 1e6:.0f}" for size in said[name][0]["held"].values())
        print(
            f"{name:18} {middle:8.1f} ({low:.1f} to {high:.1f}) {_median(turns, 'cpu_ms'):14.1f} {peaks[name]:10.0f}"
            f"   {held or '-'}"
        )
    least = min(
        (peaks[name] for name in peaks if not CONTENDERS[name].is_ours and CONTENDERS[name].is_alike),
        default=float("nan"),
    )
    ours = [name for name in times if CONTENDERS[name].is_ours]
    print(f"\n{'ours / theirs':38} of medians   paired quartiles   CPU-ms")
    for our, their in itertools.product(ours, [name for name in times if name not in ours]):
        ratios = [one["ms"] / other["ms"] for one, other in zip(times[our], times[their], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        middle, cpu = (_median(times[our], key) / _median(times[their], key) for key in ("ms", "cpu_ms"))
        print(
            f"{our + ' / ' + their:38} {middle:8.3f}     {low:.3f} to {high:.3f} {cpu:12.3f}"
            f"   (bar: {BARS[CONTENDERS[our].stage]:.2f})"
        )
    for our in ours:
        print(f"{our + ' / least peak of the peers':38} {peaks[our] / least:8.3f}   (bar: 1.00)")
    print(json.dumps({name: {"ms": _median(turns, "ms"), "peak": peaks[name]} for name, turns in times.items()}))


def _median(turns: list[dict[str, float]], key: str) -> float:
    return statistics.median(turn[key] for turn in turns)


def check_memory(contenders: int, options: argparse.Namespace) -> None:
    """Refuse more contenders than fit into memory next to each other."""
    shape = MODELS[options.model]
    rows = 12 * shape["n_layer"] * shape["n_embd"] + shape["vocab_size"] + shape["n_positions"]
    needed = contenders * options.ranks * (4e8 + 18 * rows * shape["n_embd"])
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    if needed > 1024 * int(line.split()[1]):
        sys.exit(f"{contenders} contenders take about {needed / 1e9:.0f} GB together: name fewer with --only")


def main() -> None:
    """Print times, memory and ratios; or, started by itself, be a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3, help="steps of one turn")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=["*"], help=f"names, or patterns, of {', '.join(CONTENDERS)}")
    parser.add_argument("--python-of", nargs="+", default=[], metavar="PACKAGE=INTERPRETER")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, MODELS[options.model])
        return
    chosen = choose(options)
    for stage in BARS:
        of_stage = {name: python for name, python in chosen.items() if CONTENDERS[name].stage == stage}
        if of_stage:
            turns = f"{options.turns} turns of {options.steps} steps"
            print(f"\nZeRO-{stage}, {options.model} GPT-2, {options.ranks} ranks, {turns}", flush=True)
            check_memory(len(of_stage), options)
            report(*race(of_stage, options))


if __name__ == "__main__":
    main()
