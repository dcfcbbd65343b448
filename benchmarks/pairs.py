"""Two or more ways of one training step, timed in pairs.

All run in the same processes, in turns of a few steps whose order alternates, so that a slow moment of the machine
meets all. Each pair of turns gives one ratio.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from sklearn.datasets import load_digits

from colossal.accelerator import get_accelerator
from colossal.cluster import DistCoordinator, current_mesh

Step = Callable[[], torch.Tensor]


def arguments(pairs: int, steps: int, batch: int, ways: Sequence[str] = ()) -> argparse.Namespace:
    """Read how long to run from the command line.

    Args:
        pairs: How many pairs of turns by default.
        steps: How many steps a turn has by default.
        batch: How many samples a rank has by default.
        ways: What can be compared; all of them by default. Fewer have their turns closer to each other.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=pairs)
    parser.add_argument("--steps", type=int, default=steps, help="steps of one turn")
    parser.add_argument("--batch", type=int, default=batch, help="samples of one rank")
    if ways:
        parser.add_argument("--ways", nargs="+", choices=ways, default=list(ways), help="what to compare")
    return parser.parse_args()


def digits(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of images, (batch, 1, 8, 8), and labels, (batch,)."""
    images, labels = load_digits(return_X_y=True)
    device = get_accelerator().get_current_device()
    inputs = torch.tensor(images[:batch], dtype=torch.float32, device=device).view(-1, 1, 8, 8) / 16
    return inputs, torch.tensor(labels[:batch], device=device)


def race(by_hand: Step, by_booster: Step, pairs: int, steps: int, what: str = "", rtol: float = 0.0) -> None:
    """Print the medians of both ways and of the ratio.

    Args:
        by_hand: Runs a step without the library, and returns its loss.
        by_booster: Runs the same step through the Booster.
        pairs: How many pairs of turns.
        steps: How many steps in a turn.
        what: Named in the report.
        rtol: How far the losses of the first turns may lie apart, where the ways round differently and so drift apart
            later; 0 compares all turns.

    Raises:
        AssertionError: The losses are not equal.
    """

    def compare(pair: int, losses: Mapping[str, torch.Tensor]) -> None:
        if pair < 0 or not rtol:
            torch.testing.assert_close(losses["Booster"], losses["by hand"], rtol=rtol, atol=0.0)

    times = take_turns({"by hand": by_hand, "Booster": by_booster}, pairs, steps, compare)
    ratios = [ours / theirs for ours, theirs in zip(times["Booster"], times["by hand"], strict=True)]
    mesh = current_mesh()
    report = [f"{mesh.world_size} ranks, {mesh.accelerator.name}, {pairs} pairs of {steps} steps{what and ', '}{what}"]
    report += [f"{name:<8} median {1e3 * statistics.median(values):8.3f} ms a step" for name, values in times.items()]
    low, middle, high = statistics.quantiles(ratios, n=4)
    report.append(f"ratio    median {middle:.4f}   quartiles {low:.4f} to {high:.4f}   (bar: 1.02)")
    DistCoordinator().print_on_master("\n".join(report))


def take_turns(
    ways: Mapping[str, Step], turns: int, steps: int, compare: Callable[[int, Mapping[str, torch.Tensor]], None]
) -> dict[str, list[float]]:
    """Let all ways take their turns, in an order that alternates.

    Args:
        ways: Each runs a step, and returns its loss.
        turns: How many turns each has, after two that are not measured.
        steps: How many steps in a turn.
        compare: Takes the number of a turn and the last loss of each way.

    Returns:
        The seconds of a step, of each turn of each way.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-2, turns):
        losses: dict[str, torch.Tensor] = {}
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            seconds, losses[name] = _seconds_of(ways[name], steps)
            if turn >= 0:
                times[name].append(seconds / steps)
        compare(turn, losses)
    return times


def _seconds_of(step: Step, steps: int) -> tuple[float, torch.Tensor]:
    """Return the time of some steps, and the last loss."""
    accelerator, coordinator = get_accelerator(), DistCoordinator()
    coordinator.block_all()
    started = time.perf_counter()
    loss = torch.zeros(())
    for _ in range(steps):
        loss = step()
    accelerator.synchronize()
    return time.perf_counter() - started, loss
