# pyright: reportInvalidTypeVarUse=false
"""The front of the library: one set of verbs for training under any plugin."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final, overload
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from colossal._src._cached import cached_by_rank
from colossal._src.booster.argument_checks import (
    check_axes,
    check_dataloader,
    check_parts,
    check_pipeline_call,
    check_plugin,
    check_precision,
    check_supported,
    check_synchronized_norms,
    warn_of_lost_updates,
)
from colossal._src.booster.checkpoint_mixin import CheckpointMixin
from colossal._src.booster.lora_mixin import LoraMixin
from colossal._src.booster.mixed_precision import MixedPrecision, mixed_precision_factory
from colossal._src.booster.plugin.base import Plugin
from colossal._src.booster.plugin.single_process import SingleProcessPlugin
from colossal._src.booster.samples_mixin import SamplesMixin
from colossal._src.checkpoint_io import CheckpointIO
from colossal._src.cluster import Axis, ParallelMesh
from colossal._src.comm import RandomStreams, end_graphs_at_collectives
from colossal._src.interface import (
    BoostResult,
    Capabilities,
    Criterion,
    FixedOptions,
    ModelWrapper,
    NonFiniteCheck,
    OptimizerWrapper,
    Parts,
    copy_written,
    is_peft_model,
    lift_guards,
    random_streams_of,
    set_random_streams,
    unwrap_compiled,
)
from colossal.accelerator import get_accelerator
from colossal.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # What is given to `boost` comes back; what is left out comes back as None.
    _Criterion = TypeVar("_Criterion", bound=Criterion | None, default=None)
    _DataLoader = TypeVar("_DataLoader", bound=DataLoader[Any] | None, default=None)
    _LRScheduler = TypeVar("_LRScheduler", bound=LRScheduler | None, default=None)


@final
class Booster(FixedOptions, CheckpointMixin, LoraMixin, SamplesMixin):
    """Turns the parts of a single-process training program into those of a parallel one.

    Args:
        device: ``"cpu"``, or an accelerator such as ``"cuda"``; by default the device of this process.
        mixed_precision: What runs in fewer bits: ``"fp16"``, ``"bf16"`` or ``"fp32"`` under any plugin; under some
            ``"fp16_naive"``, ``"fp8"``, ``"fp16_apex"`` or an object. By default nothing, or what the plugin says.
        plugin: The recipe of parallelism; by default this process trains alone.
        max_norm: Clip the common norm of the gradients to it before each step, under any plugin; 0 does not.
        norm_type: The p of that norm.
        check_batches: How many batches are compared between the ranks of a replica, under tensor, sequence or
            pipeline parallelism, which must see the same batches; None for all of them, 0 for none.
        refuse_nonfinite: Raise an error at `step`, on all ranks, if a loss or a gradient is infinite or NaN; not with
            fp16, whose overflows skip a step.

    Raises:
        ConfigError: The device or the precision does not exist here.
        UnsupportedError: The plugin does not combine with the device or the precision.

    Example:
        >>> import torch
        >>> from colossal.booster import Booster
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> booster = Booster(device="cpu", mixed_precision="bf16")
        >>> model, optimizer, criterion, _, _ = booster.boost(model, optimizer, torch.nn.MSELoss())
        >>> losses = []
        >>> for _ in range(3):
        ...     loss = criterion(model(torch.ones(4, 2)), torch.ones(4, 1))
        ...     booster.backward(loss, optimizer)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     losses.append(loss.item())
        >>> losses[2] < losses[0]
        True
    """

    def __init__(
        self,
        device: str | None = None,
        mixed_precision: MixedPrecision | str | None = None,
        plugin: Plugin | None = None,
        *,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        check_batches: int | None = 2,
        refuse_nonfinite: bool = False,
    ) -> None:
        if max_norm < 0 or not norm_type > 0:
            raise ConfigError(
                "Gradients are clipped to a norm of at least 0 (which does not clip), of a p greater than 0. Found "
                f"max_norm={max_norm} and norm_type={norm_type}. The defaults are 0.0 and 2.0."
            )
        self._max_norm, self._norm_type = max_norm, norm_type
        self._check_batches, self._refuse_nonfinite = check_batches, refuse_nonfinite
        self.plugin = check_plugin(plugin) or SingleProcessPlugin()
        self.mixed_precision = (
            mixed_precision_factory(mixed_precision) if isinstance(mixed_precision, str) else mixed_precision
        )
        self._accelerator, devices = get_accelerator(device), self.plugin.supported_devices
        check_supported(self._plugin_name, "device", self._accelerator.name, devices or (self._accelerator.name,))
        if self.mixed_precision is not None:
            precisions = self.plugin.supported_precisions
            check_supported(self._plugin_name, "mixed_precision", self.mixed_precision.name, precisions)
            check_precision(mixed_precision, self.plugin)
        # Weak keys, so that models can be freed: Capabilities refer to the modules inside of the wrapper, not to it.
        self._boosted: WeakKeyDictionary[nn.Module, tuple[OptimizerWrapper | None, Capabilities]] = WeakKeyDictionary()

    @cached_by_rank
    def checkpoint_io(self) -> CheckpointIO:  # type: ignore[override]
        """What reads and writes checkpoints; made when it is first used."""
        return self.plugin.get_checkpoint_io()

    @overload
    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        criterion: "_Criterion" = ...,
        dataloader: "_DataLoader" = ...,
        lr_scheduler: "_LRScheduler" = ...,
    ) -> "tuple[ModelWrapper, OptimizerWrapper, _Criterion, _DataLoader, _LRScheduler]": ...

    @overload
    def boost(
        self,
        model: nn.Module,
        optimizer: None = None,
        criterion: "_Criterion" = ...,
        dataloader: "_DataLoader" = ...,
        lr_scheduler: "_LRScheduler" = ...,
    ) -> "tuple[ModelWrapper, None, _Criterion, _DataLoader, _LRScheduler]": ...

    @overload
    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        criterion: "_Criterion" = ...,
        dataloader: "_DataLoader" = ...,
        lr_scheduler: "_LRScheduler" = ...,
    ) -> "tuple[ModelWrapper, OptimizerWrapper | None, _Criterion, _DataLoader, _LRScheduler]": ...

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Criterion | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> BoostResult:
        """Make the parts of a training program parallel.

        Args:
            model: The model; moved to the device, as is what it is called with from then on. One built inside of
                `colossal.lazy.LazyInitContext` gets its values here, under `TorchFSDPPlugin` one unit at a time.
            optimizer: The optimizer of the model's parameters.
            criterion: The loss function.
            dataloader: The source of batches, from the plugin's `prepare_dataloader` or with a sampler that shards
                the dataset among the data-parallel ranks; returned as it is.
            lr_scheduler: The schedule of the optimizer; returned as it is.

        Returns:
            Always five values: model, optimizer, criterion, dataloader and lr_scheduler; what was None stays None.

        Raises:
            ConfigError: The model is boosted already, the optimizer holds parameters of another model, the schedule
                belongs to another optimizer, or ranks boost different models or optimizers.
            MeshError: The plugin needs a process group, and none is initialized.
            UnsupportedError: The mesh in force has an axis along which the plugin would do nothing.

        Communication: all_reduce, all axes, 16 bytes, by which ranks compare what they boost; and that of the plugin's
        `configure`. None without a plugin, but for tensor-parallel ranks.
        """
        parts = Parts(model, optimizer, criterion, dataloader, lr_scheduler)
        end_graphs_at_collectives()
        if is_peft_model(model):
            from colossal._src.booster.lora.frozen_params import drop_frozen_params

            drop_frozen_params(parts)
        check_parts(parts)
        lift_guards(model.parameters())  # of an earlier boost
        mesh, axes = self.plugin.mesh_and_axes_to_compare()
        if mesh is not None:
            check_synchronized_norms(parts, self._accelerator.is_cpu)
            from colossal._src.booster.cross_rank_check import check_agreement

            check_axes(self.plugin, mesh, model)
            check_dataloader(dataloader, self.plugin)
            check_agreement(parts, self.plugin, self.mixed_precision, mesh, axes)
        # not lazy tensors, which get their values in place only if nothing else refers to them
        plain = dict.fromkeys(each for each in model.parameters() if type(each) is nn.Parameter)
        before = WeakIdKeyDictionary(plain)
        del plain
        boosted = self.plugin.configure(parts, self._accelerator.get_current_device(), self.mixed_precision)
        if boosted.optimizer is not None:
            warn_of_lost_updates(boosted.optimizer, self.plugin)
            self._guard(boosted.model, boosted.optimizer, mesh, axes)
            if mesh is not None:
                from colossal._src.booster.other_optimizers import refuse_other_optimizers

                refuse_other_optimizers(before.keys(), boosted.model, boosted.optimizer)
        capabilities = boosted.capabilities
        boosted.model.set_no_sync(capabilities.no_sync)
        if mesh is not None:
            from colossal._src.booster.batch_check import compare_batches

            if random_streams_of(boosted.model) is None and any(mesh.size(axis) > 1 for axis in axes):
                set_random_streams(boosted.model, RandomStreams(mesh, axes))
            capabilities = compare_batches(boosted.model, capabilities, mesh, self._check_batches)
        if not self._accelerator.is_cpu:
            from colossal._src.booster.input_transfer import move_inputs

            move_inputs(boosted.model, self._accelerator)
        self._boosted[boosted.model] = boosted.optimizer, capabilities
        return boosted.model, boosted.optimizer, boosted.criterion, boosted.dataloader, boosted.lr_scheduler

    def _guard(
        self, model: ModelWrapper, optimizer: OptimizerWrapper, mesh: ParallelMesh | None, axes: Sequence[Axis]
    ) -> None:
        """Set up clipping in an optimizer, and reject what would train silently wrong."""
        model.set_optimizer(optimizer)
        if mesh is not None:
            from colossal._src.booster.equal_hyperparameters import watch_hyperparameters
            from colossal._src.booster.new_parameters import refuse_new_parameters

            refuse_new_parameters(model, optimizer)
            watch_hyperparameters(optimizer, mesh, axes)
            if mesh.size("tp") > 1:
                from colossal._src.booster.different_branches import refuse_different_branches

                refuse_different_branches(model, optimizer, mesh)
        if self._max_norm > 0:
            optimizer.set_max_norm(self._max_norm, self._norm_type)
        if self._refuse_nonfinite:
            groups = [] if mesh is None else [mesh.group(axis) for axis in axes if mesh.size(axis) > 1]
            optimizer.refuse_nonfinite(NonFiniteCheck(groups, self._accelerator.get_current_device()))

    def backward(self, loss: torch.Tensor, optimizer: OptimizerWrapper, *, retain_graph: bool = False) -> None:
        """Compute the gradients of a loss: what ``loss.backward()`` is in a single process.

        Args:
            loss: A scalar.
            optimizer: The boosted optimizer.
            retain_graph: Keep the graph for another loss of the same outputs.

        Raises:
            ConfigError: The optimizer is not boosted.

        Communication: that of the plugin, which reduces gradients during the backward pass; none inside of `no_sync`.
        """
        if not isinstance(optimizer, OptimizerWrapper):
            raise ConfigError(
                f"backward needs the optimizer that boost returned. Found {type(optimizer).__name__}. "
                "Write: model, optimizer, *_ = booster.boost(model, optimizer)."
            )
        optimizer.backward(loss, retain_graph=retain_graph)

    def no_sync(
        self, model: nn.Module | None = None, optimizer: OptimizerWrapper | None = None
    ) -> AbstractContextManager[Any]:
        """Open a context in which gradients accumulate on each rank without being reduced over ranks.

        Forward and backward pass both belong inside. The first backward pass outside reduces the accumulated
        gradients. Where nothing is reduced, without a plugin, the context changes nothing; nor where each rank keeps a
        shard of the gradients, under ZeRO-2 and Gemini: there passes are reduced one by one, with the same result.

        Gradients of accumulated batches add up, each batch's mean with the weight that you give it. Where their labels
        are padded by -100 in different places, `weight_by_tokens` gives every label the same weight.

        Args:
            model: The boosted model; may be left out if this booster boosted only one.
            optimizer: The boosted optimizer, instead of the model.

        Returns:
            A new context manager.

        Raises:
            ConfigError: Neither belongs to this booster, or both are left out and there are several.
        """
        return self._find("no_sync", model, optimizer).no_sync()

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: OptimizerWrapper | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run the forward and backward passes of a batch: the same line of a training loop under every plugin.

        A plugin that splits the model into pipeline stages runs micro-batches through them; any other one calls the
        model, and `backward` on the loss.

        The loss, and every gradient, is the mean of those of the micro-batches. Of means over labels, of which they
        have different numbers that are not -100, it depends on the plugin. `weight_by_tokens` makes them equal.
        Hooks of a gradient run once for each micro-batch, as in one process that accumulates them.

        Args:
            data_iter: Yields batches. A mapping is passed to the model by names; of a tuple the model gets as many
                values as it requires. What the model does not take is for the criterion.
            model: The boosted model.
            criterion: Takes outputs and inputs, returns the loss: a mean over its samples.
            optimizer: The boosted optimizer; without it only forward passes run.
            return_loss: Return the loss, on all ranks.
            return_outputs: Return the outputs, on the rank with the last stage.

        Returns:
            ``{"loss": ..., "outputs": ...}``, without graphs; None for what was not asked for.

        Raises:
            ConfigError: The model does not belong to this booster, `data_iter` is no iterator, the criterion is
                missing, or all labels of a micro-batch are -100 and its loss is NaN.
            StopIteration: There is no batch left.
        """
        trains = optimizer is not None and torch.is_grad_enabled()
        check_pipeline_call(data_iter, criterion, needs_loss=return_loss or trains)
        executor = self._find("execute_pipeline", model, None).executor
        if executor is None:
            from colossal._src.booster.plugin.hybrid.batch_executor import BatchExecutor

            executor = BatchExecutor(model, self._accelerator.get_current_device())
        else:
            copy_written(model)
        return executor(data_iter, criterion, optimizer, return_loss, return_outputs)

    @property
    def _plugin_name(self) -> str:
        return "no plugin" if isinstance(self.plugin, SingleProcessPlugin) else type(self.plugin).__name__

    def _find(self, verb: str, model: nn.Module | None, optimizer: OptimizerWrapper | None) -> Capabilities:
        chosen = None if model is None else unwrap_compiled(model)
        found = [
            capabilities
            for known_model, (known_optimizer, capabilities) in self._boosted.items()
            if chosen in (None, known_model) and optimizer in (None, known_optimizer)
        ]
        if len(found) != 1:
            raise ConfigError(
                f"{verb} needs a model, or an optimizer, that this booster boosted. Found {len(found)} that fit among "
                f"{len(self._boosted)} boosted models. Pass what boost returned."
            )
        return found[0]
