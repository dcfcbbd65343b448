"""Rest: what a run needs to go on later, in files that Hugging Face and plain PyTorch read as well."""

from colossal._src.checkpoint_io import (
    CheckpointIndexFile,
    CheckpointIO,
    GeneralCheckpointIO,
    ProcessGroupIO,
    SingleProcessIO,
)

__all__ = ["CheckpointIO", "CheckpointIndexFile", "GeneralCheckpointIO", "ProcessGroupIO", "SingleProcessIO"]
