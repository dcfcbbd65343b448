"""Write text files as token files, once, before any training.

python examples/pretrain/prepare.py --tokenizer models/my-tokenizer --output my-tokens corpus/*.jsonl
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

_DOCUMENTS_AT_ONCE = 256


def _documents(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        with path.open(encoding="utf-8") as file:
            if path.suffix == ".jsonl":
                yield from (json.loads(line)["text"] for line in file if line.strip())
            else:
                yield file.read()


def prepare(paths: Iterable[Path], tokenizer_dir: Path, folder: Path, name: str = "tokens") -> int:
    """Append the tokens of all documents to one file, and say next to it what they are.

    Args:
        paths: JSONL files with a document in `text` of each line, and text files of one document each.
        tokenizer_dir: Directory of a Hugging Face tokenizer.
        folder: Gets `name.bin`, `tokens.json` and the tokenizer.
        name: Another one for each process that prepares a part of the corpus.

    Returns:
        The number of tokens.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_dir)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    info = {
        "dtype": "uint16" if len(tokenizer) <= 2**16 else "uint32",
        "vocab_size": len(tokenizer),
        "end_token": tokenizer.eos_token_id,
        "pad_token": tokenizer.pad_token_id,
        "mask_token": tokenizer.mask_token_id,
        "special_tokens": tokenizer.all_special_ids,
    }
    tokenizer.save_pretrained(folder)
    number = 0
    with (folder / f"{name}.bin").open("wb") as file:
        documents = _documents(paths)
        while texts := list(islice(documents, _DOCUMENTS_AT_ONCE)):
            for ids in tokenizer(texts, verbose=False).input_ids:
                np.array(ids + end, dtype=info["dtype"]).tofile(file)
                number += len(ids) + len(end)
    (folder / "tokens.json").write_text(json.dumps(info), encoding="utf-8")
    return number


def main() -> None:
    """Prepare as the command line says."""
    parser = argparse.ArgumentParser(description="Write text files as token files, once, before any training.")
    parser.add_argument("files", type=Path, nargs="+", help="JSONL: text of each line; others: a document each")
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory of a Hugging Face tokenizer")
    parser.add_argument("--output", type=Path, required=True, help="folder of token files")
    parser.add_argument("--name", default="tokens", help="name of the file; another for each process of a large corpus")
    options = parser.parse_args()
    number = prepare(options.files, options.tokenizer, options.output, options.name)
    sys.stdout.write(f"{options.output / options.name}.bin: {number:,} tokens\n")


if __name__ == "__main__":
    main()
