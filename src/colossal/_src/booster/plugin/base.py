"""What every plugin does."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from colossal._src._dtypes import HALF_DTYPES
from colossal._src.booster.mixed_precision import MixedPrecision
from colossal._src.booster.plugin.dataloader import (
    EpochSampler,
    ShardedLoader,
    check_full_batches,
    check_loader,
    seed_worker,
)
from colossal._src.checkpoint_io import CheckpointIO
from colossal._src.cluster import AXES, Axis, ParallelMesh, ambient_mesh
from colossal._src.interface import Boosted, FixedOptions, ModelWrapper, OptimizerWrapper, Parts
from colossal._src.tensor import DATA, move_module
from colossal.accelerator import get_accelerator

if TYPE_CHECKING:
    from colossal._src.booster.lora import Lora


class _Names(tuple[str, ...]):
    """Names as a value, and as the list that a method of the older documentation returns."""

    __slots__ = ()

    def __call__(self) -> list[str]:
        return list(self)


@final
class _Devices(_Names):
    """Types of devices; none stand for all of them, of which the list has those of this machine."""

    __slots__ = ()

    def __call__(self) -> list[str]:
        return super().__call__() or sorted({"cpu", get_accelerator().name})


class Plugin(FixedOptions, ABC):
    """A kind of parallelism: chooses how `Booster.boost` wraps a model and its optimizer.

    Attributes:
        supported_devices: Device types that the plugin runs on; empty for all of them. A call returns them as a list.
        supported_precisions: Names of the mixed precisions that it combines with. A call returns them as a list.
        supported_axes: Axes of the mesh that may have several ranks.
        has_own_precision: Whether the plugin casts by itself: then the Booster gives the name of the precision only.

    Example:
        >>> import torch
        >>> from colossal.booster.plugin import TorchDDPPlugin
        >>> from colossal.testing import fake_world
        >>> with fake_world(2, rank=1):
        ...     loader = TorchDDPPlugin().prepare_dataloader(torch.arange(6), batch_size=2)
        ...     print([batch.tolist() for batch in loader])
        [[1, 3], [5]]
    """

    supported_devices: ClassVar[tuple[str, ...]] = _Devices()
    supported_precisions: ClassVar[tuple[str, ...]]
    supported_axes: ClassVar[tuple[Axis, ...]] = (DATA,)
    has_own_precision: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, kind in (("supported_devices", _Devices), ("supported_precisions", _Names)):
            if isinstance(vars(cls).get(name), tuple):
                setattr(cls, name, kind(vars(cls)[name]))

    @abstractmethod
    def configure(self, parts: Parts, device: torch.device, precision: MixedPrecision | None) -> Boosted:
        """Wrap the parts of a training program for this plugin.

        Args:
            parts: As the user built them.
            device: Where the model goes.
            precision: What runs in half precision; nothing by default.

        Returns:
            The parts, ready to train.

        Raises:
            MeshError: The plugin needs a process group, and none is initialized.
        """

    @abstractmethod
    def get_checkpoint_io(self) -> CheckpointIO:
        """Make what reads and writes the checkpoints of models that this plugin boosted.

        Returns:
            A new object.
        """

    @abstractmethod
    def data_parallel_rank_and_size(self) -> tuple[int, int]:
        """Return which shard of the data this rank sees.

        Returns:
            Its index among the replicas that see different data, and their number.
        """

    def mesh_and_axes_to_compare(self) -> tuple[ParallelMesh | None, tuple[Axis, ...]]:
        """Return which ranks have to boost the same model, with the same optimizer, plugin and precision.

        Returns:
            The mesh in force, if there is one, and its axes along which ranks agree; by default all of them.

        Raises:
            MeshError: The plugin needs a process group, and none is initialized.
        """
        return ambient_mesh(), AXES

    def get_lora(self) -> "Lora | None":
        """Make what adds low-rank adapters to models and saves them.

        Returns:
            A new object; None by default: the plugin cannot train adapters.
        """
        return None

    def control_device(self) -> bool:
        """Say who moves the model to its device.

        Returns:
            True: the plugin does.
        """
        return True

    def control_precision(self) -> bool:
        """Say who casts the model and its inputs.

        Returns:
            Whether the plugin does, as `has_own_precision` says; else the mixed precision of the Booster does.
        """
        return self.has_own_precision

    def control_checkpoint_io(self) -> bool:
        """Say what reads and writes checkpoints.

        Returns:
            True: it is what `get_checkpoint_io` returns.
        """
        return True

    def support_no_sync(self) -> bool:
        """Say whether `Booster.no_sync` works.

        Returns:
            True: under every plugin gradients are the same; which ones then send less is said in their documentation.
        """
        return True

    def support_lora(self) -> bool:
        """Say whether `Booster.enable_lora` works.

        Returns:
            Whether there is a `get_lora`.
        """
        return self.get_lora() is not None

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: type[DistributedSampler[Any]] | None = None,
        **kwargs: Any,
    ) -> DataLoader[Any]:
        """Make a data loader that gives each data-parallel rank its own shard of the dataset.

        Batch k of all ranks together holds the same samples for any number of ranks, as long as the product of
        ranks and `batch_size` stays the same. Each new iterator is a new epoch with a new order, unless the last one
        was left before a boosted optimizer made a step: then it begins again. `Booster.save` and `Booster.load` take
        the loader and keep its position, as a number of samples of all ranks together.

        Args:
            dataset: A dataset with a length. Or a `torch.utils.data.IterableDataset`, which yields all samples in the
                same order on every rank, and in every worker: the loader shards it. Where it has a method `set_epoch`,
                this is called with the number of the epoch; to resume, the samples before are read again.
            batch_size: Samples in a batch of one rank.
            shuffle: Draw a new order for each epoch.
            seed: Seed of the order, and of the random generators of worker processes; the same on all ranks.
            drop_last: Leave out the samples that do not fill a batch on every rank, instead of repeating some.
            pin_memory: Put batches into page-locked memory, from which copies to a GPU are faster.
            num_workers: Number of processes that load samples; 0 loads in this one. What they draw at random follows
                from `seed` and the epoch: a run that resumes draws the same from the next epoch on, without
                ``persistent_workers``.
            distributed_sampler_cls: Another class with the constructor of `DistributedSampler`.
            **kwargs: Passed to `torch.utils.data.DataLoader`.

        Returns:
            The loader of this rank's batches.

        Raises:
            ConfigError: `batch_size` is below 1, an empty dataset is shuffled, `drop_last` leaves no batch, or `kwargs`
                names a sampler or generator.
            UnsupportedError: An `IterableDataset` is to be shuffled, or sampled.
        """
        check_loader(dataset, batch_size, shuffle, kwargs)
        rank, size = self.data_parallel_rank_and_size()
        options: dict[str, Any] = {
            "batch_size": batch_size,
            "drop_last": drop_last,
            "pin_memory": pin_memory,
            "num_workers": num_workers,
            # workers take their seeds from it: those of two ranks must not augment their samples in the same way
            "generator": torch.Generator().manual_seed(seed + rank),
            "worker_init_fn": kwargs.pop("worker_init_fn", seed_worker),
            **kwargs,
        }
        if isinstance(dataset, IterableDataset):
            from colossal._src.booster.plugin.stream_loader import make_stream_loader

            return make_stream_loader(dataset, rank, size, distributed_sampler_cls, options)
        if drop_last and distributed_sampler_cls is None:  # one of another class may repeat samples
            check_full_batches(dataset, batch_size, size)
        sampler = (distributed_sampler_cls or EpochSampler)(
            dataset, num_replicas=size, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        return (ShardedLoader if distributed_sampler_cls is None else DataLoader)(dataset, sampler=sampler, **options)


def wrap_parts(
    parts: Parts,
    device: torch.device,
    precision: MixedPrecision | None,
    shard: Callable[[nn.Module, Optimizer | None], None] | None = None,
) -> Boosted:
    """Move a model to its device, wrap model and optimizer, and apply the precision: what all plugins begin with.

    Args:
        parts: What the program passed to the Booster.
        device: Where the parameters are to be.
        precision: Converts the model and wraps the optimizer; None leaves both in the precision that they have.
        shard: Places the parameters instead of `device`: it is called with the model, which may still be lazy, and the
            optimizer, after the model was converted.

    Returns:
        The wrapped parts; data loader and schedule are the ones that were passed.

    Example:
        >>> import torch
        >>> from colossal.booster import Parts
        >>> from colossal.booster.plugin import wrap_parts
        >>> model = torch.nn.Linear(2, 1)
        >>> parts = Parts(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> wrap_parts(parts, torch.device("cpu"), precision=None).model.unwrap() is model
        True
    """
    from colossal._src.lazy import materialize

    model = parts.model if shard is not None else materialize(parts.model)
    if precision is not None:
        precision.convert(model)
        if precision.updates_float32 and parts.optimizer is not None:
            _cast_to_float32(parts.optimizer)
    if shard is None:
        move_module(model, device)
    else:
        shard(model, parts.optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = None if parts.optimizer is None else OptimizerWrapper(parts.optimizer, param_names=names)
    configured = (ModelWrapper(model), optimizer, parts.criterion)
    if precision is not None:
        configured = precision.configure(model, optimizer, parts.criterion)
    return Boosted(*configured, parts.dataloader, parts.lr_scheduler)


def _cast_to_float32(optimizer: Optimizer) -> None:
    """Cast what an optimizer updates, such as a model that was loaded in bfloat16: small updates would be lost."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dtype in HALF_DTYPES:
                parameter.data = parameter.data.float()
