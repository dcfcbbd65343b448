"""The verbs of a booster that save and load."""

from pathlib import Path

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from colossal.checkpoint_io import CheckpointIO
from colossal.interface import OptimizerWrapper


class CheckpointVerbs:
    """What `Booster` does with checkpoints; how, is the business of the plugin's `CheckpointIO`.

    Attributes:
        checkpoint_io: What reads and writes checkpoints.

    Example:
        >>> import tempfile, torch
        >>> from colossal.booster import Booster
        >>> booster, path = Booster(device="cpu"), tempfile.mkdtemp() + "/model.safetensors"
        >>> model, *_ = booster.boost(torch.nn.Linear(2, 1))
        >>> booster.save_model(model, path, use_safetensors=True)
        >>> booster.load_model(model, path) is model
        True
    """

    checkpoint_io: CheckpointIO

    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: float = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:
        """Save the parameters and buffers of a model, under the names of the unwrapped model.

        Args:
            model: The boosted model.
            checkpoint: A file, or with `shard` a folder.
            shard: Write several files and an index, in the format of Hugging Face.
            gather_dtensor: Write whole tensors.
            prefix: Put in front of the files' names, with `shard`.
            size_per_shard: Largest size of a file in MB, with `shard`.
            use_safetensors: Write safetensors instead of torch's own format.
            use_async: Return before the files are written.

        Raises:
            CheckpointError: The checkpoint can not be written; on all ranks alike.
            UnsupportedError: An option is not built yet.

        Communication: all_gather_object, the world, a few bytes: all learn how it went; none without a plugin.
        """
        self.checkpoint_io.save_model(
            model, checkpoint, shard, gather_dtensor, prefix, size_per_shard, use_safetensors, use_async
        )

    def load_model(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> nn.Module:
        """Load what `save_model` wrote; the format is found out from the files.

        Args:
            model: The model, boosted or not.
            checkpoint: A file or a folder.
            strict: Names in the checkpoint and in the model must be the same.
            low_cpu_mem_mode: Hold at most one shard in memory besides the model.
            num_threads: Number of threads that read shards.

        Returns:
            The model.

        Raises:
            CheckpointError: The checkpoint is missing, damaged or of another model; on all ranks alike.

        Communication: as in `save_model`, three times; every rank reads the files by itself.
        """
        return self.checkpoint_io.load_model(model, checkpoint, strict, low_cpu_mem_mode, num_threads)

    def save_optimizer(
        self,
        optimizer: OptimizerWrapper,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: float = 1024,
        use_async: bool = False,
    ) -> None:
        """Save the state of an optimizer, under the names of its parameters, and its loss scale.

        Args:
            optimizer: The boosted optimizer.
            checkpoint: A file, or with `shard` a folder.
            shard: Write several files and an index.
            gather_dtensor: Write whole tensors.
            prefix: Put in front of the files' names, with `shard`.
            size_per_shard: Largest size of a file in MB, with `shard`.
            use_async: Return before the files are written.

        Raises:
            CheckpointError: The checkpoint can not be written; on all ranks alike.
            UnsupportedError: An option is not built yet.

        Communication: as in `save_model`.
        """
        self.checkpoint_io.save_optimizer(
            optimizer, checkpoint, shard, gather_dtensor, prefix, size_per_shard, use_async
        )

    def load_optimizer(
        self,
        optimizer: OptimizerWrapper,
        checkpoint: str | Path,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Load what `save_optimizer` wrote.

        Args:
            optimizer: The boosted optimizer.
            checkpoint: A file or a folder.
            low_cpu_mem_mode: Hold at most one shard in memory besides the state.
            num_threads: Number of threads that read shards.

        Raises:
            CheckpointError: The checkpoint is missing, damaged or of another model; on all ranks alike.

        Communication: as in `load_model`.
        """
        self.checkpoint_io.load_optimizer(optimizer, checkpoint, low_cpu_mem_mode, num_threads)

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Save the state of a schedule.

        Args:
            lr_scheduler: The schedule.
            checkpoint: A file.

        Raises:
            CheckpointError: The checkpoint can not be written; on all ranks alike.

        Communication: as in `save_model`.
        """
        self.checkpoint_io.save_lr_scheduler(lr_scheduler, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Load what `save_lr_scheduler` wrote.

        Args:
            lr_scheduler: The schedule.
            checkpoint: A file.

        Raises:
            CheckpointError: The checkpoint is missing, damaged or of another schedule; on all ranks alike.

        Communication: as in `save_model`, twice.
        """
        self.checkpoint_io.load_lr_scheduler(lr_scheduler, checkpoint)
