"""The options that the programs share, and the plugin that they ask for."""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colossal.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from examples.common.program import Parser


def _make_hybrid(options: Any) -> Plugin:
    pipeline: dict[str, Any] = {
        "pp_style": options.pp_style,
        "num_model_chunks": 1 if options.pp_style == "1f1b" else 2,
        "num_microbatches": num_microbatches(options),
    }
    return HybridParallelPlugin(
        tp_size=options.tp,
        pp_size=options.pp,
        sp_size=options.sp,
        ep_size=options.ep,
        enable_sequence_parallelism=options.sp > 1,
        zero_stage=options.zero_stage,
        **(pipeline if options.pp > 1 else {}),
    )


def num_microbatches(options: Any) -> int:
    """Return into how many micro-batches a pipeline splits a batch of a replica; 1 without a pipeline."""
    return 1 if options.pp == 1 else options.num_microbatches or 2 * options.pp


PLUGINS: dict[str, Callable[[Any], Plugin]] = {
    "ddp": lambda _: TorchDDPPlugin(),
    "fsdp": lambda _: TorchFSDPPlugin(),
    "zero1": lambda _: LowLevelZeroPlugin(stage=1),
    "zero2": lambda _: LowLevelZeroPlugin(stage=2),
    "gemini": lambda _: GeminiPlugin(),
    "hybrid": _make_hybrid,
}


def make_parser(description: str) -> argparse.ArgumentParser:
    """Make a parser of the options that the programs share.

    Args:
        description: What the program does.

    Returns:
        The parser; a program adds its own options and defaults.
    """
    parser = Parser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, help="where checkpoints, log and model go")
    add("--plugin", choices=PLUGINS, default="ddp", help="how ranks share the work")
    add("--tp", type=int, default=1, help="with hybrid: ranks that share each tensor")
    add("--pp", type=int, default=1, help="with hybrid: ranks that share the layers")
    add("--sp", type=int, default=1, help="with hybrid: ranks that share each sequence")
    add("--ep", type=int, default=1, help="with hybrid: ranks that share the experts, of those of tp, sp and replicas")
    add("--zero-stage", type=int, choices=(0, 1, 2), default=0, help="with hybrid: what replicas partition, as in ZeRO")
    add("--pp-style", choices=("1f1b", "interleaved", "zbv"), default="1f1b", help="with --pp: the schedule")
    add("--num-microbatches", type=int, default=0, help="with --pp: micro-batches of a batch; 0: twice the stages")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="bf16", help="what most of a step computes in")
    add("--steps", type=int, help="optimizer steps")
    add("--batch-size", type=int, default=32, help="samples of a step, over all ranks")
    add("--accumulate", type=int, default=1, help="parts that a rank computes its batch in, one after the other")
    add("--lr", type=float, help="highest learning rate")
    add("--warmup", type=int, help="steps over which the learning rate rises; None: a tenth of --steps")
    add("--max-norm", type=float, default=1.0, help="norm that gradients are clipped to; 0 does not")
    add("--checkpoint-layers", action="store_true", help="compute activations again in the backward pass")
    add("--compile", action="store_true", help="compile the model")
    add("--save-every", type=int, default=0, help="steps between checkpoints; 0 saves none")
    add("--resume", action="store_true", help="go on from the last checkpoint under --output, if there is one")
    add("--eval-every", type=int, default=0, help="steps between evaluations on data that is not trained on; 0: none")
    # torchrun takes `--log` for an abbreviation of an option of its own
    add("--report-to", choices=("jsonl", "tensorboard", "wandb"), default="jsonl", help="where each step is logged")
    add("--profile", action="store_true", help="write a trace of three steps of each rank to profile under --output")
    add("--workers", type=int, default=0, help="processes that make batches")
    add("--seed", type=int, default=42, help="of the order of the data, of dropout, and of what else is drawn")
    return parser


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program where options contradict each other."""
    if options.plugin != "hybrid" and max(options.tp, options.pp, options.sp, options.ep) > 1:
        parser.error("--tp, --pp, --sp and --ep need --plugin hybrid")
    if options.plugin != "hybrid" and options.zero_stage:
        parser.error("--zero-stage needs --plugin hybrid; --plugin zero1 and zero2 are stages of their own")
    package = options.report_to
    if package != "jsonl" and package not in sys.modules and importlib.util.find_spec(package) is None:
        parser.error(f"--report-to {package} needs the package {package}: pip install {package}")
