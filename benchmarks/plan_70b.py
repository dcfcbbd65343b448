"""What each rank of 1,024 would hold and send to train a Llama of 70 billion parameters, found out on one laptop.

Eight ranks share a tensor, eight the layers, and 16 replicas share optimizer states. No rank but this process exists,
and no parameter has a value: the model is cut, divided, run and updated on the meta device, as `plan_step` describes.
The first rank of each stage of the pipeline is planned. The bar is 30 seconds and 2 GB, imports included.

    python benchmarks/plan_70b.py
    python benchmarks/plan_70b.py --no-recompute --ranks 0 960
"""

import argparse
import logging
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

WORLD, TP, PP = 1024, 8, 8
MOST_SECONDS, MOST_BYTES = 30.0, 2e9
COLUMNS = ("rank", "parameters", "param", "grad", "optim", "kept", "work", "peak", "tp", "pp", "dp")


def plan(rank: int, args: argparse.Namespace) -> Any:
    """Plan one rank."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from colossal.booster.plugin import HybridParallelPlugin, plan_step
    from colossal.testing import fake_world

    sizes: dict[str, Any] = {"hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256}
    heads: dict[str, Any] = {"num_attention_heads": 64, "num_key_value_heads": 8}
    config = LlamaConfig(num_hidden_layers=80, max_position_embeddings=args.tokens, use_cache=False, **sizes, **heads)
    with fake_world(WORLD, rank):
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
            ids = torch.zeros(args.batch, args.tokens, dtype=torch.int64)
        if args.recompute:
            model.train()
            model.activation_checkpointing_enable()
        plugin = HybridParallelPlugin(TP, PP, precision="bf16", zero_stage=1, microbatch_size=1)
        optimizer = torch.optim.AdamW(model.parameters())
        return plan_step(plugin, model, optimizer, {"input_ids": ids, "labels": ids}, lambda outputs, _: outputs.loss)


def row(rank: int, found: Any) -> str:
    """One rank, in GB (10**9 bytes)."""
    states = (found.parameter_bytes, found.gradient_bytes, found.optimizer_bytes)
    passing = (found.activation_bytes, found.working_bytes, found.peak_bytes)
    numbers = [*states, *passing, *(found.sent_bytes[axis] for axis in ("tp", "pp", "dp"))]
    return f"{rank:>6}{found.num_parameters:>16,}" + "".join(f"{number / 1e9:>9.2f}" for number in numbers)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", help="by default the first of each stage")
    parser.add_argument("--tokens", type=int, default=4096, help="of a sequence")
    parser.add_argument("--batch", type=int, default=32, help="sequences of each replica in a step")
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=True, help="layers, backward")
    args = parser.parse_args(arguments)
    logging.disable(logging.INFO)
    begin = time.perf_counter()
    ranks = [stage * TP for stage in range(PP)] if args.ranks is None else args.ranks
    print(
        f"{COLUMNS[0]:>6}{COLUMNS[1]:>16}" + "".join(f"{name:>9}" for name in COLUMNS[2:]) + "   (GB; sent in a step)"
    )
    found = []
    for rank in ranks:
        found.append(plan(rank, args))
        print(row(rank, found[-1]), flush=True)
    if args.ranks is None:
        whole = sum(
            TP * (each.num_parameters - each.num_replicated_parameters) + each.num_replicated_parameters
            for each in found
        )
        print(f"all {TP * PP} ranks of a replica together have {whole:,} parameters")
    seconds = time.perf_counter() - begin
    num_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    within = seconds < MOST_SECONDS and num_bytes < MOST_BYTES
    bars = f"(bars: {MOST_SECONDS:g} s, {MOST_BYTES / 1e9:g} GB)"
    print(f"{seconds:.1f} s, {num_bytes / 1e9:.2f} GB at most {bars}: {'within' if within else 'ABOVE'}")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
