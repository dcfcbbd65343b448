"""Low-level ZeRO by an optimizer alone, as the first plugins used it."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossal._src.amp import DynamicScaler, ScalerConfig
from colossal._src.cluster import current_mesh
from colossal._src.comm import Partition
from colossal._src.interface import Clipping, Keywords, OptimizerWrapper, reduce_in_each_pass
from colossal._src.legacy.notice import superseded
from colossal._src.legacy.tensor.sharding import sharding_of
from colossal._src.tensor import copy_placement, full_tensor_of, placement_of
from colossal._src.zero import ZeroConfig, ZeroShards, shard_optimizer
from colossal.errors import ConfigError, UnsupportedError

_GRADIENTS = 2


class LowLevelZeroOptimizer(OptimizerWrapper):
    """An optimizer whose states, and maybe gradients, are sharded over the data-parallel ranks.

    `LowLevelZeroPlugin` does the same and names the parameters in checkpoints.

    Args:
        optimizer: An optimizer that treats elements one by one; changed in place. Its parameters are the same on all
            ranks.
        pg_to_param_list: Accepted for None, and for one group with all parameters: the ranks over which their states
            are sharded.
        initial_scale: First loss scale; greater than 0. The loss is scaled if a parameter is in float16.
        min_scale: The scale does not fall below it.
        growth_factor: Factor of the scale after `growth_interval` steps without an overflow; greater than 1.
        backoff_factor: Factor of the scale after overflows; between 0 and 1.
        growth_interval: Number of steps without an overflow after which the scale grows; at least 1.
        hysteresis: Number of overflows since the scale last grew that it takes until it falls.
        max_scale: The scale does not grow above it.
        clip_grad_norm: Clip the common norm of the gradients to it before each step; 0 does not.
        verbose: Log each change of the scale on rank 0.
        reduce_bucket_size: Gradients are reduced when this many elements of them are there.
        communication_dtype: What gradients are summed in; their own dtype by default.
        overlap_communication: Let the backward pass go on while gradients are reduced.
        partition_grad: Keep of each gradient only the shard that this rank updates: stage 2.
        cpu_offload: Keep master weights and optimizer states in host memory.
        dp_process_group: The data-parallel ranks; by default those of the group of each `ColoParameter`, or of the
            dp axis.
        extra_dp_group: Ranks that hold the same shards.
        forced_dtype: Cast the parameters to it first.
        master_weights: Update float32 copies of parameters in half precision.
        overlap_allgather: Accepted for False only: it takes the model, which `LowLevelZeroPlugin` has.
        fp8_communication: Communicate gradients in 8 bits, with a scale for each block of them.
        backward_context: Accepted for None only.

    Raises:
        ConfigError: A value is outside its range, or groups contradict each other.
        UnsupportedError: An option needs the model, or the optimizer looks at more than one element at once.

    Source: Rajbhandari et al., "ZeRO", 2020, https://arxiv.org/abs/1910.02054, sections 5.1 and 5.2.

    Communication: none when it is made. reduce_scatter, dp, the gradients' bytes, in each backward pass; all_gather,
    dp, the parameters' bytes, in each step.

    Example:
        >>> import torch
        >>> from colossal.legacy.zero import LowLevelZeroOptimizer
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     model = torch.nn.Linear(4, 3, bias=False)
        ...     optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters()), partition_grad=True)
        >>> optimizer.parameters[0].shape
        torch.Size([6])
    """

    def __init__(
        self,
        optimizer: Optimizer,
        pg_to_param_list: Mapping[dist.ProcessGroup, Sequence[nn.Parameter]] | None = None,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 2,
        max_scale: float = 2**24,
        clip_grad_norm: float = 0.0,
        verbose: bool = False,
        reduce_bucket_size: int = 1024 * 1024,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = False,
        partition_grad: bool = False,
        cpu_offload: bool = False,
        dp_process_group: dist.ProcessGroup | None = None,
        extra_dp_group: dist.ProcessGroup | None = None,
        forced_dtype: torch.dtype | None = None,
        master_weights: bool = True,
        overlap_allgather: bool = False,
        fp8_communication: bool = False,
        backward_context: Any = None,
    ) -> None:
        given = dict(locals())
        superseded(
            "colossal.zero.LowLevelZeroOptimizer", "Booster(plugin=LowLevelZeroPlugin(...)).boost(model, optimizer)"
        )
        _refuse_what_needs_the_model(overlap_allgather, backward_context)
        held = nn.ParameterList(parameter for group in optimizer.param_groups for parameter in group["params"])
        group = _group_of(held, pg_to_param_list, dp_process_group)
        if forced_dtype is not None:
            for parameter in held:
                parameter.data = parameter.data.to(forced_dtype)
        keywords, scaler = Keywords("LowLevelZeroOptimizer", given), None
        half = [parameter for parameter in held if parameter.dtype == torch.float16]
        if half:
            rule, device_type = keywords.read(ScalerConfig), half[0].device.type
            scaler = DynamicScaler(rule, device_type, verbose, unscale_fp16_grads=not master_weights)
        zero = keywords.read(ZeroConfig, stage=_GRADIENTS if partition_grad else 1)
        partition = Partition(group, extra_dp_group, compress_fp8=fp8_communication)
        clipping = Clipping(max_norm=clip_grad_norm)
        sharded = shard_optimizer(held, optimizer, lambda _: partition, zero, clipping=clipping)
        super().__init__(optimizer, scaler, sharded.param_names, sharded.masters, clip_grad_norm)
        self._keeps_gradients = zero.keeps_gradients

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients on each rank instead of reducing them in each backward pass.

        Returns:
            A new context manager. With `partition_grad` gradients are reduced in each pass all the same, as no rank
            keeps full ones.
        """
        masters: Any = self.masters
        return masters.no_sync() if self._keeps_gradients else reduce_in_each_pass()

    def get_param_grad(self, working_param: nn.Parameter) -> torch.Tensor | None:
        """Gather the gradient of a parameter: averaged over ranks, and multiplied by the loss scale.

        Args:
            working_param: A parameter of the model.

        Returns:
            The full gradient; None if no rank has one.

        Raises:
            ConfigError: The parameter is not one of this optimizer.

        Communication: all_reduce, dp, the gradient's bytes; the first call after a backward pass reduces what is not
        reduced yet. All ranks must call, in the same order.
        """
        self._shards.copy_grads_to_masters()
        shard = self._shard_of(working_param)
        if shard.grad is None:
            return None
        return full_tensor_of(copy_placement(shard.grad, shard)).to(working_param.dtype).view_as(working_param)

    def get_partitioned_gradients_by_param_id(self, group_id: int, param_id: int) -> list[torch.Tensor]:
        """Return this rank's shard of a gradient: averaged over ranks, and multiplied by the loss scale.

        Args:
            group_id: Not needed: a parameter is in one group.
            param_id: The `id` of a parameter of the model.

        Returns:
            The shard, or nothing if no rank has a gradient.

        Communication: as of `get_param_grad`, without the gather.
        """
        del group_id
        self._shards.copy_grads_to_masters()
        found = [shard.grad for shard, working in self._shards.pairs.items() if id(working) == param_id]
        return [grad for grad in found if grad is not None]

    def get_working_to_master_map(self) -> dict[int, torch.Tensor]:
        """Return what is updated in place of each parameter.

        Returns:
            This rank's shard, by the `id` of the parameter of the model.
        """
        return {id(working): shard for shard, working in self._shards.pairs.items()}

    def get_master_to_working_map(self) -> dict[int, torch.Tensor]:
        """Return the parameter that each shard is of.

        Returns:
            The parameter of the model, by the `id` of this rank's shard.
        """
        return {id(shard): working for shard, working in self._shards.pairs.items()}

    def state_dict(self, only_rank_0: bool | None = None) -> dict[str, Any]:
        """Gather the whole state, in the format of the optimizer without ZeRO.

        Args:
            only_rank_0: Return it on the first rank only, and an empty dict on the others.

        Returns:
            The state by number of the parameter, and the groups; the same on all ranks.

        Communication: all_reduce, dp, the bytes of the state. All ranks must call.
        """
        found = super().state_dict()
        state = {number: dict(entry) for number, entry in found["state"].items()}
        for number, shard in enumerate(self.parameters):
            for name, value in state.get(number, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == shard.shape:
                    whole = full_tensor_of(copy_placement(value.detach().clone(), shard))
                    state[number][name] = whole.view_as(self._shards.pairs[shard])
        return {} if only_rank_0 and dist.get_rank() else found | {"state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's shards from a whole state, such as one of the optimizer without ZeRO.

        Args:
            state_dict: As of `state_dict`.
        """
        state = {number: dict(entry) for number, entry in state_dict["state"].items()}
        for number, shard in enumerate(self.parameters):
            for name, value in state.get(number, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == self._shards.pairs[shard].shape:
                    state[number][name] = _shard_of_value(value, shard)
        super().load_state_dict(state_dict | {"state": state})

    @property
    def _shards(self) -> ZeroShards:
        assert isinstance(self.masters, ZeroShards)
        return self.masters

    def _shard_of(self, working: nn.Parameter) -> nn.Parameter:
        for shard, own in self._shards.pairs.items():
            if own is working:
                return shard
        raise ConfigError(
            f"Gradients are those of parameters of this optimizer. Found one of {tuple(working.shape)} that is none of "
            "them. Pass a parameter of the model."
        )


def _shard_of_value(value: torch.Tensor, shard: nn.Parameter) -> torch.Tensor:
    local = copy_placement(torch.empty_like(shard, dtype=value.dtype).detach(), shard)
    for region, view in placement_of(local).local_views(local):
        view.copy_(value[region.slices])
    return local


def _refuse_what_needs_the_model(overlap_allgather: bool, backward_context: Any) -> None:
    if overlap_allgather or backward_context is not None:
        found = "overlap_allgather=True" if overlap_allgather else "a backward_context"
        raise UnsupportedError(
            f"An optimizer alone knows no forward pass to wait in, and opens no context of others. Found {found}. "
            "Leave it out, or train by Booster(plugin=LowLevelZeroPlugin(...)), which has overlap_allgather."
        )


def _group_of(
    held: Sequence[nn.Parameter] | nn.ParameterList,
    lists: Mapping[dist.ProcessGroup, Sequence[nn.Parameter]] | None,
    group: dist.ProcessGroup | None,
) -> dist.ProcessGroup:
    """The ranks over which states are sharded."""
    if lists is None:
        return group or _replicas_of(held)
    if group is not None:
        raise ConfigError(
            "The data-parallel ranks are given once. Found pg_to_param_list and dp_process_group. Leave one out."
        )
    if len(lists) != 1 or {id(each) for params in lists.values() for each in params} != {id(each) for each in held}:
        raise UnsupportedError(
            f"The states of all parameters of an optimizer are sharded over one group. Found {len(lists)} groups in "
            "pg_to_param_list, or parameters that are in none. Make one optimizer for each group."
        )
    return next(iter(lists))


def _replicas_of(held: Sequence[nn.Parameter] | nn.ParameterList) -> dist.ProcessGroup:
    """The ranks that hold the same as this one: of parameters that know their group, those of that."""
    groups = {known.group for parameter in held if (known := sharding_of(parameter)) is not None}
    if len(groups) > 1:
        raise ConfigError(
            f"The parameters of an optimizer have one group of replicas. Found {sorted(map(repr, groups))}. "
            "Pass dp_process_group, or make one optimizer for each group."
        )
    return next(iter(groups)).dp_process_group() if groups else current_mesh().group("dp")
