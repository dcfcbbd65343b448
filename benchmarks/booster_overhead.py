"""What the Booster costs over hand-written DistributedDataParallel.

Both train the same convolutional network on scikit-learn's digits in the same processes, in turns of a few steps whose
order alternates, so that a slow moment of the machine meets both. Each pair of turns gives one ratio.

    torchrun --standalone --nproc_per_node=2 benchmarks/booster_overhead.py
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import colossal
from colossal.accelerator import get_accelerator
from colossal.booster import Booster
from colossal.booster.plugin import TorchDDPPlugin
from colossal.cluster import DistCoordinator


def build_model() -> nn.Module:
    """A network of 0.6 million parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4096, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def digits(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of images, (batch, 1, 8, 8), and labels, (batch,)."""
    images, labels = load_digits(return_X_y=True)
    device = get_accelerator().get_current_device()
    inputs = torch.tensor(images[:batch], dtype=torch.float32, device=device).view(-1, 1, 8, 8) / 16
    return inputs, torch.tensor(labels[:batch], device=device)


def by_hand(batch: int, max_norm: float) -> Callable[[], torch.Tensor]:
    """Return a training step without the library."""
    model = DistributedDataParallel(build_model().to(get_accelerator().get_current_device()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    images, labels = digits(batch)

    def step() -> torch.Tensor:
        loss = criterion(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def by_booster(batch: int, max_norm: float) -> Callable[[], torch.Tensor]:
    """Return the same training step through the Booster."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    booster = Booster(plugin=TorchDDPPlugin())
    boosted, optim, criterion, _, _ = booster.boost(model, optimizer, nn.CrossEntropyLoss())
    assert optim is not None
    assert criterion is not None
    images, labels = digits(batch)

    def step() -> torch.Tensor:
        loss = criterion(boosted(images), labels)
        booster.backward(loss, optim)
        optim.clip_grad_by_norm(max_norm)
        optim.step()
        optim.zero_grad()
        return loss.detach()

    return step


def seconds_of(step: Callable[[], torch.Tensor], steps: int) -> tuple[float, torch.Tensor]:
    """Return the time of some steps, and the last loss."""
    accelerator, coordinator = get_accelerator(), DistCoordinator()
    coordinator.block_all()
    started = time.perf_counter()
    loss = torch.zeros(())
    for _ in range(steps):
        loss = step()
    accelerator.synchronize()
    return time.perf_counter() - started, loss


def main() -> None:
    """Print the medians and the ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=600)
    parser.add_argument("--steps", type=int, default=2, help="steps of one turn")
    parser.add_argument("--batch", type=int, default=64, help="samples of one rank")
    args = parser.parse_args()
    mesh = colossal.launch_from_torch(verbose=False)
    ways = {"by hand": by_hand(args.batch, 1.0), "Booster": by_booster(args.batch, 1.0)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, torch.Tensor] = {}
    for pair in range(-2, args.pairs):
        for name in sorted(ways, reverse=pair % 2 == 0):
            seconds, losses[name] = seconds_of(ways[name], args.steps)
            if pair >= 0:
                times[name].append(seconds / args.steps)
    assert torch.equal(losses["by hand"], losses["Booster"]), losses
    ratios = [ours / theirs for ours, theirs in zip(times["Booster"], times["by hand"], strict=True)]
    report = [f"{mesh.world_size} ranks, {mesh.accelerator.name}, {args.pairs} pairs of {args.steps} steps"]
    report += [f"{name:<8} median {1e3 * statistics.median(values):8.3f} ms a step" for name, values in times.items()]
    low, middle, high = statistics.quantiles(ratios, n=4)
    report.append(f"ratio    median {middle:.4f}   quartiles {low:.4f} to {high:.4f}   (bar: 1.02)")
    DistCoordinator().print_on_master("\n".join(report))


if __name__ == "__main__":
    main()
