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

from colossal.errors import ConfigError

_DOCUMENTS_AT_ONCE = 256


def _documents(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        if not path.is_file():
            raise ConfigError(
                f"A corpus is text files and JSONL files. Found {'a directory' if path.is_dir() else 'no file'} at "
                f"{path}. Pass the files, as corpus/*.jsonl."
            )
        try:
            with path.open(encoding="utf-8") as file:
                if path.suffix != ".jsonl":
                    yield file.read()
                    continue
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield _text_of(line, f"{path}:{number}")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"Files are texts in UTF-8. Found {error} in {path}. Unpack or convert it, or leave it out."
            ) from None


def _text_of(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        row = error
    found = row.get("text") if isinstance(row, dict) else None
    if not isinstance(found, str):
        shown = f"an object with {', '.join(row)}" if isinstance(row, dict) else row
        raise ConfigError(
            f"A JSONL file has a JSON object in each line, whose text is a string. Found {shown} in {where}. Rename "
            "the key, or leave the line out."
        )
    return found


def prepare(paths: Iterable[Path], tokenizer_dir: Path, folder: Path, name: str = "tokens") -> int:
    """Append the tokens of all documents to one file, and say next to it what they are.

    Args:
        paths: JSONL files with a document in `text` of each line, and text files of one document each.
        tokenizer_dir: Directory of a Hugging Face tokenizer.
        folder: Gets `name.bin`, `tokens.json` and the tokenizer.
        name: Another one for each process that prepares a part of the corpus.

    Returns:
        The number of tokens.

    Raises:
        ConfigError: A file is no text, a line of JSONL has none, or the folder has files of another tokenizer.
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
    _check_folder(folder, name, info)
    tokenizer.save_pretrained(folder)
    number, unfinished = 0, folder / f"{name}.bin.tmp"
    with unfinished.open("wb") as file:
        documents = _documents(paths)
        while texts := list(islice(documents, _DOCUMENTS_AT_ONCE)):
            for ids in tokenizer(texts, verbose=False).input_ids:
                ids = ids if end and ids[-1:] == end else ids + end  # noqa: PLW2901 (some tokenizers have added it)
                np.array(ids, dtype=info["dtype"]).tofile(file)
                number += len(ids)
    # only now: a part of the corpus under this name would be trained on as if it were everything
    unfinished.replace(folder / f"{name}.bin")
    (folder / "tokens.json").write_text(json.dumps(info), encoding="utf-8")
    return number


def _check_folder(folder: Path, name: str, info: dict[str, Any]) -> None:
    """Refuse to write next to files of another tokenizer: their tokens would be read as those of this one."""
    others = [path.name for path in sorted(folder.glob("*.bin")) if path.stem != name]
    known = folder / "tokens.json"
    if others and known.exists() and json.loads(known.read_text(encoding="utf-8")) != info:
        raise ConfigError(
            f"All token files of a folder are of one tokenizer. Found {', '.join(others)} of another one in {folder}. "
            "Pass another --output, or delete them."
        )


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
