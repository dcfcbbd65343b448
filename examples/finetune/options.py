"""The options of the program, and what it is tried out with."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from torch import distributed as dist

from colossal.testing import make_finetuning_inputs
from examples.common.options import check, make_parser

LENGTH = 1024  # of samples, for models that take so many tokens
SMOKE = {"steps": 16, "batch_size": 8, "length": 64, "lr": 3e-3, "eval_every": 8, "save_every": 8}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Args:
        words: The command line; by default that of this process.

    Returns:
        The options.
    """
    parser = make_parser("Fine-tune a causal language model of Hugging Face on your data, under any plugin.")
    parser.set_defaults(output=Path("finetuned"), steps=100, lr=2e-5)
    add = parser.add_argument
    add("--model", type=Path, help="directory of a Hugging Face model with its tokenizer")
    add("--data", type=Path, help="JSONL file, or a directory of them: text; prompt and completion; or messages")
    add("--length", type=int, help=f"tokens of a sample at most; {LENGTH}, or what the model takes, by default")
    add("--pack", action="store_true", help="join samples into windows of this length instead of padding them")
    add("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank; 0 trains the model")
    add("--generate", metavar="PROMPT", help="continue this text at the end, with the saved model")
    add("--smoke", action="store_true", help="make a small model and data first, and train 16 steps")
    if parser.parse_known_args(words)[0].smoke:
        parser.set_defaults(**SMOKE)
    options = parser.parse_args(words)
    check(parser, options)
    if not options.smoke and (options.model is None or options.data is None):
        parser.error("--model and --data are required, or --smoke, which makes both")
    if not options.smoke:
        _check_paths(parser, options.model, options.data)
    return options


def _check_paths(parser: argparse.ArgumentParser, model: Path, data: Path) -> None:
    if not model.is_dir():
        parser.error(f"--model {model} is no directory; 'hf download NAME --local-dir DIRECTORY' makes one")
    if not (model / "config.json").is_file():
        parser.error(f"--model {model} has no config.json; pass the directory that save_pretrained wrote")
    if not any(any(model.glob(pattern)) for pattern in ("tokenizer*", "vocab*", "*.model")):
        parser.error(f"--model {model} has no tokenizer; tokenizer.save_pretrained writes that of the model to it")
    if not (data.is_file() or any(data.glob("*.jsonl"))):
        parser.error(f"--data {data} is neither a file nor a directory of .jsonl files")


def make_smoke_inputs(folder: Path) -> tuple[Path, Path]:
    """Make a small model with its tokenizer, and a conversation for each line of documentation of the standard library.

    Args:
        folder: Where they go.

    Returns:
        The directory of the model, and the JSONL file.
    """
    if dist.get_rank() == 0 and not (folder / "data.jsonl").exists():
        make_finetuning_inputs(folder)
    dist.barrier()
    return folder / "model", folder / "data.jsonl"
