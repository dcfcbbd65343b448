"""The options of all programs, and the plugin that they ask for."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, final

from colossal.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin

PLUGINS = ("ddp", "zero", "gemini", "hybrid")


@final
@dataclass(frozen=True)
class Options:
    """What the user said; each is an option of the command line of the same name.

    Args:
        size: The size of the model, one of those that the program has.
        plugin: The recipe of parallelism.
        precision: The dtype of the model.
        tp_size: With the hybrid plugin: ranks that share a tensor.
        pp_size: With the hybrid plugin: ranks that share the layers.
        zero_stage: With the zero and the hybrid plugin: what replicas share.
        pp_style: With a pipeline: the schedule.
        num_model_chunks: With a pipeline: stages of each rank.
        num_microbatches: With a pipeline: parts of a batch.
        batch_size: Samples of a step, of all replicas together.
        steps: Steps to train.
        lr: The highest learning rate.
        max_norm: What the norm of gradients is clipped to; 0 does not.
        seed: Of the initial weights and of the order of the data.
        metrics: Where a line of JSON for each step goes; nowhere by default.
        smoke: Train the smallest size for few steps, to see that everything works.
    """

    size: str = ""
    plugin: str = "hybrid"
    precision: str = "fp32"
    tp_size: int = 1
    pp_size: int = 1
    zero_stage: int = 0
    pp_style: str = "1f1b"
    num_model_chunks: int = 1
    num_microbatches: int = 4
    batch_size: int = 32
    steps: int = 200
    lr: float = 1e-3
    max_norm: float = 1.0
    seed: int = 42
    metrics: Path | None = None
    smoke: bool = False


_CHOICES = {
    "plugin": PLUGINS,
    "precision": ("fp32", "bf16", "fp16"),
    "pp_style": ("1f1b", "interleaved", "zbv"),
    "zero_stage": (0, 1, 2),
}


def parse(description: str, sizes: Sequence[str], words: Sequence[str] | None = None, **defaults: Any) -> Options:
    """Read the command line.

    Args:
        description: What the program does.
        sizes: The sizes of the model, the smallest first.
        words: The command line; by default that of this process.
        **defaults: Values of options that this program has its own of.

    Returns:
        The options.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    own = replace(Options(size=sizes[0]), **defaults)
    help_of = _help()
    for field in fields(Options):
        name, default = f"--{field.name.replace('_', '-')}", getattr(own, field.name)
        if field.name == "smoke":
            parser.add_argument(name, action="store_true", help=help_of[field.name])
            continue
        kind = Path if field.name == "metrics" else type(default)
        choices = sizes if field.name == "size" else _CHOICES.get(field.name)
        parser.add_argument(name, type=kind, default=default, choices=choices, help=help_of[field.name])
    options = Options(**vars(parser.parse_args(words)))
    return replace(options, size=sizes[0], batch_size=16, steps=24) if options.smoke else options


def _help() -> dict[str, str]:
    """Take what an option means from the docstring of `Options`."""
    lines = (Options.__doc__ or "").partition("Args:")[2].splitlines()
    pairs = (line.strip().partition(": ") for line in lines if line.strip())
    return {name: text.rstrip(".") for name, _, text in pairs}


def make_plugin(options: Options) -> Plugin:
    """Make the plugin that was asked for.

    Args:
        options: What the user said.

    Returns:
        The plugin.
    """
    precision, max_norm = options.precision, options.max_norm
    if options.plugin == "ddp":
        return TorchDDPPlugin()
    if options.plugin == "zero":
        return LowLevelZeroPlugin(stage=options.zero_stage or 1, precision=precision, max_norm=max_norm)
    if options.plugin == "gemini":
        return GeminiPlugin(precision=precision, max_norm=max_norm)
    is_cut = options.pp_size > 1
    style: Any = options.pp_style
    return HybridParallelPlugin(
        tp_size=options.tp_size,
        pp_size=options.pp_size,
        zero_stage=options.zero_stage,
        precision=precision,
        max_norm=max_norm,
        pp_style=style,
        num_model_chunks=options.num_model_chunks,
        num_microbatches=options.num_microbatches if is_cut else None,
    )
