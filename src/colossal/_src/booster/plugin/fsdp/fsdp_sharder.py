"""A model whose parameters FSDP2 sharded, in place, and an optimizer that updates the shards."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from colossal._src.booster.plugin.fsdp.fsdp_model_checks import (
    check_equal_state,
    check_fully_shardable,
    find_ignored,
    refuse_assigned_state,
    unit_dtypes,
)
from colossal._src.booster.plugin.fsdp.fsdp_optimizer import (
    check_on_dtensors,
    disable_foreach_for_mixed_groups,
    shard_like,
    state_by_name,
)
from colossal._src.booster.plugin.fsdp.fsdp_options import FSDPOptions
from colossal._src.booster.plugin.fsdp.fsdp_pass_checks import PassChecks, fsdp_params
from colossal._src.booster.plugin.fsdp.fsdp_pass_writes import WrittenInPass
from colossal._src.booster.plugin.replica_sync import (
    UNAVERAGED,
    HookedAverager,
    broadcast_buffers_before_forward,
    check_averaged,
    check_equal_digests,
    check_same_lazy_tensors,
    persistent_buffers,
)
from colossal._src.booster.plugin.wrap_units import find_units
from colossal._src.cluster import ParallelMesh
from colossal._src.comm import all_reduce_over, count_collective, int64_digest, reduce_scatter_fp8
from colossal._src.interface import copy_refusal, rebind_param_groups, refuse
from colossal._src.tensor import (
    DATA,
    broadcast_values,
    carry_over_attributes,
    grad_of,
    is_dtensor,
    move_module,
    set_grad,
)
from colossal.errors import ConfigError


@final
class FSDPSharder:
    """Shards one model and its optimizer, and then manages gradients that were not reduced."""

    def __init__(self, options: FSDPOptions, mesh: ParallelMesh) -> None:
        self._options = options
        self._mesh = mesh
        self._shard_mesh = options.mesh_for(mesh)
        self._modules: list[Any] = []
        self._scalar_grad_averager = HookedAverager((), mesh)
        self._has_unreduced_grads = False
        self._passes: PassChecks | None = None
        self._writes: WrittenInPass | None = None
        self._sharded: list[nn.Parameter] = []

    def apply(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Shard the parameters of a model, and those in its optimizer, in place.

        Communication: broadcast, dp, the model's and the optimizer's bytes, where the first rank's values are to
        count; all_reduce, dp, 16 bytes, and 16 more otherwise.
        """
        check_fully_shardable(model)
        ignored = find_ignored(model, self._options.ignored_modules)
        scalars = {parameter for parameter in model.parameters() if not parameter.dim()}
        # FSDP2 cannot reduce gradients without elements, and needs not
        unsharded = scalars | {parameter for parameter in model.parameters() if not parameter.numel()}
        if optimizer is not None:
            check_on_dtensors(optimizer, unsharded, self._shard_mesh)
        # before the first is sharded: shards of different initial values form a model that no rank had
        self._sync_initial_values(model, optimizer)
        units = find_units(model, self._options.auto_wrap_policy, set(self._options.ignored_modules))
        # called for its errors, while the model is still as the user built it
        unit_dtypes([*units, model], ignored | unsharded)
        self._apply_fully_shard([*units, model], ignored | unsharded, optimizer)
        self._scalar_grad_averager = HookedAverager(scalars, self._mesh)
        broadcast_buffers_before_forward(model, self._mesh)
        model.register_forward_hook(self._reshard_after_eval)
        self._passes = PassChecks(model, units, self._mesh)
        self._writes = WrittenInPass([*units, model])
        self._guard(model, optimizer)
        self.average_assigned()  # those of a backward pass before boost
        if optimizer is not None:
            disable_foreach_for_mixed_groups(optimizer)
            optimizer.register_step_pre_hook(self._before_step)

    def _guard(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Let the program see guarded parameters, and a step of the optimizer torch's own."""
        # here, as it imports DTensor, which takes half as long as torch
        from colossal._src.booster.plugin.fsdp.fsdp_parameter import (
            complete_dtensors,
            guard_shards,
            remember_held,
            unguard_shards,
        )

        complete_dtensors()
        refuse(self._modules, "__deepcopy__", copy_refusal("units of FSDP"))
        parameters = self._sharded = [parameter for parameter in model.parameters() if is_dtensor(parameter)]
        guard_shards(parameters)
        remember_held(fsdp_params(self._modules))
        for module in model.modules():
            module.register_load_state_dict_pre_hook(refuse_assigned_state)
            module.register_load_state_dict_pre_hook(partial(check_equal_state, self._mesh))
        if optimizer is not None:
            optimizer.register_step_pre_hook(partial(unguard_shards, parameters))
            optimizer.register_step_post_hook(partial(guard_shards, parameters))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate full gradients on each rank instead of reducing them to their shards."""
        from colossal._src.booster.plugin.fsdp.fsdp_parameter import guard_shards, watch_unreduced

        watch_unreduced(self._sharded)
        self._lift_watch_before_pass(None)
        before = self._scalar_grad_averager.sync.enabled
        self._reduce(False)
        try:
            yield
        finally:
            self._keep_unreduced(True)
            self._lift_watch_before_pass(partial(guard_shards, self._sharded))
            self._reduce(before)

    def average_assigned(self) -> None:
        """Average and shard full gradients that a program assigned to parameters.

        Communication: all_reduce, dp, the bytes of these gradients.
        """
        from torch.distributed.tensor import DTensor

        for parameter in self._sharded:
            grad = grad_of(parameter)
            if grad is not None and not isinstance(grad, DTensor):
                mean = all_reduce_over(grad.clone(), [self._mesh.group(DATA)], "sum") / self._mesh.size(DATA)
                set_grad(parameter, shard_like(mean, parameter))

    def discard(self) -> None:
        """Discard the gradients that `no_sync` accumulated, and those of a pass that an exception ended."""
        from colossal._src.booster.plugin.fsdp.fsdp_parameter import guard_shards

        self._scalar_grad_averager.sync.is_accumulating = False
        was_unfinished = self._passes is not None and (self._passes.reset() or self._passes.has_unreduced())
        if was_unfinished or self._has_unreduced_grads:
            for parameter in self._params_with_unsharded_grad():
                parameter.unsharded_accumulated_grad = None
                parameter.unsharded_param.grad = None
            guard_shards(self._sharded)
            self._keep_unreduced(False)

    def _sync_initial_values(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Make sure that all ranks have the same values of the tensors that have some."""
        from colossal._src.lazy import LazyTensor

        names = {parameter: name for name, parameter in model.named_parameters()}
        state = {} if optimizer is None else state_by_name(optimizer, names)
        start = {**dict(model.named_parameters()), **persistent_buffers(model), **state}
        check_same_lazy_tensors({name: isinstance(tensor, LazyTensor) for name, tensor in start.items()}, self._mesh)
        with_values = {name: tensor for name, tensor in start.items() if not isinstance(tensor, LazyTensor)}
        if self._options.sync_module_states:
            others = [each for each in model.buffers() if not isinstance(each, LazyTensor)]
            broadcast_values(dict.fromkeys([*with_values.values(), *others]), self._mesh)
        else:
            check_equal_digests({name: int64_digest(tensor) for name, tensor in with_values.items()}, self._mesh)

    def _apply_fully_shard(
        self, modules: list[nn.Module], unsharded: set[nn.Parameter], optimizer: Optimizer | None
    ) -> None:
        """Hand the modules to FSDP2, inner ones first.

        [Note: one unit at a time] No reference here keeps the full parameters of a unit alive after it is sharded, so
        no device ever holds more than its shards and one full unit; nor does the host, of a model that was built
        lazily.
        """
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
        from torch.distributed.tensor import DTensor

        casts, digests = self._options.casts, {}
        for number, module in enumerate(modules):
            digests |= {
                f"{name} of {type(module).__name__} {number}": at
                for name, at in self._materialize_module(module).items()
            }
            named = module.named_parameters(remove_duplicate=False)
            full = {name: parameter for name, parameter in named if not isinstance(parameter, DTensor)}
            for parameter in full.values():
                parameter.data = parameter.data.contiguous()  # FSDP2 shards rows; channels_last has none
            policy = MixedPrecisionPolicy() if casts is None else casts.unit
            if casts is not None and module is modules[-1]:
                policy = casts.root
            fully_shard(
                module,
                mesh=self._shard_mesh,
                reshard_after_forward=self._options.reshard_after_forward,
                mp_policy=policy,
                offload_policy=CPUOffloadPolicy() if self._options.offload else OffloadPolicy(),
                ignored_params=unsharded,
            )
            if self._options.fp8_communication:
                sharded: Any = module
                sharded.set_custom_reduce_scatter(_ReduceInEightBits())
                sharded.set_force_sum_reduction_for_comms(True)
            parts = dict(module.named_parameters(remove_duplicate=False))
            for name, parameter in full.items():
                carry_over_attributes(parameter, parts[name])
                if (grad := grad_of(parameter)) is not None:
                    set_grad(parts[name], grad)
            if optimizer is not None:
                rebind_param_groups(optimizer, {each: parts[name] for name, each in full.items()}, shard_like)
        self._modules = modules
        if digests:
            check_equal_digests(digests, self._mesh)

    def _materialize_module(self, module: nn.Module) -> dict[str, int]:
        """Give values to what was built lazily; return their digests where they are not those of the first rank."""
        from colossal._src.lazy import LazyTensor, materialize

        buffers = dict(module.named_buffers()) if self._options.sync_module_states else persistent_buffers(module)
        tensors = {**dict(module.named_parameters()), **buffers}
        lazy = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, LazyTensor)}
        move_module(materialize(module), self._mesh.accelerator.get_current_device())
        if self._options.sync_module_states:
            broadcast_values(lazy.values(), self._mesh)
            return {}
        return {name: int64_digest(tensor) for name, tensor in lazy.items()}

    def _keep_unreduced(self, keeps: bool) -> None:
        self._has_unreduced_grads = keeps
        if self._passes is not None:
            self._passes.keeps_gradients = keeps

    def _lift_watch_before_pass(self, lift: Callable[[], None] | None) -> None:
        if self._passes is not None:
            self._passes.lift_watch = lift

    def _reduce(self, enabled: bool) -> None:
        self._modules[-1].set_requires_gradient_sync(enabled)
        self._scalar_grad_averager.sync.enabled = enabled

    def _reshard_after_eval(self, *_forward: Any) -> None:
        """Free the parameters that a forward pass without a backward pass gathered: the next step makes them stale."""
        if not torch.is_grad_enabled():
            self._reshard()

    def _before_step(self, optimizer: Optimizer, *_step: Any) -> None:
        if self._has_unreduced_grads and next(self._params_with_unsharded_grad(), None) is not None:
            raise ConfigError(UNAVERAGED)
        if self._scalar_grad_averager.sync.is_accumulating:
            check_averaged(optimizer, self._mesh)
        self._keep_unreduced(False)
        self._reshard()
        if self._passes is not None:
            self._passes.check_used()

    def _reshard(self) -> None:
        if not self._options.reshard_after_forward:
            for module in self._modules:
                module.reshard()

    def _params_with_unsharded_grad(self) -> Iterator[Any]:
        """Find what torch holds for a parameter whose gradient is not reduced yet."""
        for held in fsdp_params(self._modules):
            gathered = getattr(held, "_unsharded_param", None)
            if gathered is not None and (gathered.grad is not None or held.unsharded_accumulated_grad is not None):
                yield held


@final
class _ReduceInEightBits:
    """What FSDP2 calls to sum gradients up, see `torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return room for what is summed up."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        **_asked: object,
    ) -> None:
        """Sum up: `set_force_sum_reduction_for_comms` makes FSDP2 request only sums, and it divides by itself."""
        works, finish, num_bytes = reduce_scatter_fp8(output_tensor, input_tensor, group)
        for work in works:
            work.wait()
        finish()
        count_collective("reduce_scatter", DATA, num_bytes * (group.size() - 1) // group.size())
