"""Saving and loading models, optimizers and learning rate schedulers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, final

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colossal.checkpoint_io.model_config import model_config_files
from colossal.checkpoint_io.model_state import ModelState, shape_of, unwrap_model
from colossal.checkpoint_io.naming import MODEL, OPTIMIZER, listing
from colossal.checkpoint_io.optimizer_state import OptimizerState
from colossal.checkpoint_io.shards import MIB, ShardReader, ShardWriter, merge, open_checkpoint, plan_shards
from colossal.checkpoint_io.staging import Staging, prepare_directory, prepare_file
from colossal.checkpoint_io.tensor_file import read_tensor_file, require_safetensors, write_safetensors, write_torch
from colossal.checkpoint_io.writers import Alone, Writers
from colossal.errors import CheckpointError, UnsupportedError
from colossal.interface import OptimizerWrapper

M = TypeVar("M", bound=nn.Module)
_MODEL_KINDS = tuple(MODEL.values())


@final
class CheckpointIO:
    """Saves and loads what a run needs to go on later.

    Files appear whole or not at all. Loading finds out the format by itself, never executes pickle, and compares names
    and shapes before it changes anything.

    Args:
        writers: Who writes and how the ranks agree; the calling process on its own by default.

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

    def __init__(self, writers: Writers | None = None) -> None:
        self._writers = writers or Alone()

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

        Args:
            model: The model, boosted or not.
            checkpoint: Path of the file, or of the directory if `shard`. Its parents are created.
            shard: Save a directory in the format of Hugging Face, from which ``from_pretrained`` loads a model of
                transformers.
            gather_dtensor: Save whole tensors; must be True.
            prefix: Put in front of the names of the files of a directory, with a dot.
            size_per_shard: Largest size of a file of a directory, in MB of 1024 * 1024 bytes. A larger tensor gets a
                file of its own.
            use_safetensors: Write safetensors rather than PyTorch's own format.
            use_async: Return before the files are written; must be False.

        Raises:
            CheckpointError: A file cannot be written. What was saved there before is whole.
            ConfigError: `prefix` or `size_per_shard` makes no sense.
            UnsupportedError: `use_async`, or not `gather_dtensor`, or the package safetensors is not installed.

        Communication: for `OneForAll` one all_gather_object, the group, a few bytes; for `Alone` none.
        """
        _refuse(gather_dtensor, use_async)
        dump = write_safetensors if use_safetensors else write_torch
        user_model, path = unwrap_model(model), Path(checkpoint)

        def save_file(state: ModelState) -> None:
            content = merge(state.units(keep_aliases=False)) if use_safetensors else state.full()
            _save_file(path, lambda target: dump(target, content))

        def save_directory(state: ModelState) -> None:
            units = state.units(keep_aliases=not use_safetensors)
            kinds = {key: kind.with_prefix(prefix) for key, kind in MODEL.items()}
            shards = plan_shards(units, size_per_shard * MIB)
            writer = ShardWriter(prepare_directory(path), kinds[use_safetensors], dump, list(kinds.values()))
            with model_config_files(user_model) as extras:
                writer.write(shards, {"total_size": sum(unit.num_bytes for unit in units)}, extras)

        def save() -> None:
            if use_safetensors:
                require_safetensors()
            (save_directory if shard else save_file)(ModelState(user_model))

        self._writers.write(save)

    def load_model(
        self,
        model: M,
        checkpoint: str | Path,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> M:
        """Load the parameters and buffers of a model, in the dtypes and on the devices that the model has.

        Args:
            model: The model, boosted or not.
            checkpoint: Path of a file, of an index, or of a directory that holds one checkpoint.
            strict: Require that the names agree. A tensor with several names needs one of them.
            low_cpu_mem_mode: Hold about one file at a time in memory, rather than all of them.
            num_threads: Number of files that are read at once.

        Returns:
            `model` itself.

        Raises:
            CheckpointError: The checkpoint is missing, damaged, or of another model. Nothing was loaded then.
            ConfigError: `num_threads` is less than 1.
            UnsupportedError: The package safetensors is needed and not installed.

        Communication: for `OneForAll` three times all_gather_object, the group, a few bytes; for `Alone` none.
        """
        state = self._writers.read(lambda: ModelState(unwrap_model(model)))

        def check() -> ShardReader:
            reader = open_checkpoint(Path(checkpoint), _MODEL_KINDS, low_cpu_mem_mode, num_threads)
            contents = reader.contents(ahead=True)
            state.check({k: shape_of(v) for _, part in contents for k, v in part.items()}, strict, checkpoint)
            return reader

        def fill(reader: ShardReader) -> None:
            for _, content in reader.contents():
                state.fill(content)

        reader = self._writers.read(check)
        self._writers.read(lambda: fill(reader))
        return model

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
            gather_dtensor: Save whole tensors; must be True.
            prefix: Put in front of the names of the files of a directory, with a dot.
            size_per_shard: Largest size of a file of a directory, in MB of 1024 * 1024 bytes. The state of one
                parameter is never cut.
            use_async: Return before the files are written; must be False.

        Raises:
            CheckpointError: A file cannot be written. What was saved there before is whole.
            ConfigError: `prefix` or `size_per_shard` makes no sense.
            UnsupportedError: `use_async`, or not `gather_dtensor`.

        Communication: for `OneForAll` one all_gather_object, the group, a few bytes; for `Alone` none.
        """
        _refuse(gather_dtensor, use_async)
        path = Path(checkpoint)

        def save_file() -> None:
            state = OptimizerState(optimizer)
            content = {"state": merge(state.units()), **state.header()}
            _save_file(path, lambda target: write_torch(target, content))

        def save_directory() -> None:
            state, names = OptimizerState(optimizer), OPTIMIZER.with_prefix(prefix)
            units = state.units()
            shards = plan_shards(units, size_per_shard * MIB)
            metadata = {"total_size": sum(unit.num_bytes for unit in units), "param_groups": names.groups}
            extras = {names.groups: lambda target: write_torch(target, state.header())}
            ShardWriter(prepare_directory(path), names, write_torch, [names]).write(shards, metadata, extras)

        self._writers.write(save_directory if shard else save_file)

    def load_optimizer(
        self,
        optimizer: Optimizer | OptimizerWrapper,
        checkpoint: str | Path,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Load the state of an optimizer, its groups' hyperparameters, and the state of its loss scaler.

        State is matched by name: the parameters may stand in another order, and so may the groups, but each group must
        be of the same parameters.

        Args:
            optimizer: The optimizer, boosted or not.
            checkpoint: Path of a file, of an index, or of a directory that holds one checkpoint.
            low_cpu_mem_mode: Map the files rather than read them whole.
            num_threads: Number of files that are read at once.

        Raises:
            CheckpointError: The checkpoint is missing, damaged, or of other parameters. Nothing was loaded then.
            ConfigError: `num_threads` is less than 1.

        Communication: for `OneForAll` three times all_gather_object, the group, a few bytes; for `Alone` none.
        """

        def read() -> tuple[Mapping[str, Any], dict[Any, Any]]:
            reader = open_checkpoint(Path(checkpoint), [OPTIMIZER], low_cpu_mem_mode, num_threads)
            return _read_optimizer(reader)

        header, state = self._writers.read(read)
        restore = self._writers.read(lambda: OptimizerState(optimizer).prepare(header, state, checkpoint))
        self._writers.read(restore)

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Save the state of a learning rate scheduler to one file.

        Args:
            lr_scheduler: The scheduler.
            checkpoint: Path of the file. Its parents are created.

        Raises:
            CheckpointError: The file cannot be written, or the state is not plain data.

        Communication: for `OneForAll` one all_gather_object, the group, a few bytes; for `Alone` none.
        """
        path = Path(checkpoint)
        self._writers.write(lambda: _save_file(path, lambda target: write_torch(target, lr_scheduler.state_dict())))

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Load the state of a learning rate scheduler.

        Args:
            lr_scheduler: A scheduler of the class that was saved.
            checkpoint: Path of the file.

        Raises:
            CheckpointError: The file is missing, damaged, or of another kind of scheduler.

        Communication: for `OneForAll` twice all_gather_object, the group, a few bytes; for `Alone` none.
        """
        state = self._writers.read(lambda: _read_scheduler(lr_scheduler, Path(checkpoint)))
        self._writers.read(lambda: lr_scheduler.load_state_dict(state))

    def synchronize(self) -> None:
        """Wait until everything that was saved is on the disk: at once, since saving waits for it."""


GeneralCheckpointIO = CheckpointIO
"""`CheckpointIO` under the name that a process on its own knows it by."""


def _refuse(gather_dtensor: bool, use_async: bool) -> None:
    """Raise for options that are documented and not there yet, on every rank alike."""
    for option, wanted, found in (("gather_dtensor", True, gather_dtensor), ("use_async", False, use_async)):
        if found != wanted:
            raise UnsupportedError(
                f"Saving supports {option}={wanted} only, for now. Found {option}={found}. "
                f"Leave {option} at its default."
            )


def _save_file(path: Path, write: Callable[[Path], object]) -> None:
    with Staging() as staging:
        staging.add(prepare_file(path), write)
        staging.commit()


def _read_optimizer(reader: ShardReader) -> tuple[Mapping[str, Any], dict[Any, Any]]:
    """Return the header and the state by parameter, from one file or from shards."""
    contents = dict(reader.contents())
    if reader.index is None:
        (content,) = contents.values()
        return {key: value for key, value in content.items() if key != "state"}, content.get("state", {})
    groups = reader.index.get_param_group_filename()
    if groups is None:
        raise CheckpointError(
            f"The index of an optimizer must name its file of groups as param_groups. Found the metadata "
            f"{reader.index.metadata} in {reader.index.root_path}. Pass a checkpoint that save_optimizer wrote."
        )
    header = read_tensor_file(Path(groups), mmap=False)
    return header, {id_: entry for content in contents.values() for id_, entry in content.items()}


def _read_scheduler(lr_scheduler: LRScheduler, path: Path) -> dict[str, Any]:
    """Return the state in a file if it has all that the scheduler's own state has."""
    state = read_tensor_file(path, mmap=False)
    if missing := {key for key in lr_scheduler.state_dict() if not key.startswith("_")} - set(state):
        raise CheckpointError(
            f"Loading needs a file of a {type(lr_scheduler).__name__}. Found {path} without "
            f"{listing(sorted(missing))}. Build the scheduler that was saved, or pass its file."
        )
    return state
