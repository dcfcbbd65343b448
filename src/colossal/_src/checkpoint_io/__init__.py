"""Rest: what a run needs to go on later, in files that Hugging Face and plain PyTorch read as well."""

from colossal._src.checkpoint_io.api import CheckpointIO, GeneralCheckpointIO
from colossal._src.checkpoint_io.checkpoint_group import CheckpointGroup, ProcessGroupIO, SingleProcessIO
from colossal._src.checkpoint_io.checkpoint_manager import CheckpointManager
from colossal._src.checkpoint_io.index_file import CheckpointIndexFile
from colossal._src.checkpoint_io.model_config import adapter_config_file
from colossal._src.checkpoint_io.naming import ADAPTER_CONFIG, ADAPTERS
from colossal._src.checkpoint_io.staging import Staging, prepare_directory

__all__ = [
    "ADAPTERS",
    "ADAPTER_CONFIG",
    "CheckpointGroup",
    "CheckpointIO",
    "CheckpointIndexFile",
    "CheckpointManager",
    "GeneralCheckpointIO",
    "ProcessGroupIO",
    "SingleProcessIO",
    "Staging",
    "adapter_config_file",
    "prepare_directory",
]
