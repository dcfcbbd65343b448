"""The verbs of a booster that save and load."""

from functools import cache
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from colossal._src.booster.plugin.dataloader import check_resumable
from colossal._src.checkpoint_io import CheckpointIO, CheckpointManager
from colossal._src.interface import OptimizerWrapper, copy_written, has_adapters
from colossal.logging import get_dist_logger


class CheckpointMixin:
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

    def save(
        self,
        checkpoint: str | Path,
        model: nn.Module,
        optimizer: OptimizerWrapper | None = None,
        lr_scheduler: LRScheduler | None = None,
        step: int = 0,
        keep: int = 2,
        use_async: bool = False,
        dataloader: DataLoader[Any] | None = None,
    ) -> None:
        """Save all that a run needs to resume: model, optimizer, schedule, generators of random numbers, and the step.

        Call it between steps: gradients are not saved, nor those that are accumulated for the next step.

        The state of each step is a separate directory, ``step-00000100``, which appears atomically when all of it is on
        the disk. A process that is killed at any time leaves the earlier ones as they were.

        Args:
            checkpoint: The directory of all states; it is created.
            model: The boosted model.
            optimizer: The boosted optimizer.
            lr_scheduler: Its schedule.
            step: How many steps have been taken.
            keep: How many states stay, this one included; the oldest are deleted.
            use_async: Return as soon as the state is copied to host memory, as in `save_model`.
            dataloader: The loader from the plugin's `prepare_dataloader`, whose position is saved.

        Raises:
            CheckpointError: Something cannot be written, or an earlier asynchronous save failed; on all ranks.
            ConfigError: `step` is negative, `keep` below 1, or `dataloader` another one; or hyperparameters of the
                optimizer differ between ranks.

        Communication: as in `save_model`, for each of the parts.
        """
        check_resumable(dataloader)
        if isinstance(optimizer, OptimizerWrapper):
            optimizer.check_save()
            if optimizer.has_accumulated_grads:
                _warn_of_gradients(step)
        copy_written(model)
        manager = CheckpointManager(checkpoint, self.checkpoint_io)
        manager.save(model, optimizer, lr_scheduler, step, keep, use_async, dataloader)

    def load(
        self,
        checkpoint: str | Path,
        model: nn.Module,
        optimizer: OptimizerWrapper | None = None,
        lr_scheduler: LRScheduler | None = None,
        step: int | None = None,
        dataloader: DataLoader[Any] | None = None,
    ) -> int:
        """Load what `save` wrote, under any plugin and any number of ranks.

        With as many ranks as before, the random generators continue from their saved states. New ranks start
        streams of their own.

        Args:
            checkpoint: The directory of all states.
            model: The model, boosted or not.
            optimizer: The boosted optimizer.
            lr_scheduler: Its schedule.
            step: Which state; that of the highest step by default.
            dataloader: The loader from the plugin's `prepare_dataloader`: its next iterator begins with the samples
                that no rank had read, in the same epoch, whatever the number of ranks and the size of batches.

        Returns:
            How many steps had been taken.

        Raises:
            CheckpointError: There is no such state, or it is damaged, or of another program; on all ranks.
            ConfigError: `dataloader` is another one, or has another order.

        Communication: as in `load_model`, for each of the parts.
        """
        check_resumable(dataloader)
        manager = CheckpointManager(checkpoint, self.checkpoint_io)
        return manager.load(model, optimizer, lr_scheduler, step, dataloader)

    def latest_step(self, checkpoint: str | Path) -> int | None:
        """Return the step from which a run can resume.

        Args:
            checkpoint: The directory of all states.

        Returns:
            The latest step whose state is there; None if there is none, so that the run begins from the start.

        Communication: all_gather_object, all ranks, a few bytes; none without a plugin.
        """
        return CheckpointManager(checkpoint, self.checkpoint_io).latest

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

        Of a model with adapters of `enable_lora`, the base model is saved under its own names, and the adapters apart
        from it. In a directory they are in the folder ``adapter``: ``from_pretrained(checkpoint)`` of transformers
        loads the base model, and ``PeftModel.from_pretrained(base, f"{checkpoint}/adapter")`` of peft the adapters. One
        file has both, the adapters under the names of peft's files, ``base_model.model.*.lora_A.weight``.

        Args:
            model: The boosted model.
            checkpoint: A file, or with `shard` a folder.
            shard: Write several files and an index, in the format of Hugging Face.
            gather_dtensor: Write full tensors; must be True. No rank gathers them: each writes its shards.
            prefix: Put before the names of the files, with `shard`.
            size_per_shard: Largest size of a file in MB, with `shard`.
            use_safetensors: Write safetensors, which all ranks write in parallel, instead of torch's own format; a
                file whose name ends with ``.safetensors`` is one in any case.
            use_async: Return as soon as the state is copied to host memory; the files are written while training goes
                on. An error is raised by the next call, or makes the program fail when it ends.

        Raises:
            CheckpointError: The checkpoint cannot be written, or an earlier asynchronous save failed; on all ranks.
            UnsupportedError: Not `gather_dtensor`.

        Communication: all_gather_object, all ranks, a few bytes, six times: all learn whether it succeeded. None
        without a plugin.
        """
        if shard and has_adapters(model):
            _say_where_adapters_are()
        copy_written(model)
        self.checkpoint_io.save_model(
            model,
            checkpoint,
            shard=shard,
            gather_dtensor=gather_dtensor,
            prefix=prefix,
            size_per_shard=size_per_shard,
            use_safetensors=use_safetensors,
            use_async=use_async,
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

        Into a model of `enable_lora` go the base model and the adapters. Loading a checkpoint with adapters into one
        without them, or the other way round, is an error unless not `strict`.

        Args:
            model: The model, boosted or not.
            checkpoint: A file or a folder.
            strict: Names in the checkpoint and in the model must be the same.
            low_cpu_mem_mode: Map files of torch's own format; safetensors are always read to where they belong.
            num_threads: Number of threads that read shards.

        Returns:
            The model.

        Raises:
            CheckpointError: The checkpoint is missing, damaged or of another model; on all ranks.

        Communication: as in `save_model`, five times; every rank reads only its shards from the files.
        """
        return self.checkpoint_io.load_model(
            model, checkpoint, strict=strict, low_cpu_mem_mode=low_cpu_mem_mode, num_threads=num_threads
        )

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
            gather_dtensor: Write full tensors; must be True. No rank gathers them: each writes its shards.
            prefix: Put before the names of the files, with `shard`.
            size_per_shard: Largest size of a file in MB, with `shard`.
            use_async: Return as soon as the state is copied to host memory, as in `save_model`.

        Raises:
            CheckpointError: The checkpoint cannot be written, or an earlier asynchronous save failed; on all ranks.
            ConfigError: Hyperparameters of the optimizer differ between ranks.
            UnsupportedError: Not `gather_dtensor`.

        Communication: as in `save_model`.
        """
        if isinstance(optimizer, OptimizerWrapper):
            optimizer.check_save()
        self.checkpoint_io.save_optimizer(
            optimizer,
            checkpoint,
            shard=shard,
            gather_dtensor=gather_dtensor,
            prefix=prefix,
            size_per_shard=size_per_shard,
            use_async=use_async,
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
            low_cpu_mem_mode: Map files of torch's own format; safetensors are always read to where they belong.
            num_threads: Number of threads that read shards.

        Raises:
            CheckpointError: The checkpoint is missing, damaged or of another model; on all ranks.

        Communication: as in `load_model`.
        """
        self.checkpoint_io.load_optimizer(
            optimizer, checkpoint, low_cpu_mem_mode=low_cpu_mem_mode, num_threads=num_threads
        )

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Save the state of a schedule.

        Args:
            lr_scheduler: The schedule.
            checkpoint: A file.

        Raises:
            CheckpointError: The checkpoint cannot be written; on all ranks.

        Communication: as in `save_model`.
        """
        self.checkpoint_io.save_lr_scheduler(lr_scheduler, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Load what `save_lr_scheduler` wrote.

        Args:
            lr_scheduler: The schedule.
            checkpoint: A file.

        Raises:
            CheckpointError: The checkpoint is missing, damaged or of another schedule; on all ranks.

        Communication: as in `save_model`, twice.
        """
        self.checkpoint_io.load_lr_scheduler(lr_scheduler, checkpoint)


def _warn_of_gradients(step: int) -> None:
    get_dist_logger().warning(
        f"A checkpoint holds no gradients. Found some in booster.save of step {step}, of backward passes since the "
        "last optimizer.step: a run that resumes makes its next step without them. Save after optimizer.step, and not "
        "while gradients are accumulated.",
        ranks=[0],
    )


@cache
def _say_where_adapters_are() -> None:
    get_dist_logger().info(
        "save_model writes the base model of a model with adapters into the directory, which from_pretrained loads "
        "without them, and the adapters into its folder adapter: PeftModel.from_pretrained(base, "
        'f"{directory}/adapter"). For the adapters alone call booster.save_lora_as_pretrained(model, directory); for '
        "a model with them in its weights save what model.unwrap(unwrap_peft=False).merge_and_unload() returns.",
        ranks=[0],
    )
