"""Token files and images on disk as datasets: memory maps of which only the samples of a batch are read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from colossal.errors import ConfigError

IGNORED = -100
"""A label that does not count."""
PREDICTED = 0.15
"""How many tokens BERT predicts."""
MASKED, KEPT = 0.8, 0.1
"""How many of these become the mask token, and how many stay; the rest become random tokens."""

Sample = dict[str, torch.Tensor]


@final
class Windows(Dataset[Sample]):
    """Windows of a folder of token files, for causal language models; the model shifts the labels.

    Args:
        folder: What `prepare` wrote: `tokens.json` and files of nothing but tokens.
        length: Tokens of a window; those at the end of a file that do not fill one are left out.

    Raises:
        ConfigError: There is no `tokens.json`, or no file fills a window.
    """

    def __init__(self, folder: Path, length: int) -> None:
        if not (folder / "tokens.json").exists():
            raise ConfigError(
                f"A folder of token files has tokens.json, which says what they are. Found no tokens.json in {folder}. "
                "Pass the --output of prepare.py, which writes it last: run it again if it was stopped."
            )
        self.info: dict[str, Any] = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
        paths = [path for path in sorted(folder.glob("*.bin")) if path.stat().st_size]  # an empty file has no map
        files = [np.memmap(path, dtype=self.info["dtype"], mode="r") for path in paths]
        self._files = [file[: len(file) // length * length].reshape(-1, length) for file in files]
        if not any(map(len, self._files)):
            raise ConfigError(
                f"A sample has --length {length} tokens of one file. Found {sum(map(len, files))} tokens in "
                f"{len(files)} files *.bin of {folder}. Pass a smaller --length, or prepare more data."
            )
        self._ends = np.cumsum([len(file) for file in self._files])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Sample:
        number = int(np.searchsorted(self._ends, index, side="right"))
        start = int(self._ends[number - 1]) if number else 0
        tokens = torch.from_numpy(self._files[number][index - start].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


@final
class MaskedWindows(Dataset[Sample]):
    """Windows of which BERT predicts some tokens; which ones depends on seed, epoch and index alone.

    Args:
        windows: The windows, or some of them.
        info: What `tokens.json` says.
        seed: What the drawing starts from.
    """

    def __init__(self, windows: Dataset[Sample], info: Mapping[str, Any], seed: int) -> None:
        self._windows: Any = windows
        self._info, self._seed, self._epoch = info, seed, 0
        if info["mask_token"] is None:
            raise ConfigError(
                "BERT needs a tokenizer with a mask token. Found none in tokens.json. Prepare the data anew."
            )

    def __len__(self) -> int:
        return len(self._windows)

    def set_epoch(self, epoch: int) -> None:
        """Draw anew."""
        self._epoch = epoch

    def __getitem__(self, index: int) -> Sample:
        tokens = self._windows[index]["input_ids"].numpy()
        generator = np.random.default_rng((self._seed, self._epoch, index))
        is_predicted = (generator.random(len(tokens)) < PREDICTED) & ~np.isin(tokens, self._info["special_tokens"])
        fate = generator.random(len(tokens))
        drawn = generator.integers(self._info["vocab_size"], size=len(tokens))
        replaced = np.where(fate < MASKED, self._info["mask_token"], np.where(fate < MASKED + KEPT, tokens, drawn))
        return {
            "input_ids": torch.from_numpy(np.where(is_predicted, replaced, tokens)),
            "labels": torch.from_numpy(np.where(is_predicted, tokens, IGNORED)),
        }


@final
class Images(Dataset[Sample]):
    """Images of one size with their classes.

    Args:
        folder: Has `images.npy`, uint8 (images, channels, height, width), and `labels.npy`, an integer for each.

    Raises:
        ConfigError: A file is missing, or there are not as many labels as images.
    """

    def __init__(self, folder: Path) -> None:
        if missing := [name for name in ("images.npy", "labels.npy") if not (folder / name).exists()]:
            raise ConfigError(
                f"A folder of images has images.npy and labels.npy. Found no {' and no '.join(missing)} in {folder}. "
                "Write them by numpy.save: uint8 (images, channels, height, width), and an integer for each."
            )
        self.images, self.labels = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("images", "labels"))
        if len(self.images) != len(self.labels):
            raise ConfigError(
                f"Each image has a label. Found {len(self.images)} images and {len(self.labels)} labels in {folder}. "
                "Write images.npy and labels.npy anew, together."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        pixels = torch.from_numpy(self.images[index].astype(np.float32))
        return {"pixel_values": pixels / 127.5 - 1, "labels": torch.tensor(int(self.labels[index]))}


def split(dataset: Any, num_tests: int) -> list[Dataset[Sample]]:
    """Take the last samples of a dataset for evaluation, without copying any."""
    num_samples = len(dataset) - num_tests
    return [Subset(dataset, range(num_samples)), Subset(dataset, range(num_samples, len(dataset)))]
