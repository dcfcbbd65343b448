"""Rest: what a run needs to go on later, in files that Hugging Face and plain PyTorch read as well."""

from colossal._src.checkpoint_io.api import CheckpointIO, GeneralCheckpointIO
from colossal._src.checkpoint_io.checkpoint_group import CheckpointGroup, ProcessGroupIO, SingleProcessIO
from colossal._src.checkpoint_io.checkpoint_manager import CheckpointManager
from colossal._src.checkpoint_io.index_file import CheckpointIndexFile

__all__ = [
    "CheckpointGroup",
    "CheckpointIO",
    "CheckpointIndexFile",
    "CheckpointManager",
    "GeneralCheckpointIO",
    "ProcessGroupIO",
    "SingleProcessIO",
]
