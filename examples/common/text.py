"""The text of the programs: Python's standard library, which is on every machine that runs them."""

import ast
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import distributed as dist
from torch.utils.data import Dataset

MODULES = ("argparse", "ast", "calendar", "datetime", "decimal", "inspect", "optparse", "pickle", "tarfile", "typing")


def read_source(names: Sequence[str] = MODULES) -> dict[str, str]:
    """Read modules of the standard library.

    Args:
        names: Their names; those that this Python has no file for are left out.

    Returns:
        The source of each.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    paths = {name: folder / f"{name}.py" for name in names}
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()}


def read_docstrings(names: Sequence[str] = MODULES) -> dict[str, list[str]]:
    """Read the docstrings of modules of the standard library.

    Args:
        names: Their names.

    Returns:
        The lines of all docstrings of each, of at least three words.
    """
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = {}
    for name, source in read_source(names).items():
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
        lines = [line.strip() for node in nodes for line in (ast.get_docstring(node) or "").splitlines()]
        found[name] = [line for line in lines if len(line.split()) > 2]  # noqa: PLR2004 (words that say something)
    return found


def make_tokenizer(texts: Iterable[str], vocab_size: int, special: Sequence[str] = ()) -> Tokenizer:
    """Train a byte-pair encoding on rank 0, and give it to all.

    Args:
        texts: What it is trained on.
        vocab_size: Tokens of the vocabulary, with the special ones.
        special: Tokens that stand for no text; they come first.

    Returns:
        The tokenizer, the same on all ranks.
    """
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        tokenizer: Any = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        box = [tokenizer.to_str()]
    dist.broadcast_object_list(box)
    return Tokenizer.from_str(box[0])


@final
class Samples(Dataset[dict[str, torch.Tensor]]):
    """Tensors with a row for each sample, by the names that the model gives its inputs.

    Args:
        **columns: The tensors.
    """

    def __init__(self, **columns: torch.Tensor) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self._columns.items()}

    def split(self, share: float, seed: int) -> "tuple[Samples, Samples]":
        """Divide the samples at random.

        Args:
            share: How much the second part gets.
            seed: Of the order.

        Returns:
            Samples to train on, and samples to test with.
        """
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        parts = order[int(len(self) * share) :], order[: int(len(self) * share)]
        first, second = (Samples(**{name: one[part] for name, one in self._columns.items()}) for part in parts)
        return first, second


def causal_samples(vocab_size: int, length: int) -> Samples:
    """Cut the source of the standard library into windows, for a causal language model.

    Args:
        vocab_size: Tokens of the vocabulary.
        length: Tokens of a window.

    Returns:
        Windows that do not overlap; labels are the tokens themselves.
    """
    texts = list(read_source().values())
    tokenizer = make_tokenizer(texts, vocab_size)
    tokens = torch.tensor([each for part in tokenizer.encode_batch(texts) for each in part.ids])
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    return Samples(input_ids=windows, labels=windows)
