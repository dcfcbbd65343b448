"""Fine-tune a causal language model of Hugging Face on your data, under any plugin.

torchrun --standalone --nproc_per_node=2 examples/finetune/train.py --smoke
"""

import argparse
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from colossal.booster import Booster
from colossal.cluster import DistCoordinator
from colossal.errors import ConfigError
from colossal.lazy import LazyInitContext

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it is started by -m, or by its path from anywhere

from examples.common.program import run_program
from examples.common.report import flops_per_token
from examples.common.training import Training, make_booster, make_loaders
from examples.finetune.data import Collator, Samples, num_labels, read
from examples.finetune.options import LENGTH, make_smoke_inputs, parse


def make_training(options: argparse.Namespace, tokenizer: Any) -> Training:
    """Load the model and the data that the options name, and boost them."""
    booster = make_booster(options)
    options.length = options.length or _default_length(options)
    loaders = _read_data(options, booster, tokenizer)
    # each rank reads its shard when the model is boosted; a pytorch_model.bin every rank reads whole
    with LazyInitContext() if any(options.model.glob("*.safetensors")) else nullcontext():
        model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    if options.lora:
        model = _add_adapters(options, booster, model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=options.lr)
    flops = flops_per_token(model, options.length)
    return Training(options, booster, model, optimizer, loaders, flops_per_unit=flops)


def _read_data(options: argparse.Namespace, booster: Booster, tokenizer: Any) -> tuple[Any, Any]:
    found = read(options.data, tokenizer, options.length, pack=options.pack)
    samples = [(ids, labels) for ids, labels in found if num_labels(labels)]
    if not samples:
        raise ConfigError(
            f"A sample needs a label within --length {options.length}: text, a completion, or an assistant's answer. "
            f"Found none in {options.data}, which makes {len(found)} {'windows' if options.pack else 'samples'}. Pass "
            f"{'more data or another --length' if options.pack else 'a larger --length, or shorter prompts'}."
        )
    multiple = _multiple(options)
    _check_length(options, max(len(ids) for ids, _ in samples), multiple)
    num_tests = max(1, len(samples) // 20) if options.eval_every else 0
    counted = sum(num_labels(labels) for _, labels in samples[num_tests:])
    left_out = f"; left out: {len(found) - len(samples)} without a label" if len(found) > len(samples) else ""
    print_on_master = DistCoordinator().print_on_master
    print_on_master(f"{len(samples) - num_tests} samples to train on, {counted:,} labels to learn{left_out}")
    train_set, test_set = (Samples(part, options.batch_size) for part in (samples[num_tests:], samples[:num_tests]))
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    pad_token = next((each for each in known if each is not None), 0)
    collator = Collator(pad_token, multiple)
    num_samples = len(samples) - num_tests
    return make_loaders(options, booster, train_set, test_set, num_samples=num_samples, collate_fn=collator)


def _multiple(options: argparse.Namespace) -> int:
    """What the number of tokens of a batch is a multiple of: ranks of `--sp` share them."""
    return 8 * options.sp


def _num_positions(options: argparse.Namespace) -> int | None:
    return getattr(AutoConfig.from_pretrained(options.model), "max_position_embeddings", None)


def _default_length(options: argparse.Namespace) -> int:
    most = _num_positions(options) or LENGTH
    return min(LENGTH, most - most % _multiple(options))


def _check_length(options: argparse.Namespace, length: int, multiple: int) -> None:
    """Refuse samples that are longer, padded, than the model has positions: on a GPU the error would not say so."""
    most = _num_positions(options)
    padded = length + -length % multiple
    if most is not None and padded > most:
        raise ConfigError(
            f"The model takes at most {most} tokens. Found samples of {padded} tokens, padded to a multiple of "
            f"{multiple}. Pass --length {most - most % multiple}."
        )


def _add_adapters(options: argparse.Namespace, booster: Booster, model: nn.Module) -> nn.Module:
    from peft import LoraConfig

    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # which peft reads
    torch.manual_seed(options.seed)
    config = LoraConfig(r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    return booster.enable_lora(model, lora_config=config)


@torch.no_grad()
def generate(folder: Path, prompt: str) -> str:
    """Continue a text with a saved model, in this process alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    if (folder / "adapter").is_dir():
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(folder / "adapter"))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    written = model.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
    return tokenizer.decode(written[0], skip_special_tokens=True)


def run(options: argparse.Namespace) -> None:
    """Train, save the model, and show what it writes, in processes that have been launched."""
    if options.smoke:
        options.model, options.data = make_smoke_inputs(options.output / "smoke")
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    training = make_training(options, tokenizer)
    training.train()
    training.save(tokenizer)
    if options.generate is not None:
        text = generate(options.output / "model", options.generate) if dist.get_rank() == 0 else ""
        DistCoordinator().print_on_master(text)


def main() -> None:
    """Train as the command line says."""
    run_program(parse, run)


if __name__ == "__main__":
    main()
