"""Mistakes that are found before anything is wrapped."""

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from colossal._src._dtypes import HALF_DTYPES
from colossal._src.booster.mixed_precision import MixedPrecision
from colossal._src.booster.plugin.base import Plugin
from colossal._src.booster.plugin.dataloader import ResumableLoader
from colossal._src.booster.plugin.single_process import SingleProcessPlugin
from colossal._src.cluster import AXES, ParallelMesh
from colossal._src.interface import ModelWrapper, OptimizerWrapper, Parts, refuse_misspelled, unwrap_compiled
from colossal._src.tensor import DATA, operators_mesh
from colossal.errors import ConfigError, UnsupportedError
from colossal.logging import get_dist_logger


def check_plugin(plugin: Plugin | None) -> Plugin | None:
    """Return the plugin if it is one."""
    if plugin is not None and not isinstance(plugin, Plugin):
        raise ConfigError(
            f"A plugin is an object of colossal.booster.plugin. Found {plugin!r}. Pass for example TorchDDPPlugin()."
        )
    return plugin


def check_supported(plugin_name: str, option: str, value: str, supported: tuple[str, ...]) -> None:
    """Reject an option of the Booster that its plugin does not take."""
    if not supported:
        raise UnsupportedError(
            f"{plugin_name} takes no {option}. Found {option}={value!r} for the Booster. Leave it out."
        )
    if value not in supported:
        raise UnsupportedError(
            f"{plugin_name} takes {option} {' or '.join(map(repr, supported))}. Found {option}={value!r}. "
            f"The nearest that works is {supported[0]!r}."
        )


def check_precision(given: MixedPrecision | str | None, plugin: Plugin) -> None:
    """Reject settings of a precision next to a plugin that has a precision of its own."""
    if plugin.has_own_precision and isinstance(given, MixedPrecision):
        raise ConfigError(
            f"{type(plugin).__name__} casts by itself, and takes a precision by its name. Found {given!r}, whose "
            f"settings it would ignore. Pass mixed_precision={given.name!r}, and settings of the loss scale to the "
            "plugin."
        )


def check_dataloader(dataloader: Any, plugin: Plugin) -> None:
    """Reject a DataLoader that gives all data-parallel ranks the same samples."""
    if not isinstance(dataloader, DataLoader):
        return
    # A DataLoader with a custom batch sampler also has a SequentialSampler, which it does not use.
    batches = dataloader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else dataloader.sampler if batches is None else batches
    rank, size = plugin.data_parallel_rank_and_size()
    shards = sampler.sampler if isinstance(sampler, BatchSampler) else sampler
    if isinstance(shards, DistributedSampler) and (shards.num_replicas, shards.rank) != (size, rank):
        raise ConfigError(
            f"A dataset is split over the data-parallel ranks, of which this is {rank} of {size}; ranks that split a "
            f"model read the same samples. Found a {type(shards).__name__} with rank={shards.rank} and "
            f"num_replicas={shards.num_replicas}. Build the loader by plugin.prepare_dataloader(dataset, "
            "batch_size=...), or pass the rank and num_replicas that plugin.data_parallel_rank_and_size() returns."
        )
    if type(sampler) not in (SequentialSampler, RandomSampler):
        if size > 1:
            _warn_of_own_samples(dataloader, shards)
        return  # of an iterable dataset, or a custom sampler, which may shard the dataset by rank
    if size > 1:
        raise ConfigError(
            f"Each of {size} data-parallel ranks trains on samples of its own. Found a DataLoader with a "
            f"{type(sampler).__name__}, which takes them from the full dataset on every rank. Build it by "
            "plugin.prepare_dataloader(dataset, batch_size=...), or with a torch.utils.data.DistributedSampler."
        )


def _warn_of_own_samples(dataloader: DataLoader[Any], sampler: object) -> None:
    """Say who gives ranks other samples, where nobody can see it from outside."""
    if isinstance(dataloader, ResumableLoader):
        return
    if isinstance(dataloader.dataset, IterableDataset):
        get_dist_logger().warning(
            f"{type(dataloader.dataset).__name__} must yield other samples on each data-parallel rank: this DataLoader "
            "takes what it yields. plugin.prepare_dataloader shards an IterableDataset, and saves the position in it."
        )
    elif type(sampler) in (WeightedRandomSampler, SubsetRandomSampler):
        get_dist_logger().warning(
            f"{type(sampler).__name__} must draw other samples on each data-parallel rank: ranks whose generators have "
            "the same seed, as they have by default, draw the same ones from the same weights or indices. Pass it "
            "indices of this rank, or generator=torch.Generator().manual_seed(seed + rank) with the rank of "
            "plugin.data_parallel_rank_and_size().",
            ranks=[0],
        )


def check_axes(plugin: Plugin, mesh: ParallelMesh, model: nn.Module) -> None:
    """Reject a mesh with an axis that the plugin ignores: its ranks would do the same work, or drift apart."""
    _check_distributed_parameters(model, mesh)
    ignored = {axis: mesh.size(axis) for axis in AXES if mesh.size(axis) > 1 and axis not in plugin.supported_axes}
    if ignored:
        sizes = ", ".join(f"{axis}_size={size}" for axis, size in ignored.items())
        name = "A Booster without a plugin" if isinstance(plugin, SingleProcessPlugin) else type(plugin).__name__
        raise UnsupportedError(
            f"{name} trains on a mesh with the axes {' and '.join(plugin.supported_axes)}. Found {mesh}, along whose "
            f"{' and '.join(ignored)} it would do nothing. Use HybridParallelPlugin({sizes}), or a mesh without."
        )


def check_synchronized_norms(parts: Parts, is_cpu: bool) -> None:
    """Reject a norm over all ranks where torch has none, before a first forward pass fails in it."""
    if not is_cpu or parts.optimizer is None:
        return
    found = next((name for name, each in parts.model.named_modules() if isinstance(each, nn.SyncBatchNorm)), None)
    if found is not None:
        raise UnsupportedError(
            f"torch.nn.SyncBatchNorm computes on accelerators only. Found {found}, and a model that is to train on the "
            "CPU. Leave out convert_sync_batchnorm there: BatchNorm takes the statistics of the samples of each rank, "
            "and GroupNorm and LayerNorm those of each sample, which is equal on any number of ranks."
        )


def _check_model(model: nn.Module) -> None:
    """Reject modules that no plugin can look into."""
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError(
            "boost takes a model whose modules are Python objects. Found one of torch.jit, of which plugins cannot "
            "take hold. Boost the model that was scripted or traced, and compile it by torch.compile."
        )
    lazy = next((name for name, each in model.named_parameters() if torch.nn.parameter.is_lazy(each)), None)
    if lazy is not None:
        raise ConfigError(
            f"boost takes a model whose parameters have shapes. Found {lazy}, of a lazy module of torch.nn, which has "
            "yet to see an input. Run a forward pass of the model before the optimizer is built, with equal seeds on "
            "all ranks."
        )


def check_parts(parts: Parts) -> None:
    """Reject parts that do not belong together, which would otherwise train silently wrong."""
    _check_model(parts.model)
    is_boosted = isinstance(unwrap_compiled(parts.model), ModelWrapper)
    if is_boosted or isinstance(parts.optimizer, OptimizerWrapper):
        combined = (
            " Several optimizers of one model are boosted together, as colossal.nn.optimizer.CombinedOptimizer("
            "*optimizers)."
        )
        is_second = is_boosted and not isinstance(parts.optimizer, OptimizerWrapper | None)
        raise ConfigError(
            "boost takes a plain model and a plain optimizer. Found one that is boosted already. "
            "Boost once; pass model.unwrap() and optimizer.unwrap() to boost again." + combined * is_second
        )
    _check_order(parts)
    given: Any = parts.optimizer
    if isinstance(given, list | tuple):
        kinds = ", ".join(type(each).__name__ for each in given)
        raise ConfigError(
            f"boost takes one optimizer of a model. Found {len(given)}: {kinds}. Combine them, each of other "
            "parameters: colossal.nn.optimizer.CombinedOptimizer(*optimizers)."
        )
    if parts.optimizer is not None:
        own = set(parts.model.parameters())
        strange = sum(parameter not in own for group in parts.optimizer.param_groups for parameter in group["params"])
        if strange:
            raise ConfigError(
                f"The optimizer updates parameters of the model. Found {strange} that the model does not have. "
                "Build the optimizer from model.parameters()."
            )
        for each in getattr(parts.optimizer, "optimizers", [parts.optimizer]):  # of a CombinedOptimizer
            for group in each.param_groups:
                refuse_misspelled(type(each).__name__, group, each.defaults)
    if getattr(parts.lr_scheduler, "optimizer", parts.optimizer) is not parts.optimizer:
        raise ConfigError(
            "The lr_scheduler drives the optimizer that is boosted with it. Found one that drives another. "
            "Build it from the optimizer that is passed to boost."
        )


def _check_order(parts: Parts) -> None:
    """Reject a part in the place of another, which would be returned as it is."""
    kinds = {"criterion": nn.Module, "dataloader": DataLoader, "lr_scheduler": LRScheduler}
    for place in kinds:
        given = getattr(parts, place)
        belongs = [other for other, kind in kinds.items() if isinstance(given, kind)]
        if belongs and place not in belongs:
            raise ConfigError(
                "boost takes model, optimizer, criterion, dataloader and lr_scheduler, in this order. Found a "
                f"{type(given).__name__} as {place}. Pass it by keyword: {belongs[0]}=..."
            )


def _check_distributed_parameters(model: nn.Module, mesh: ParallelMesh) -> None:
    """Reject parameters that are distributed over another mesh than that of the plugin, whose ranks they are not."""
    own = operators_mesh(model.parameters())
    if own is not None and own.ranks(DATA) != mesh.ranks(DATA):
        raise ConfigError(
            f"A model is distributed over the mesh that its plugin uses. Found parameters on {own}, and {mesh} in "
            "force. Make the plugin and call boost inside of that mesh: with parameter.process_group.mesh: ..."
        )


def check_pipeline_call(data_iter: Any, criterion: Any, needs_loss: bool) -> None:
    """Reject a batch in the place of an iterator, and a missing criterion, before a batch is taken."""
    if not hasattr(data_iter, "__next__"):
        raise ConfigError(
            f"execute_pipeline takes an iterator and reads one batch from it. Found {type(data_iter).__name__}. Pass "
            "iter([batch]) for a batch that you have, or one iter(dataloader) for all steps of an epoch."
        )
    if needs_loss and not callable(criterion):
        raise ConfigError(
            "execute_pipeline trains on, and returns, the loss that a criterion computes of outputs and batch. Found "
            f"{type(criterion).__name__}. Pass lambda outputs, batch: outputs.loss for a model that computes it "
            "itself, or return_loss=False without an optimizer."
        )


def warn_of_lost_updates(optimizer: OptimizerWrapper, plugin: Plugin) -> None:
    """Say once that an optimizer updates 16-bit parameters without master weights."""
    found = {each.dtype for each in optimizer.parameters if each.requires_grad and each.dtype in HALF_DTYPES}
    if found and optimizer.masters is None:
        own = f"{type(plugin).__name__}(precision='bf16')"
        option = own if plugin.has_own_precision else "Booster(mixed_precision='bf16')"
        _warn_of_lost_updates(str(found.pop()).removeprefix("torch."), option)


@cache
def _warn_of_lost_updates(dtype: str, option: str) -> None:
    get_dist_logger().warning(
        f"Small updates of weights are rounded away in 16 bits. Found an optimizer of {dtype} parameters, of which "
        f"nothing keeps a float32 copy. Pass {option} to train with one, or load the model with dtype=torch.float32.",
        ranks=[0],
    )
