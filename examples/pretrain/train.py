"""Pretrain GPT-2, LLaMA, Mixtral, OPT, BERT or ViT on your data, under any plugin.

torchrun --standalone --nproc_per_node=2 examples/pretrain/train.py --family gpt2 --smoke
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from colossal.lazy import LazyInitContext
from colossal.shardformer import ShardConfig, ShardFormer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it is started by -m, or by its path from anywhere

from examples.common.options import check, make_parser
from examples.common.program import run_program
from examples.common.report import flops_per_token
from examples.common.training import Training, decay_groups, make_booster, make_loaders
from examples.pretrain.data import Images, MaskedWindows, Windows, split
from examples.pretrain.models import PATCH_SIZES, SIZES, make_model
from examples.pretrain.smoke import make_smoke_data

SMOKE = {"size": "tiny", "steps": 24, "batch_size": 16, "length": 32, "lr": 3e-3, "eval_every": 12, "save_every": 12}
VOCABULARY_MULTIPLE = 128
"""What the entries of an embedding are a multiple of: GPUs multiply such matrices faster."""
MOST_TEST_BATCHES = 8


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Args:
        words: The command line; by default that of this process.

    Returns:
        The options.
    """
    parser = make_parser("Pretrain GPT-2, LLaMA, Mixtral, OPT, BERT or ViT on your data, under any plugin.")
    parser.set_defaults(output=Path("pretrained"), steps=1000, lr=3e-4)
    add = parser.add_argument
    add("--family", choices=SIZES, default="gpt2", help="the architecture")
    add("--size", default="small", help="; ".join(f"{family}: {', '.join(sizes)}" for family, sizes in SIZES.items()))
    add("--data", type=Path, help="folder of token files, as prepare.py writes it; with vit, of images")
    add("--length", type=int, default=1024, help="tokens of a sample")
    add("--dropout", type=float, default=0.0, help="probability of all dropout layers")
    add("--balance", type=float, default=0.02, help="with mixtral: weight of the loss that balances experts")
    add("--weight-decay", type=float, default=0.1, help="of weights, not of biases and norms")
    add("--smoke", action="store_true", help="train the smallest size for 24 steps on data that this machine has")
    if parser.parse_known_args(words)[0].smoke:
        parser.set_defaults(**SMOKE)
    options = parser.parse_args(words)
    check(parser, options)
    if options.size not in SIZES[options.family]:
        parser.error(f"--size of {options.family} must be one of {', '.join(SIZES[options.family])}")
    if options.family == "mixtral" and options.pp > 1 and options.balance:
        parser.error("--pp needs --balance 0: the loss that balances experts is computed from all layers")
    if not options.smoke and options.data is None:
        parser.error("--data is required, or --smoke, which makes it")
    return options


def make_training(options: argparse.Namespace) -> Training:
    """Open the data that the options name, build the model, and boost both."""
    booster, is_text = make_booster(options), options.family != "vit"
    dataset, inputs = (_open_tokens if is_text else _open_images)(options)
    batches = min(len(dataset) // 20 // options.batch_size, MOST_TEST_BATCHES)
    num_tests = max(batches, 1) * options.batch_size if options.eval_every else 0
    parts = split(dataset, num_tests)
    if options.family == "bert":
        parts = [MaskedWindows(part, dataset.info, options.seed) for part in parts]
    loaders = make_loaders(options, booster, *parts, num_samples=len(dataset) - num_tests)
    torch.manual_seed(options.seed)
    with LazyInitContext():  # each rank allocates its shard when the model is boosted
        model: Any = make_model(options.family, options.size, options.dropout, **inputs)
    if options.family == "mixtral" and options.plugin != "hybrid":
        model, _ = ShardFormer(ShardConfig()).optimize(model)  # balances experts over all ranks, as hybrid does
    groups = decay_groups(model, options.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
    num_patches = 0 if is_text else (model.config.image_size // model.config.patch_size) ** 2 + 1
    return Training(
        options,
        booster,
        model,
        optimizer,
        loaders,
        causal=options.family in ("gpt2", "llama", "mixtral", "opt"),
        unit="tokens" if is_text else "images",
        flops_per_unit=flops_per_token(model, num_patches or options.length) * (num_patches or 1),
    )


def _open_tokens(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    windows = Windows(options.data, options.length)
    info = windows.info
    inputs = {
        "vocab_size": info["vocab_size"] + -info["vocab_size"] % VOCABULARY_MULTIPLE,
        "max_position_embeddings": options.length,
        "bos_token_id": None,
        "eos_token_id": info["end_token"],
        "pad_token_id": info["pad_token"],
    }
    if options.family == "mixtral":
        inputs |= {"output_router_logits": options.balance > 0, "router_aux_loss_coef": options.balance}
    return windows, inputs


def _open_images(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    images = Images(options.data)
    inputs = {
        "image_size": images.images.shape[-1],
        "num_channels": images.images.shape[1],
        "num_labels": int(images.labels.max()) + 1,
        "patch_size": PATCH_SIZES[options.size],
    }
    return images, inputs


def run(options: argparse.Namespace) -> None:
    """Train, and save the model with its tokenizer, in processes that have been launched."""
    if options.data is None:
        options.data = make_smoke_data(options.output / "smoke", options.family)
    training = make_training(options)
    training.train()
    training.save(AutoTokenizer.from_pretrained(options.data) if options.family != "vit" else None)


def main() -> None:
    """Train as the command line says."""
    run_program(parse, run)


if __name__ == "__main__":
    main()
