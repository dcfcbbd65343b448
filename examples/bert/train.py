"""Train BERT to tell from which module of Python's standard library two lines of documentation come.

torchrun --standalone --nproc_per_node=2 -m examples.bert.train --plugin zero
"""

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import colossal
from examples.common.loop import run
from examples.common.options import parse
from examples.common.text import MODULES, Samples, make_tokenizer, read_docstrings

LENGTH = 64
SPECIAL = ("[PAD]", "[CLS]", "[SEP]")
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    "small": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8},
    "base": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
}
VOCABULARY = {"tiny": 1024, "small": 4096, "base": 8192}


def make_samples(vocab_size: int) -> Samples:
    """Return pairs of lines that follow each other, and the number of the module that they come from."""
    lines = read_docstrings()
    tokenizer = make_tokenizer((line for part in lines.values() for line in part), vocab_size, SPECIAL)
    pad, begin, end = (tokenizer.token_to_id(token) for token in SPECIAL)
    rows: list[tuple[list[int], int, int]] = []
    for name, part in lines.items():
        ids = [encoded.ids[: LENGTH // 2 - 2] for encoded in tokenizer.encode_batch(part)]
        pairs = (([begin, *first, end], [*second, end]) for first, second in pairwise(ids))
        rows += [(first + second, len(first), MODULES.index(name)) for first, second in pairs]
    place = torch.arange(LENGTH)
    lengths = torch.tensor([len(ids) for ids, _, _ in rows])[:, None]
    firsts = torch.tensor([first for _, first, _ in rows])[:, None]
    return Samples(
        input_ids=torch.tensor([ids + [pad] * (LENGTH - len(ids)) for ids, _, _ in rows]),
        attention_mask=(place < lengths).long(),
        token_type_ids=((place >= firsts) & (place < lengths)).long(),
        labels=torch.tensor([label for _, _, label in rows]),
    )


def make_model(size: str) -> nn.Module:
    """Build the model of a size, from its configuration."""
    tokens: dict[str, Any] = {"vocab_size": VOCABULARY[size], "max_position_embeddings": LENGTH, "pad_token_id": 0}
    tokens["num_labels"] = len(MODULES)
    config = BertConfig(**tokens, initializer_range=0.05, **SIZES[size])
    return BertForSequenceClassification(config)


def main() -> None:
    """Train as the command line says."""
    options = parse("Train BERT to tell from which module documentation comes.", list(SIZES), lr=1e-3)
    colossal.launch_from_torch(verbose=False)
    run(lambda: make_model(options.size), make_samples(VOCABULARY[options.size]), options)


if __name__ == "__main__":
    main()
