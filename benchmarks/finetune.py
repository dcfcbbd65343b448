"""What the training step of the examples costs over one by hand, under each plugin, and over that of Accelerate.

All train the same Llama on the same batches, in float32 with AdamW and clipped gradients, in the same processes and in
turns. By hand it is DistributedDataParallel in a loop that reads the loss of its own rank. The step of the examples
weighs labels over all ranks, so that ranks with fewer labels count less, reads the mean loss of all of them, and counts
tokens: "all ranks" is that training by hand. With hybrid tp2 and pp2 both ranks compute the same replica, so each has
the samples of both.

    torchrun --standalone --nproc_per_node=2 benchmarks/finetune.py [--ways ddp Accelerate]
"""

import importlib.util
import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pairs import Step, arguments, take_turns
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import colossal
from colossal.accelerator import get_accelerator, get_current_device
from colossal.cluster import DistCoordinator
from colossal.lazy import LazyInitContext
from colossal.nn.lr_scheduler import CosineAnnealingWarmupLR

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.common.options import make_parser
from examples.common.training import Batch, Training, make_booster
from examples.pretrain.models import make_model

VOCABULARY, LENGTH, LR, MAX_NORM = 1024, 128, 1e-3, 1.0
RTOL = 1e-4  # of the losses of the first turns; the ways round differently, and so drift apart later
IGNORED = -100  # label of what is not predicted
HAND, ALL_RANKS, ACCELERATE = "by hand", "all ranks", "Accelerate"
WAYS = {
    "ddp": "--plugin ddp",
    "zero1": "--plugin zero1",
    "zero2": "--plugin zero2",
    "fsdp": "--plugin fsdp",
    "gemini": "--plugin gemini",
    "hybrid tp2": "--plugin hybrid --tp 2",
    "hybrid pp2": "--plugin hybrid --pp 2",
}


def build_model() -> Any:
    """A Llama of 5 million parameters, the same in all ways."""
    torch.manual_seed(0)
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return make_model("llama", "small", 0.0, max_position_embeddings=LENGTH, **tokens)


def batches(samples: int, rank: int, num_replicas: int) -> Iterator[Batch]:
    """Four batches, again and again: the samples of one of the replicas."""
    generator = torch.Generator().manual_seed(0)
    for ids in itertools.cycle(torch.randint(VOCABULARY, (4, samples, LENGTH), generator=generator).unbind()):
        own = ids.chunk(num_replicas)[rank]
        yield {"input_ids": own, "attention_mask": torch.ones_like(own), "labels": own}


def by_hand(samples: int, total_steps: int, counts_all: bool = False) -> Step:
    """Return a training step without the library, whose loss is that of this rank, or of the labels of all ranks."""
    device = get_current_device()
    model = DistributedDataParallel(build_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = CosineAnnealingWarmupLR(optimizer, total_steps)
    data = batches(samples, dist.get_rank(), dist.get_world_size())

    def step() -> torch.Tensor:
        batch = {name: tensor.to(device) for name, tensor in next(data).items()}
        loss = model(**batch).loss
        if counts_all:
            labels = (batch["labels"][:, 1:] != IGNORED).sum()
            dist.all_reduce(total := labels.clone())
            loss = loss * labels * dist.get_world_size() / total
        loss.backward()
        if counts_all:
            dist.all_reduce(loss := loss.detach() / dist.get_world_size())
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return torch.tensor(loss.item())

    return step


def by_accelerate(samples: int, total_steps: int) -> Step:
    """Return the same training step through Accelerate."""
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=not torch.cuda.is_available())
    model: Any = build_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR))
    scheduler = CosineAnnealingWarmupLR(optimizer.optimizer, total_steps)
    data = batches(samples, dist.get_rank(), dist.get_world_size())

    def step() -> torch.Tensor:
        batch = {name: tensor.to(accelerator.device) for name, tensor in next(data).items()}
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return torch.tensor(loss.item())

    return step


def by_examples(way: str, samples: int, total_steps: int) -> Step:
    """Return the step of the examples, under a plugin."""
    loop = f"--precision fp32 --steps {total_steps} --warmup 0 --max-norm {MAX_NORM} --num-microbatches 4"
    options = make_parser("").parse_args([*WAYS[way].split(), *loop.split()])
    booster = make_booster(options)
    with LazyInitContext():
        model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    training = Training(options, booster, model, optimizer, (None, None), flops_per_unit=0.0)
    data = batches(samples, *booster.plugin.data_parallel_rank_and_size())
    return lambda: torch.tensor(training.step(next(data))["loss"])


def compare(turn: int, losses: Mapping[str, torch.Tensor]) -> None:
    """Compare the mean losses of all ranks after each of the first turns.

    Args:
        turn: Which turn; before 0 nothing is measured yet.
        losses: The last loss of each way, of this rank or of all.

    Raises:
        AssertionError: They are not equal.
    """
    if turn < 0:
        means = torch.stack(list(losses.values())).to(get_current_device())
        dist.all_reduce(means)
        means = dict(zip(losses, means / dist.get_world_size(), strict=True))
        for name, mean in means.items():
            torch.testing.assert_close(mean, means[HAND], rtol=RTOL, atol=0.0, msg=lambda text, name=name: name + text)


def report(times: Mapping[str, list[float]], samples: int) -> None:
    """Print the tokens per second of each way, and its time as a part of that by hand."""
    print(f"{'':<12}tokens per second   time / time by hand, median   quartiles")
    for name, turns in times.items():
        speed = samples * LENGTH / statistics.median(turns)
        low, middle, high = statistics.quantiles(
            [ours / theirs for ours, theirs in zip(turns, times[HAND], strict=True)], n=4
        )
        print(f"{name:<12}{speed:17,.0f}{middle:29.4f}   {low:.4f} to {high:.4f}")


def main() -> None:
    """Print tokens per second and ratios."""
    args = arguments(pairs=40, steps=2, batch=8, ways=[ALL_RANKS, ACCELERATE, *WAYS])
    colossal.launch_from_torch(verbose=False)
    samples, total = args.batch * dist.get_world_size(), (args.pairs + 2) * args.steps
    show = DistCoordinator().print_on_master
    ways = {HAND: by_hand(samples, total)}
    for way in args.ways:
        if way == ALL_RANKS:
            ways[way] = by_hand(samples, total, counts_all=True)
        elif way != ACCELERATE:
            ways[way] = by_examples(way, samples, total)
        elif importlib.util.find_spec("accelerate") is None:
            show("left out: Accelerate, as accelerate is not installed")
        else:
            ways[way] = by_accelerate(samples, total)
    show(f"{dist.get_world_size()} ranks, {get_accelerator().name}, {args.pairs} turns of {args.steps} steps")
    times = take_turns(ways, args.pairs, args.steps, compare)
    if dist.get_rank() == 0:
        report(times, samples)


if __name__ == "__main__":
    main()
