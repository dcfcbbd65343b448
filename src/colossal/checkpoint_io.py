"""Checkpoints that Hugging Face and plain PyTorch read as well, saved and loaded at any world size."""

from colossal._src.checkpoint_io import (
    CheckpointGroup,
    CheckpointIndexFile,
    CheckpointIO,
    GeneralCheckpointIO,
    ProcessGroupIO,
    SingleProcessIO,
)

__all__ = [
    "CheckpointGroup",
    "CheckpointIO",
    "CheckpointIndexFile",
    "GeneralCheckpointIO",
    "ProcessGroupIO",
    "SingleProcessIO",
]
