"""Saving and loading models, optimizers and learning rate schedulers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, final

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colossal._src.checkpoint_io.checkpoint_group import CheckpointGroup, SingleProcessIO
from colossal._src.checkpoint_io.content import MIB, Content, Entry, ParameterContent, extract_tensors, plan_files
from colossal._src.checkpoint_io.destination import Destination, ShardedDestination, SingleFileDestination
from colossal._src.checkpoint_io.file_writers import FileWriter, SafetensorsWriter
from colossal._src.checkpoint_io.index_and_names import OLD_OPTIMIZER, OPTIMIZER, full_path
from colossal._src.checkpoint_io.optimizer_state import OptimizerState, plain_of
from colossal._src.checkpoint_io.save_queue import SaveQueue
from colossal._src.checkpoint_io.source import Source, read_plain
from colossal._src.interface import OptimizerWrapper
from colossal.errors import ConfigError, UnsupportedError

M = TypeVar("M", bound=nn.Module)


@final
class CheckpointIO:
    """Saves and loads what a run needs to go on later, under any plugin and any number of ranks.

    A checkpoint holds full tensors under the names of the user's own model, so that any plugin at any world size loads
    what another one saved. Each rank writes and reads its local shards only. Writes are atomic. Loading detects the
    format, never executes pickle, compares names and shapes before it changes anything, and checks the bytes against
    their digests.

    Args:
        writers: The ranks that save and load one checkpoint together; only the calling process by default.
        member: Load this entry of a file of PyTorch's format that holds several states by name, such as ``"model"`` of
            ``{"epoch": ..., "model": ..., "optimizer": ...}``; the content of the file by default. Saving ignores it.

    Example:
        >>> import tempfile, torch
        >>> from colossal.checkpoint_io import CheckpointIO
        >>> path = tempfile.mkdtemp() + "/linear.pt"
        >>> saved, fresh = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> CheckpointIO().save_model(saved, path)
        >>> fresh = CheckpointIO().load_model(fresh, path)
        >>> torch.equal(fresh.weight, saved.weight)
        True
    """

    def __init__(self, writers: CheckpointGroup | None = None, member: str | None = None) -> None:
        self._writers, self._member = writers or SingleProcessIO(), member
        self._save_queue = SaveQueue(self._writers)

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
        """Save the parameters and persistent buffers of a model.

        Of a model with adapters of peft, the base model is saved under its own names, and the adapters apart from it:
        in the folder ``adapter`` of a directory, from which peft loads them; under peft's names in the same file.

        Args:
            model: The model, boosted or not.
            checkpoint: Path of the file, or of the directory if `shard`. Its parents are created.
            shard: Save a directory in the format of Hugging Face, from which ``from_pretrained`` loads a model of
                transformers.
            gather_dtensor: Save full tensors; must be True. No rank gathers them for safetensors: each rank writes
                its local shards into the file.
            prefix: Prepended to the names of the files in a directory, with a dot.
            size_per_shard: Largest size of a file of a directory, in MB of 1024 * 1024 bytes. A larger tensor gets a
                file of its own.
            use_safetensors: Write safetensors, each rank its local shards, rather than PyTorch's own format, for which
                the first rank gathers each file. A file named ``*.safetensors`` is one in any case.
            use_async: Return as soon as the state is copied to host memory. An error of the write that follows is
                raised by the next call, by `synchronize`, or makes the program fail when it ends.

        Raises:
            CheckpointError: A file cannot be written, or an earlier asynchronous save failed. The previous
                checkpoint at that path stays intact.
            ConfigError: `prefix` or `size_per_shard` makes no sense.
            UnsupportedError: Not `gather_dtensor`.

        Communication: for `ProcessGroupIO` six times all_gather_object, the group, a few bytes; in addition, PyTorch's
        format gathers DTensors. For `SingleProcessIO` none.
        """
        _require_full_tensors(gather_dtensor)
        from colossal._src.checkpoint_io.model_save_plan import ModelSavePlan

        path = full_path(checkpoint, use_async)
        one = ModelSavePlan(model, path, shard, prefix, size_per_shard, use_safetensors, self._writers)
        self._save_queue.save(one.collect_content, one.make_writer, one.destination, use_async)

    def load_model(
        self,
        model: M,
        checkpoint: str | Path,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> M:
        """Load the parameters and buffers of a model, in the dtypes and on the devices that the model has.

        A model with adapters needs a checkpoint with adapters, and any other model one without, unless not `strict`.

        Args:
            model: The model, boosted or not.
            checkpoint: Path of a file, of an index, or of a directory that holds one checkpoint.
            strict: Require that the names agree. A tensor with several names needs one of them.
            low_cpu_mem_mode: Map files of PyTorch's format rather than read them entirely. Safetensors are always
                read directly into the parameters.
            num_threads: Number of files that are read at once.

        Returns:
            `model` itself.

        Raises:
            CheckpointError: The checkpoint is missing, damaged, or of another model. Nothing was loaded then, unless
                the message says that bytes did not fit their digest, or that ranks have read different files.
            ConfigError: `num_threads` is less than 1.

        Communication: for `ProcessGroupIO` five times all_gather_object, the group, a few bytes, and 16 bytes for each
        replicated tensor of a rank; for `SingleProcessIO` none.
        """
        from colossal._src.checkpoint_io.loading import opened_model

        _check_threads(num_threads)
        self._save_queue.wait_until_saved()
        options = {"mmap": low_cpu_mem_mode, "num_threads": num_threads, "member": self._member}
        with opened_model(self._writers, model, checkpoint, strict=strict, **options) as load:
            load()
        return model

    def save_lora_as_pretrained(self, model: nn.Module, checkpoint: str | Path, use_safetensors: bool = False) -> None:
        """Save the adapters of a model alone, into a directory that peft loads.

        Args:
            model: A model of `Booster.enable_lora`, boosted or not.
            checkpoint: The directory; it is created. Adapters that are there already are replaced.
            use_safetensors: Write safetensors rather than PyTorch's own format.

        Raises:
            ConfigError: The model has no adapters.
            CheckpointError: A file cannot be written; on all ranks.

        Communication: that of `save_model` with the adapters alone, and for `ProcessGroupIO` twice all_gather_object,
        the group, a few bytes.
        """
        from colossal._src.checkpoint_io.adapter_directory import AdapterDirectory

        directory = AdapterDirectory(model, full_path(checkpoint), use_safetensors)
        self._writers.write(directory.prepare)
        self.save_model(directory.adapters, directory.aside, use_safetensors=use_safetensors)
        self._writers.write(directory.publish)

    def save_optimizer(
        self,
        optimizer: Optimizer | OptimizerWrapper,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: float = 1024,
        use_async: bool = False,
    ) -> None:
        """Save the state of an optimizer, its groups' hyperparameters, and the state of its loss scaler.

        Args:
            optimizer: The optimizer, boosted or not. State is saved by name where the names are known.
            checkpoint: Path of the file, or of the directory if `shard`. Its parents are created.
            shard: Save a directory.
            gather_dtensor: Save full tensors; must be True.
            prefix: Prepended to the names of the files in a directory, with a dot.
            size_per_shard: Largest size of a file of a directory, in MB of 1024 * 1024 bytes.
            use_async: Return as soon as the state is copied to host memory, as in `save_model`.

        Raises:
            CheckpointError: A file cannot be written, or an earlier asynchronous save failed. The previous
                checkpoint at that path stays intact.
            ConfigError: `prefix` or `size_per_shard` makes no sense.
            UnsupportedError: Not `gather_dtensor`.

        Communication: for `ProcessGroupIO` six times all_gather_object, the group, a few bytes; for
        `SingleProcessIO` none.
        """
        _require_full_tensors(gather_dtensor)
        path, names = full_path(checkpoint, use_async), OPTIMIZER.with_prefix(prefix)
        rivals = [kind.with_prefix(prefix) for kind in (OPTIMIZER, OLD_OPTIMIZER)]

        def collect_content() -> Content:
            return OptimizerState(optimizer, self._writers.rank).content(self._writers.ranks)

        def make_writer(content: Content, save_id: str) -> FileWriter:
            files = [*plan_files(content.entries, size_per_shard * MIB), []] if shard else [content.entries]
            return SafetensorsWriter(files, save_id, self._writers.rank, plain_of(content))

        def destination() -> Destination:
            return ShardedDestination(path, names, rivals, groups=True) if shard else SingleFileDestination(path)

        self._save_queue.save(collect_content, make_writer, destination, use_async)

    def load_optimizer(
        self,
        optimizer: Optimizer | OptimizerWrapper,
        checkpoint: str | Path,
        prefix: str | None = None,  # noqa: ARG002 (documented)
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Load the state of an optimizer, its groups' hyperparameters, and the state of its loss scaler.

        State is matched by name: the parameters may stand in another order, and so may the groups, but each group must
        be of the same parameters.

        Args:
            optimizer: The optimizer, boosted or not.
            checkpoint: Path of a file, of an index, or of a directory that holds one checkpoint.
            prefix: Accepted as documented: an index names the files, whatever they begin with.
            low_cpu_mem_mode: Map files of PyTorch's format rather than read them entirely.
            num_threads: Number of tensors that are read at once.

        Raises:
            CheckpointError: The checkpoint is missing, damaged, or of other parameters. Nothing was loaded then, unless
                the message says that bytes did not fit their digest.
            ConfigError: `num_threads` is less than 1.

        Communication: for `ProcessGroupIO` four times all_gather_object, the group, a few bytes; for
        `SingleProcessIO` none.
        """
        from colossal._src.checkpoint_io.loading import opened_optimizer

        _check_threads(num_threads)
        self._save_queue.wait_until_saved()
        options = {"mmap": low_cpu_mem_mode, "num_threads": num_threads, "member": self._member}
        with opened_optimizer(self._writers, optimizer, checkpoint, **options) as load:
            load()

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Save the state of a learning rate scheduler to one file.

        Args:
            lr_scheduler: The scheduler.
            checkpoint: Path of the file. Its parents are created.

        Raises:
            CheckpointError: The file cannot be written, or the state is not plain data.

        Communication: for `ProcessGroupIO` six times all_gather_object, the group, a few bytes; for
        `SingleProcessIO` none.
        """
        self.save_plain(lambda: lr_scheduler.state_dict(), checkpoint)  # noqa: PLW0108 - looked up where ranks agree

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Load the state of a learning rate scheduler.

        Args:
            lr_scheduler: A scheduler of the class that was saved.
            checkpoint: Path of the file.

        Raises:
            CheckpointError: The file is missing, damaged, or of another kind of scheduler.

        Communication: for `ProcessGroupIO` five times all_gather_object, the group, a few bytes; for
        `SingleProcessIO` none.
        """
        from colossal._src.checkpoint_io.loading import checked_schedule

        checked_schedule(self._writers, lr_scheduler, self.load_plain(checkpoint), checkpoint)()

    def save_plain(self, state: Callable[[], Any], checkpoint: str | Path, use_async: bool = False) -> None:
        """Save numbers, strings and tensors, nested in dicts and lists, to one file; those of the first rank.

        Args:
            state: Returns them.
            checkpoint: Path of the file. Its parents are created.
            use_async: Return before the file is written, as in `save_model`.

        Raises:
            CheckpointError: The file cannot be written, or the state is not plain data.

        Communication: for `ProcessGroupIO` six times all_gather_object, the group, a few bytes; for
        `SingleProcessIO` none.

        Example:
            >>> import tempfile
            >>> from colossal.checkpoint_io import CheckpointIO
            >>> path = tempfile.mkdtemp() + "/progress"
            >>> CheckpointIO().save_plain(lambda: {"epoch": 3}, path)
            >>> CheckpointIO().load_plain(path)
            {'epoch': 3}
        """

        def collect_content() -> Content:
            plain, tensors = extract_tensors(state())
            entries = tuple(Entry.of([name], tensor, self._writers.ranks) for name, tensor in tensors.items())
            return Content({None: ParameterContent(entries, plain)}, [None])

        def make_writer(content: Content, save_id: str) -> FileWriter:
            return SafetensorsWriter([content.entries], save_id, self._writers.rank, content.plain[None])

        path = full_path(checkpoint, use_async)
        self._save_queue.save(collect_content, make_writer, lambda: SingleFileDestination(path), use_async)

    def load_plain(self, checkpoint: str | Path) -> Any:
        """Load what `save_plain` wrote, or a dict that PyTorch saved.

        Args:
            checkpoint: Path of the file.

        Returns:
            The data; tensors on the CPU.

        Raises:
            CheckpointError: The file is missing or damaged.

        Communication: for `ProcessGroupIO` three times all_gather_object, the group, a few bytes; for
        `SingleProcessIO` none.
        """
        self._save_queue.wait_until_saved()
        path, mmap = full_path(checkpoint), self._member is not None
        with self._writers.read(lambda: Source.find(path, (), mmap, self._member)) as source:
            return self._writers.read(partial(read_plain, source))

    def synchronize(self) -> None:
        """Wait until everything that was saved is on the disk.

        Raises:
            CheckpointError: An asynchronous save failed since the last call.

        Communication: for `ProcessGroupIO` one all_gather_object, the group, a few bytes; for
        `SingleProcessIO` none.
        """
        self._save_queue.wait_until_saved()

    def after(self, job: Callable[[], None], use_async: bool = False, always: bool = False) -> None:
        """Do something on the first rank once everything saved so far is on the disk, such as deleting what is old.

        Args:
            job: Takes a moment only.
            use_async: Return before it is done, as in `save_model`. It is left out if one of the saves fails.
            always: Do it even if one of them fails.

        Raises:
            CheckpointError: It failed, or an earlier asynchronous save did.

        Communication: for `ProcessGroupIO` twice all_gather_object, the group, a few bytes; for
        `SingleProcessIO` none.

        Example:
            >>> from colossal.checkpoint_io import CheckpointIO
            >>> CheckpointIO().after(lambda: print("all is on the disk"))
            all is on the disk
        """
        self._save_queue.after(job, use_async, always)

    @property
    def writers(self) -> CheckpointGroup:
        """The ranks that save and load one checkpoint together."""
        return self._writers


GeneralCheckpointIO = CheckpointIO
"""`CheckpointIO` under the name that a process on its own knows it by."""


def _require_full_tensors(gather_dtensor: bool) -> None:
    if not gather_dtensor:
        raise UnsupportedError(
            "A checkpoint holds full tensors, so that a job of any world size can load it. Found gather_dtensor=False. "
            "Leave it True: with use_safetensors=True no rank gathers anything, each rank writes its local shards."
        )


def _check_threads(num_threads: int) -> None:
    if num_threads < 1:
        raise ConfigError(f"Reading needs at least one thread. Found num_threads={num_threads}. The default is 1.")
