"""How many bytes the auto policy moves under a budget, against the best schedule that is possible.

A GPT-2 trains on one rank while the budget of its device is a share of the model data: parameters, gradients, and
optimizer states of AdamW. A second look at the recorded pass, with the same room in each period, tells what a schedule
must upload that knows the whole future: Belady's, which always lets go of the chunk that is needed last. Gradients and
updated parameters cross between the tiers in either.

    python benchmarks/gemini_moves.py
"""

import argparse
import socket
import sysconfig
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import colossal
from colossal.booster import Booster
from colossal.booster.plugin import GeminiPlugin
from colossal.nn.optimizer import HybridAdam

BAR = 1.1
STEPS = 4


def build(options: argparse.Namespace) -> GPT2LMHeadModel:
    """The model, the same each time."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": options.hidden, "n_layer": options.layers, "n_head": options.hidden // 64}
    config = GPT2Config(**sizes, vocab_size=8192, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(config)


def batch(options: argparse.Namespace) -> torch.Tensor:
    """Pairs of bytes of a source file as tokens."""
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()[: options.sequences * 128]
    pairs = torch.frombuffer(bytearray(source), dtype=torch.uint8).view(options.sequences, 64, 2).long()
    return (256 * pairs[..., 0] + pairs[..., 1]) % 8192


def belady(order: list[int], sizes: list[int], room: list[int]) -> int:
    """Count the bytes that a pass uploads which begins with nothing, and knows its future."""
    here: set[int] = set()
    uploaded = 0
    for now, chunk in enumerate(order):
        if chunk not in here:
            uploaded += sizes[chunk]
            here.add(chunk)
        following = {other: _next(order, now, other) for other in here}
        while sum(sizes[other] for other in here) > room[now] and here - {chunk}:
            here.remove(max(here - {chunk}, key=lambda other: following[other]))
    return uploaded


def _next(order: list[int], now: int, chunk: int) -> int:
    return next((place for place in range(now + 1, len(order)) if order[place] == chunk), len(order))


def measure(share: float, options: argparse.Namespace) -> tuple[int, int, int, int, int]:
    """Train under a budget; return the budget, the peak, and the bytes uploaded by ours, by Belady's and in all."""
    model = build(options)
    numel = sum(parameter.numel() for parameter in model.parameters())
    block = sum(parameter.numel() for parameter in model.transformer.h[0].parameters())
    budget = int(16 * numel * share)
    plugin = GeminiPlugin(
        precision="fp32",
        placement_policy="auto",
        device_budget=budget,
        chunk_config_dict={1: {"chunk_size": block // options.chunks_per_block + 1}},
    )
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-4))
    assert optimizer is not None
    chunks: Any = boosted.chunks
    data, before, room = batch(options), 0, []
    look = chunks._room  # noqa: SLF001 (what the policy allows is not part of the interface)
    for step in range(STEPS):
        before = chunks.traffic.num_bytes.get("upload", 0)
        room = [0] * len(chunks.trace.recorded)
        if step == STEPS - 1:

            def watched() -> int:
                found = look()
                room[chunks.trace.period - 1] = found  # noqa: B023 (read within this step)
                return found

            chunks._room = watched  # noqa: SLF001
        loss = boosted(input_ids=data, labels=data).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    ours = chunks.traffic.num_bytes.get("upload", 0) - before
    best = belady(chunks.trace.recorded, [chunk.num_bytes for chunk in chunks.chunks], room)
    return budget, chunks.memory.peak, ours, best, 4 * numel


def main() -> None:
    """Print a row for each budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--chunks-per-block", type=int, default=2)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.6, 0.4, 0.25, 0.2, 0.17])
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    colossal.launch(0, 1, "127.0.0.1", port, backend="gloo", verbose=False)
    print("budget of model data   budget MB   peak MB   uploads a step MB: ours   Belady's   ratio   parameters MB")
    for share in options.shares:
        budget, peak, ours, best, whole = measure(share, options)
        assert best <= ours, "no schedule uploads less than Belady's"
        assert peak <= budget, "the budget was exceeded"
        print(
            f"{share:20.0%} {budget / 1e6:11.1f} {peak / 1e6:9.1f} {ours / 1e6:25.1f} {best / 1e6:10.1f} "
            f"{ours / best:7.3f} {whole / 1e6:15.1f}   (bar: {BAR})"
        )


if __name__ == "__main__":
    main()
