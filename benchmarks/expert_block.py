"""A layer of experts in one process, forward and backward, beside the Mixtral block of transformers.

Both have the same weights, a router and its experts; that of transformers computes them by `grouped_mm`, its fastest
way on CPUs. Before anything is timed, outputs and gradients must be equal. A third way only multiplies the rows that
each expert got by its weights, forward and backward, on the buffers of the last turn: no layer could be faster. The
fourth is ours without its own code for the gate of experts. Times are those of the processor, so that other programs
disturb them less. The bar, on one thread: at most 0.85 of transformers' time.

    python benchmarks/expert_block.py
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from colossal._src.kernel import silu
from colossal.nn.moe import FeedForwardExperts, MixtureOfExperts, Router

BAR = 0.85
WIDTH = 256
SIZES = {"8 experts, 2 of them, 512 wide": (8, 2, 512), "64 experts, 8 of them, 128 wide": (64, 8, 128)}


def build(num_experts: int, num_choices: int, inner: int) -> tuple[nn.Module, nn.Module]:
    """Our layer and the block of transformers, with equal weights."""
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": inner, "num_local_experts": num_experts}
    config = MixtralConfig(num_experts_per_tok=num_choices, **sizes)
    config._experts_implementation = "grouped_mm"  # noqa: SLF001 (as models of transformers set it)
    torch.manual_seed(0)
    theirs: Any = MixtralSparseMoeBlock(config)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.05)
    experts = FeedForwardExperts(num_experts, WIDTH, inner)
    ours = MixtureOfExperts(Router(WIDTH, num_experts, num_choices, renormalize=True), experts)
    values = {"router.weight": theirs.gate.weight}
    values |= {f"experts.{name}": parameter for name, parameter in theirs.experts.named_parameters()}
    ours.load_state_dict(values)
    return ours, theirs


def step_of(layer: nn.Module, x: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
    """Run forward and backward, and return the output and the gradients of what both layers have."""

    def step() -> list[torch.Tensor]:
        x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None
        output = layer(x)
        output = output[0] if isinstance(output, tuple) else output
        output.backward(torch.ones_like(output))
        experts = [layer.get_parameter(f"experts.{name}").grad for name in ("gate_up_proj", "down_proj")]
        return [each for each in (output, x.grad, *experts) if each is not None]

    return step


def products_of(layer: Any, x: torch.Tensor) -> Callable[[], None]:
    """What no layer could avoid: the products of the rows of each expert."""
    up, down = layer.experts.gate_up_proj.data, layer.experts.down_proj.data
    with torch.no_grad():
        chosen = layer.router(x).chosen
    counts, rows = chosen.flatten().bincount(minlength=len(up)).tolist(), torch.randn(chosen.numel(), WIDTH)
    inner = torch.randn(len(rows), down.shape[2])
    wide, out, of_inner = torch.empty(len(rows), up.shape[1]), torch.empty_like(rows), torch.empty_like(inner)
    of_up, of_down = torch.empty_like(up), torch.empty_like(down)

    def multiply() -> None:
        buffers = (each.split(counts) for each in (rows, inner, wide, out, of_inner))
        for r, h, w, y, g, m, d, of_m, of_d in zip(*buffers, up, down, of_up, of_down, strict=True):
            torch.mm(r, m.T, out=w)
            torch.mm(h, d.T, out=y)
            torch.mm(r, d, out=g)
            torch.mm(r.T, h, out=of_d)
            torch.mm(w, m, out=y)
            torch.mm(w.T, r, out=of_m)

    return multiply


def measure(name: str, options: argparse.Namespace) -> None:
    """Print the medians of one size."""
    ours, theirs = build(*SIZES[name])
    x = torch.randn(1, options.tokens, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    own = step_of(ours, x)
    ways: dict[str, Callable[[], object]] = {"colossal": own, "transformers": step_of(theirs, x)}
    for found, expected in zip(own(), step_of(theirs, x)(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    ways |= {"products alone": products_of(ours, x), "gate by torch": own}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    kernel = silu.host_function
    for turn in range(-2, options.turns):
        for way in list(ways)[:: 1 if turn % 2 else -1]:
            with mock.patch.object(silu, "host_function", (lambda _: None) if way == "gate by torch" else kernel):
                started = time.process_time()
                for _ in range(options.steps):
                    ways[way]()
                if turn >= 0:
                    seconds[way].append((time.process_time() - started) / options.steps)
    print(f"{name}; {options.tokens} tokens of {WIDTH} features")
    for way, own_seconds in seconds.items():
        ratios = [one / peer for one, peer in zip(own_seconds, seconds["transformers"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        bar = f"; bar {BAR}" if way == "colossal" else ""
        median = 1e3 * statistics.median(own_seconds)
        print(f"  {way:<15}{median:9.2f} ms   {middle:.3f} of transformers' ({low:.3f} to {high:.3f}{bar})")


def main() -> None:
    """Measure both sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40, help="turns that each way has")
    parser.add_argument("--steps", type=int, default=3, help="steps of one turn")
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in SIZES:
        measure(name, options)


if __name__ == "__main__":
    main()
