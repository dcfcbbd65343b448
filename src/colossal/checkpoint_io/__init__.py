"""Rest: what a run needs to go on later, in files that Hugging Face and plain PyTorch read as well."""

from colossal.checkpoint_io.api import CheckpointIO, GeneralCheckpointIO
from colossal.checkpoint_io.index_file import CheckpointIndexFile
from colossal.checkpoint_io.steps import Steps
from colossal.checkpoint_io.writers import Alone, OneForAll, Writers

__all__ = ["Alone", "CheckpointIO", "CheckpointIndexFile", "GeneralCheckpointIO", "OneForAll", "Steps", "Writers"]
