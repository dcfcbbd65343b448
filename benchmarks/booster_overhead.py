"""What the Booster costs over hand-written DistributedDataParallel.

Both train the same convolutional network on scikit-learn's digits.

    torchrun --standalone --nproc_per_node=2 benchmarks/booster_overhead.py
"""

import torch
from pairs import Step, arguments, digits, race
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import colossal
from colossal.accelerator import get_accelerator
from colossal.booster import Booster
from colossal.booster.plugin import TorchDDPPlugin


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


def by_hand(batch: int, max_norm: float) -> Step:
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


def by_booster(batch: int, max_norm: float) -> Step:
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


def main() -> None:
    """Print the medians and the ratio."""
    args = arguments(pairs=600, steps=2, batch=64)
    colossal.launch_from_torch(verbose=False)
    race(by_hand(args.batch, 1.0), by_booster(args.batch, 1.0), args.pairs, args.steps)


if __name__ == "__main__":
    main()
