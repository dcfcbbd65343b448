"""What the Booster costs over a hand-written `fully_shard`.

Both train the same residual network of eight blocks, each block a unit, on scikit-learn's digits.

    torchrun --standalone --nproc_per_node=2 benchmarks/fsdp_overhead.py
"""

import torch
from pairs import Step, arguments, digits, race
from torch import nn
from torch.distributed.fsdp import fully_shard

import colossal
from colossal.accelerator import get_accelerator
from colossal.booster import Booster
from colossal.booster.plugin import TorchFSDPPlugin
from colossal.cluster import current_mesh

WIDTH, BLOCKS = 256, 8


class Block(nn.Module):
    """A residual block of 0.5 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape in and out: (batch, WIDTH)."""
        return hidden + self.down(torch.relu(self.up(hidden)))


class Network(nn.Module):
    """A network of 4.2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """From images, (batch, 1, 8, 8), to logits, (batch, 10)."""
        hidden = self.embed(images.flatten(1))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def build_model() -> Network:
    """The same network each time."""
    torch.manual_seed(0)
    return Network()


def by_hand(batch: int, max_norm: float | None) -> Step:
    """Return a training step without the library."""
    model = build_model().to(get_accelerator().get_current_device())
    mesh = current_mesh().device_mesh["dp"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    criterion = nn.CrossEntropyLoss()
    images, labels = digits(batch)

    def step() -> torch.Tensor:
        loss = criterion(model(images), labels)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def by_booster(batch: int, max_norm: float | None) -> Step:
    """Return the same training step through the Booster."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    booster = Booster(plugin=TorchFSDPPlugin())
    boosted, optim, criterion, _, _ = booster.boost(model, optimizer, nn.CrossEntropyLoss())
    assert optim is not None
    assert criterion is not None
    images, labels = digits(batch)

    def step() -> torch.Tensor:
        loss = criterion(boosted(images), labels)
        booster.backward(loss, optim)
        if max_norm is not None:
            optim.clip_grad_by_norm(max_norm)
        optim.step()
        optim.zero_grad()
        return loss.detach()

    return step


def main() -> None:
    """Print the medians and the ratio, without clipping and with it: torch adds up the norms in another order."""
    args = arguments(pairs=300, steps=2, batch=64)
    colossal.launch_from_torch(verbose=False)
    for max_norm, what, rtol in ((None, "no clipping", 0.0), (1.0, "clipping by norm", 1e-4)):
        race(by_hand(args.batch, max_norm), by_booster(args.batch, max_norm), args.pairs, args.steps, what, rtol)


if __name__ == "__main__":
    main()
