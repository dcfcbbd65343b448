"""Whether `make_finetuning_inputs` makes the data of the numbers on pages: releases of Python have other texts."""

import hashlib
from pathlib import Path

_RECORDED = "759d1cb12809d6fc078e92f78b6cdfcf6568ca363be81e4fa3dc0d441500984b"
"""The digest of ``data.jsonl`` under the Python of `pagetest.outputs.library_texts`."""


def has_recorded_texts(inputs: Path) -> bool:
    """Whether losses of programs that train on these inputs are those that pages show."""
    return hashlib.sha256((inputs / "data.jsonl").read_bytes()).hexdigest() == _RECORDED
