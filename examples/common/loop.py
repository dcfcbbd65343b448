"""The loop of all programs."""

import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from colossal.booster import Booster
from colossal.cluster import DistCoordinator
from colossal.lazy import LazyInitContext
from colossal.nn.lr_scheduler import CosineAnnealingWarmupLR
from examples.common.options import Options, make_plugin
from examples.common.text import Samples

Batch = dict[str, torch.Tensor]


def own_loss(outputs: Any, _batch: Batch) -> torch.Tensor:
    """Take the loss that the model computed."""
    return outputs.loss


def run(make_model: Callable[[], nn.Module], samples: Samples, options: Options) -> None:
    """Train a model, and say how it went.

    Args:
        make_model: Builds it; called within `LazyInitContext`, so that each rank allocates what it keeps.
        samples: What it is trained on, but for a tenth, which it is tested with.
        options: What the user said.
    """
    show = DistCoordinator().print_on_master
    plugin = make_plugin(options)
    is_ddp = options.plugin == "ddp"
    booster = Booster(
        plugin=plugin, mixed_precision=options.precision if is_ddp and options.precision != "fp32" else None
    )
    torch.manual_seed(options.seed)
    with LazyInitContext():
        model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    scheduler: Any = CosineAnnealingWarmupLR(
        optimizer, total_steps=options.steps, warmup_steps=max(1, options.steps // 10)
    )
    num_replicas = plugin.data_parallel_rank_and_size()[1]
    train_set, test_set = samples.split(0.1, options.seed)
    loader, tests = (
        plugin.prepare_dataloader(part, options.batch_size // num_replicas, shuffle=True, drop_last=True)
        for part in (train_set, test_set)
    )
    boosted: Any = booster.boost(model, optimizer, own_loss, loader, scheduler)
    model, optimizer, criterion, loader, scheduler = boosted
    metrics = []
    for step, batch in enumerate(islice(_repeat(loader), options.steps)):
        begin = time.perf_counter()
        loss = _forward(booster, model, criterion, batch, optimizer)
        if is_ddp and options.max_norm:
            optimizer.clip_grad_by_norm(options.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        speed = options.batch_size / (time.perf_counter() - begin)
        metrics.append({"step": step, "loss": _mean(loss), "samples_per_second": speed})
        if step % max(1, options.steps // 10) == 0 or step == options.steps - 1:
            show(f"step {step:5}  loss {metrics[-1]['loss']:.4f}  {speed:,.0f} samples/s")
    with torch.no_grad():
        losses = [_forward(booster, model, criterion, batch, None) for batch in islice(iter(tests), 8)]
    tested = _mean(torch.stack(losses).mean()) if losses else float("nan")
    show(f"loss of samples that it has not seen {tested:.4f}")
    if options.metrics is not None and dist.get_rank() == 0:
        options.metrics.write_text("".join(json.dumps(line) + "\n" for line in [*metrics, {"test_loss": tested}]))


def _forward(booster: Booster, model: Any, criterion: Any, batch: Batch, optimizer: Any) -> torch.Tensor:
    """Compute the loss of a batch, and its gradients if there is an optimizer."""
    return booster.execute_pipeline(iter([batch]), model, criterion, optimizer)["loss"]


def _repeat(loader: "DataLoader[Batch]") -> Iterator[Batch]:
    """Go through the data again and again, in a new order each time."""
    while True:
        yield from loader


def _mean(loss: torch.Tensor) -> float:
    """Average over replicas; ranks of the same replica have the same loss."""
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
