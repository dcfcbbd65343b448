"""What data parallelism costs on one host: steps of DistributedDataParallel through shared memory and gloo.

A GPT-2 learns Python from the standard library's sources, with the fused AdamW. Turns alternate in the same processes:
one process alone (rank 1 rests); all ranks at once without communication, which shows what they cost each other in
memory bandwidth alone; DDP whose hook sends nothing, which adds DDP's own work, and is the floor for any backend; DDP
over shared memory and over gloo, each with gradients of their own, as is DDP's default, and with views of the buckets.

    torchrun --standalone --nproc_per_node=2 benchmarks/cpu_data_parallel.py
    torchrun --standalone --nproc_per_node=2 benchmarks/cpu_data_parallel.py --model big --turns 8
"""

import argparse
import json
import os
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import colossal
from colossal.cluster import DistCoordinator

Step = Callable[[], float]
MODELS = {
    "small": {"hidden": 256, "layers": 4, "vocabulary": 8192, "sequences": 4, "length": 128, "bar": 1.07},
    "big": {"hidden": 768, "layers": 8, "vocabulary": 16384, "sequences": 1, "length": 128, "bar": 1.10},
}


SILENT = "DDP, nothing sent, views"


def keep_to_itself(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of DDP that sends nothing."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def tokens(vocabulary: int, sequences: int, length: int) -> torch.Tensor:
    """Pairs of bytes of the standard library as tokens, (sequences, length); other ones on each rank."""
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
    pairs = torch.frombuffer(bytearray(source[: len(source) // 2 * 2]), dtype=torch.uint8).view(-1, 2).long()
    stream = (256 * pairs[:, 0] + pairs[:, 1]) % vocabulary
    count = sequences * length
    return stream[dist.get_rank() * count :][:count].view(sequences, length)


def build(shape: dict[str, float], wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> Step:
    """Return a training step of a new model, which gives its loss."""
    torch.manual_seed(0)
    width, depth = int(shape["hidden"]), int(shape["layers"])
    config = GPT2Config(
        n_embd=width,
        n_layer=depth,
        n_head=width // 64,
        vocab_size=int(shape["vocabulary"]),
        n_positions=int(shape["length"]),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = wrap(GPT2LMHeadModel(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs = tokens(config.vocab_size, int(shape["sequences"]), int(shape["length"]))

    def step() -> float:
        loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def timed(step: Step, steps: int, *, everywhere: bool) -> tuple[float, float]:
    """Return milliseconds a step on the slowest rank, and the last loss."""
    dist.barrier()
    started, loss = time.perf_counter(), 0.0
    if everywhere or dist.get_rank() == 0:
        for _ in range(steps):
            loss = step()
    found = torch.tensor([1e3 * (time.perf_counter() - started) / steps])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item(), loss


def main() -> None:
    """Print medians and ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=3, help="steps of one turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    colossal.launch_from_torch(verbose=False)
    shape, printer = MODELS[options.model], DistCoordinator().print_on_master
    groups = {name: dist.new_group(backend=name) for name in ("shm", "gloo")}

    def parallel(backend: str, *, views: bool, is_silent: bool = False) -> Step:
        def wrap(model: torch.nn.Module) -> torch.nn.Module:
            group = groups[backend]
            wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=views)
            if is_silent:
                wrapped.register_comm_hook(None, keep_to_itself)
            return wrapped

        return build(shape, wrap)

    alone = build(shape, lambda model: model)
    ways = {"one process": alone, "all alone": alone, SILENT: parallel("shm", views=True, is_silent=True)}
    ways |= {f"DDP, {name}": parallel(name, views=False) for name in groups}
    ways |= {f"DDP, {name}, views": parallel(name, views=True) for name in groups}
    times: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, float] = {}
    for turn in range(-1, options.turns):
        for name in sorted(times, reverse=turn % 2 == 0):
            spent, losses[name] = timed(ways[name], options.steps, everywhere=name != "one process")
            if turn >= 0:
                times[name].append(spent)
        learned = [loss for name, loss in losses.items() if name.startswith("DDP, ") and name != SILENT]
        assert max(learned) - min(learned) < 1e-3 * min(learned), losses
    single = times["one process"]
    printer(f"{options.model} GPT-2, {dist.get_world_size()} ranks on {os.cpu_count()} cores, {options.turns} turns")
    for name, values in times.items():
        ratios = [value / alone for value, alone in zip(values, single, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        bar = f"   (bar: {shape['bar']})" if name.startswith("DDP, shm") else ""
        printer(
            f"{name:<24} median {statistics.median(values):8.1f} ms a step   ratio {middle:.3f} "
            f"({low:.3f} to {high:.3f}){bar}"
        )
    printer(json.dumps({name: statistics.median(values) for name, values in times.items()}))


if __name__ == "__main__":
    main()
