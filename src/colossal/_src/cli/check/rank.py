"""One rank of the self test: it goes through the steps, and says of each that it begins and how it ended."""

import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from colossal._src.cli.ranks import follow_parent, say

RTOL, ATOL = 1e-5, 1e-6
"""Half batches are summed in another order than the full batch: the last bits of float32 differ."""

_SEED = 3


def _launch(_folder: Path) -> None:
    from colossal._src.cluster import launch_from_torch

    launch_from_torch(seed=_SEED, verbose=False)


def _collective(_folder: Path) -> None:
    import torch

    from colossal._src import comm
    from colossal._src.cluster import current_mesh

    mesh = current_mesh()
    number = torch.tensor([mesh.global_rank + 1.0], device=mesh.accelerator.get_current_device())
    total = comm.reduce(number, "dp").item()
    _require(total == sum(range(mesh.world_size + 1)), f"the sum of the ranks' numbers is {total}")


def _step(_folder: Path) -> None:
    """Train a step on this rank's samples of a batch, and on the full batch in plain torch; compare the parameters."""
    import torch

    from colossal._src.booster import Booster
    from colossal._src.booster.plugin import TorchDDPPlugin
    from colossal._src.cluster import current_mesh

    mesh = current_mesh()
    device = mesh.accelerator.get_current_device()
    single, boosted = _model(), _model()
    torch.manual_seed(_SEED)
    inputs, targets = (torch.randn(4 * mesh.world_size, width, device="cpu").to(device) for width in (8, 2))
    own = slice(4 * mesh.global_rank, 4 * mesh.global_rank + 4)

    plain = torch.optim.Adam(single.to(device).parameters(), lr=0.1)
    torch.nn.functional.mse_loss(single(inputs), targets).backward()
    plain.step()

    booster = Booster(plugin=TorchDDPPlugin())
    adam = torch.optim.Adam(boosted.parameters(), lr=0.1)
    model, optimizer, criterion, _, _ = booster.boost(boosted, adam, torch.nn.MSELoss())
    assert criterion
    assert optimizer
    booster.backward(criterion(model(inputs[own]), targets[own]), optimizer)
    optimizer.step()
    for (name, expected), found in zip(single.named_parameters(), boosted.parameters(), strict=True):
        _require(torch.allclose(found, expected, RTOL, ATOL), f"the parameter {name} differs from a single process")


def _checkpoint(folder: Path) -> None:
    """Save a model after a step, load it into another one, and compare."""
    import torch

    from colossal._src.booster import Booster
    from colossal._src.booster.plugin import TorchDDPPlugin

    booster = Booster(plugin=TorchDDPPlugin())
    saved, *_ = booster.boost(_model(), None)
    booster.save_model(saved, folder / "model.pt")
    torch.manual_seed(_SEED + 1)
    other = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    loaded, *_ = booster.boost(other, None)
    booster.load_model(loaded, folder / "model.pt")
    for (name, expected), found in zip(saved.named_parameters(), loaded.parameters(), strict=True):
        _require(torch.equal(found, expected), f"the parameter {name} comes back changed")


STEPS: Mapping[str, Callable[[Path], None]] = {
    "launch": _launch,
    "collective": _collective,
    "training step": _step,
    "checkpoint": _checkpoint,
}
"""What the ranks do, in this order."""


def _model():  # noqa: ANN202 (torch is imported where it is used)
    import torch

    torch.manual_seed(_SEED)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ArithmeticError(otherwise)


def main() -> int:
    """Go through the steps up to the first that fails."""
    follow_parent()
    folder = Path(sys.argv[1])
    for name, step in STEPS.items():
        say(step=name, state="begun")
        started = time.perf_counter()
        try:
            step(folder)
        except Exception as error:  # noqa: BLE001 (the check reports whatever it was)
            traceback.print_exc()
            say(step=name, state="failed", error=f"{type(error).__name__}: {error}", at=time.time())
            return 1
        say(step=name, state="done", seconds=time.perf_counter() - started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
