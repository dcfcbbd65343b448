"""The base class of a user's own plugin, as the older documentation has it, over the plugins of today."""

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from colossal._src.booster import Boosted, Capabilities, Parts
from colossal._src.booster.mixed_precision import MixedPrecision
from colossal._src.booster.plugin import Plugin
from colossal._src.checkpoint_io import CheckpointIO, ProcessGroupIO
from colossal._src.cluster import AXES, Axis, ParallelMesh, current_mesh
from colossal._src.interface import Criterion, ModelWrapper, OptimizerWrapper
from colossal._src.legacy.notice import superseded
from colossal._src.tensor import move_module
from colossal.errors import ConfigError, UnsupportedError

_NUM_PARTS = 5

Configured = tuple[nn.Module, Optimizer | OptimizerWrapper | None, Criterion | None, Any, LRScheduler | None]


class OlderPlugin(Plugin):
    """The base class of a plugin of your own, with the methods that `colossal.booster.plugin.plugin_base` had.

    `Booster` takes an object of a subclass as it takes any plugin. It calls `configure`, then moves the model to the
    device unless the plugin does, then applies the precision unless the plugin does.

    Example:
        >>> import torch
        >>> from colossal.booster import Booster
        >>> from colossal.legacy.booster import OlderPlugin
        >>> class Own(OlderPlugin):
        ...     def supported_devices(self):
        ...         return ["cpu", "cuda"]
        ...
        ...     def supported_precisions(self):
        ...         return ["bf16"]
        ...
        ...     control_precision = control_device = control_checkpoint_io = support_no_sync = lambda self: False
        ...
        ...     def configure(self, model, optimizer=None, criterion=None, dataloader=None, lr_scheduler=None):
        ...         return model, optimizer, criterion, dataloader, lr_scheduler
        ...
        ...     def get_checkpoint_io(self):
        ...         return None
        ...
        ...     def no_sync(self, model, optimizer=None):
        ...         raise NotImplementedError
        >>> model, *_ = Booster(device="cpu", plugin=Own()).boost(torch.nn.Linear(2, 1))
        >>> model(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """

    supported_axes = AXES  # the older interface cannot say which: the plugin answers for what it does with each

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, make in _TWO_FORMS.items():
            if callable(vars(cls).get(name)):
                setattr(cls, name, make(vars(cls)[name]))

    @abstractmethod
    def supported_devices(self) -> Sequence[str]:  # type: ignore[override]
        """Say what the plugin runs on.

        Returns:
            Types of devices; none for all of them.
        """

    @abstractmethod
    def supported_precisions(self) -> Sequence[str]:  # type: ignore[override]
        """Say what the plugin combines with.

        Returns:
            Names of mixed precisions.
        """

    @abstractmethod
    def control_precision(self) -> bool:
        """Say who applies the precision.

        Returns:
            Whether the plugin does; then the Booster takes none.
        """

    @abstractmethod
    def control_device(self) -> bool:
        """Say who moves the model.

        Returns:
            Whether the plugin does.
        """

    @abstractmethod
    def control_checkpoint_io(self) -> bool:
        """Say what reads and writes checkpoints.

        Returns:
            Whether it is what `get_checkpoint_io` returns.
        """

    @abstractmethod
    def support_no_sync(self) -> bool:
        """Say whether gradients can accumulate on each rank.

        Returns:
            Whether `no_sync` works.
        """

    def support_lora(self) -> bool:
        """Say whether `Booster.enable_lora` works; here it does not.

        Returns:
            False.
        """
        return False

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
    ) -> nn.Module:
        """Add low-rank adapters to a model, if the plugin supports it; here it does not.

        Args:
            model: The model.
            pretrained_dir: A directory with adapters.
            lora_config: The options of peft.
            bnb_quantization_config: How the frozen weights are quantized.

        Returns:
            The model with adapters.

        Raises:
            UnsupportedError: The plugin does not support it.
        """
        del model, pretrained_dir, lora_config, bnb_quantization_config
        raise UnsupportedError(
            f"LoRA needs a plugin that supports it. Found {type(self).__name__}, which has no enable_lora of its own. "
            "Use a plugin of colossal.booster.plugin, all of which do."
        )

    @abstractmethod
    def configure(  # type: ignore[override]
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Criterion | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> Configured:
        """Wrap the parts of a training program.

        Args:
            model: The model.
            optimizer: The optimizer of the model's parameters.
            criterion: The loss function.
            dataloader: The source of batches.
            lr_scheduler: The schedule of the optimizer.

        Returns:
            The five, wrapped or as they were; what was None stays None.
        """

    @abstractmethod
    def no_sync(self, model: nn.Module, optimizer: OptimizerWrapper | None = None) -> AbstractContextManager[Any]:
        """Open a context in which gradients accumulate without being reduced over ranks.

        Args:
            model: The boosted model.
            optimizer: The boosted optimizer.

        Returns:
            A new context manager.
        """

    def mesh_and_axes_to_compare(self) -> tuple[ParallelMesh | None, tuple[Axis, ...]]:
        """Return which ranks have to boost the same.

        Returns:
            The mesh in force, None where no process group is initialized, and all axes.
        """
        return current_mesh() if dist.is_initialized() else None, AXES

    def data_parallel_rank_and_size(self) -> tuple[int, int]:
        """Return which shard of the data this rank sees, which `prepare_dataloader` gives it.

        Returns:
            Its index on the dp axis of the mesh in force and the size of that axis; without processes 0 and 1.
        """
        mesh, _ = self.mesh_and_axes_to_compare()
        return (0, 1) if mesh is None else (mesh.rank("dp"), mesh.size("dp"))


@final
class _Names(tuple[str, ...]):
    """Names that are there as a value, as today, and as the result of a call, as in the older documentation."""

    __slots__ = ()

    def __call__(self) -> list[str]:
        return list(self)


@final
class _NamesProperty:
    """A method that returns names, read as a value or called."""

    def __init__(self, function: Callable[[Any], Sequence[str]]) -> None:
        self._function = function
        self.__doc__ = function.__doc__
        self.__isabstractmethod__ = getattr(function, "__isabstractmethod__", False)

    def __get__(self, plugin: Any, kind: type | None = None) -> Any:
        return self if plugin is None else _Names(self._function(plugin))


def _either_configure(function: Callable[..., Any]) -> Callable[..., Any]:
    """A `configure` that takes the five parts, and what `Booster` gives."""

    @functools.wraps(function)
    def configure(self: OlderPlugin, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Parts):
            return _boost(self, *args)
        return function(self, *args, **kwargs)

    return configure


def _chosen_checkpoint_io(function: Callable[..., Any]) -> Callable[..., Any]:
    """A `get_checkpoint_io` that is asked only where the plugin controls it."""

    @functools.wraps(function)
    def get_checkpoint_io(self: OlderPlugin) -> Any:
        if self.control_checkpoint_io():
            return function(self)
        return CheckpointIO(ProcessGroupIO()) if dist.is_initialized() else CheckpointIO()

    return get_checkpoint_io


_TWO_FORMS: dict[str, Callable[[Any], Any]] = {
    "supported_devices": _NamesProperty,
    "supported_precisions": _NamesProperty,
    "configure": _either_configure,
    "get_checkpoint_io": _chosen_checkpoint_io,
}


def _boost(plugin: OlderPlugin, parts: Parts, device: torch.device, precision: MixedPrecision | None) -> Boosted:
    """Let an older plugin configure the parts, and do what it leaves to the Booster."""
    superseded("colossal.booster.plugin.plugin_base.Plugin", "class Own(colossal.booster.plugin.Plugin)")
    name = type(plugin).__name__
    if precision is not None and plugin.control_precision():
        raise ConfigError(
            f"{name} applies a precision of its own, as its control_precision() says. Found mixed_precision="
            f"{precision.name!r} for the Booster, which it would ignore. Leave it out."
        )
    result = plugin.configure(parts.model, parts.optimizer, parts.criterion, parts.dataloader, parts.lr_scheduler)
    if not isinstance(result, tuple | list) or len(result) != _NUM_PARTS or not isinstance(result[0], nn.Module):
        raise ConfigError(
            "configure returns model, optimizer, criterion, dataloader and lr_scheduler. Found "
            f"{type(result).__name__} from {name}. Return all five."
        )
    model, optimizer, criterion, dataloader, lr_scheduler = result
    if not plugin.control_device():
        move_module(model, device)
    if precision is not None and type(optimizer) not in (OptimizerWrapper, type(parts.optimizer)):
        raise ConfigError(
            f"A precision wraps a plain optimizer. Found a {type(optimizer).__name__} from configure of {name}, and "
            f"mixed_precision={precision.name!r}. Let control_precision() be True, or leave the precision out."
        )
    if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
        names = {parameter: key for key, parameter in parts.model.named_parameters()}
        optimizer = OptimizerWrapper(optimizer, param_names=names)
    configured = model
    if precision is not None:
        precision.convert(model)
        model, optimizer, criterion = precision.configure(model, optimizer, criterion)
    wrapped = model if isinstance(model, ModelWrapper) else ModelWrapper(model)
    capabilities = Capabilities(_no_sync_of(plugin, configured, optimizer), _executor_of(plugin, wrapped))
    return Boosted(wrapped, optimizer, criterion, dataloader, lr_scheduler, capabilities)


def _no_sync_of(
    plugin: OlderPlugin, model: nn.Module, optimizer: OptimizerWrapper | None
) -> Callable[[], AbstractContextManager[Any]]:
    def no_sync() -> AbstractContextManager[Any]:
        if not plugin.support_no_sync():
            raise UnsupportedError(
                "no_sync needs a plugin that supports it. Found "
                f"{type(plugin).__name__}, whose support_no_sync() is False. Reduce gradients in each pass."
            )
        return plugin.no_sync(model, optimizer)

    return no_sync


def _executor_of(plugin: Any, model: ModelWrapper) -> Any:
    """What runs batches, of a plugin that has an `execute_pipeline`."""
    execute = getattr(plugin, "execute_pipeline", None)
    if execute is None:
        return None

    def run(data_iter: Any, criterion: Any, optimizer: Any, return_loss: bool, return_outputs: bool) -> Any:
        return execute(data_iter, model, criterion, optimizer, return_loss, return_outputs)

    return run
