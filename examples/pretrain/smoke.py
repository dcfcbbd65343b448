"""What the program is tried out with: source code and digits that every machine has."""

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
from torch import distributed as dist
from transformers import AutoTokenizer

from colossal.testing import make_finetuning_inputs
from examples.pretrain.prepare import prepare

_MODULES = ("argparse", "ast", "calendar", "datetime", "decimal", "inspect", "optparse", "pickle", "tarfile", "typing")


def make_smoke_data(folder: Path, family: str) -> Path:
    """Write the source code of ten modules as tokens, or scikit-learn's handwritten digits as images.

    Args:
        folder: Where they go.
        family: That of the model.

    Returns:
        The folder of the data.
    """
    path = folder / ("images" if family == "vit" else "tokens")
    if dist.get_rank() == 0 and not path.exists():
        (_write_digits if family == "vit" else _write_source)(path)
    dist.barrier()
    return path


def _write_source(path: Path) -> None:
    folder = make_finetuning_inputs(path.parent)[0]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained(folder)
    modules = [Path(sysconfig.get_path("stdlib"), f"{name}.py") for name in _MODULES]
    prepare([module for module in modules if module.is_file()], folder, path)


def _write_digits(path: Path) -> None:
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    path.mkdir(parents=True)
    np.save(path / "images.npy", (digits.images[order, None] * 15).astype(np.uint8))
    np.save(path / "labels.npy", digits.target[order])
