"""A model whose parameters are in chunks."""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import InitVar, dataclass
from typing import Any, NoReturn, final

import torch
from torch import distributed as dist
from torch import nn

from colossal._src.amp import cast_floats, cast_inputs_and_outputs
from colossal._src.cluster import ParallelMesh, current_mesh
from colossal._src.comm import Partition, all_reduce_over
from colossal._src.interface import (
    SAVE_AND_GENERATE,
    SAVE_AND_MERGE,
    Keywords,
    ModelWrapper,
    check_equal_rounding,
    full_items,
    full_state,
    lift_refusals,
    model_without_adapters,
    refuse,
    refuse_copy,
    unwrap_model,
)
from colossal._src.tensor import (
    DATA,
    Replicas,
    backing_shard,
    local_regions_of,
    operators_mesh,
    placement_of,
    replicas_of,
)
from colossal._src.zero.gemini.chunk_building import DeviceLike, build_chunks, check_devices, check_replicas
from colossal._src.zero.gemini.chunk_search import ParameterOrder
from colossal._src.zero.gemini.gemini_config import GeminiConfig
from colossal._src.zero.partitions import Partitions
from colossal._src.zero.zero_config import ZeroConfig
from colossal.errors import ConfigError, UnsupportedError

_REFUSED: Mapping[str, str] = {
    "generate": (
        "generate needs full parameters. Found a model whose parameters are in chunks. Generate by "
        f"colossal.inference.InferenceEngine, which gathers them for a call. Or: {SAVE_AND_GENERATE}"
    ),
    "merge_and_unload": f"Merging needs full parameters. Found them in chunks. {SAVE_AND_MERGE}",
    "load_state_dict": (
        "Each rank copies its shards of a full state. Found a load_state_dict of the model that was wrapped, whose "
        "parameters are in chunks. On all ranks call model.load_state_dict(state) of the boosted model, or "
        "booster.load_model(model, file)."
    ),
    "save_pretrained": (
        "save_pretrained writes what this process has, as if it were the full model. Found parameters in chunks. Call "
        "booster.save_model(model, directory, shard=True, use_safetensors=True) on all ranks: from_pretrained loads "
        "the directory. Adapters alone are written by booster.save_lora_as_pretrained."
    ),
}


@final
@dataclass(eq=False, repr=False)
class GeminiDDP(ModelWrapper):
    """Trains a model whose parameters are sharded over data-parallel ranks, chunk by chunk: ZeRO-3.

    A chunk is gathered when an operation reads one of its parameters, in forward and in backward passes, and released
    when its memory is needed for others. Gradients are summed up as chunks of them are complete. A step equals one of a
    single process on the joined batch of all ranks.

    All ranks must use the same parameters in the same order. Parameters have no values between passes.

    Args:
        module: The model, on any device, or built inside of `LazyInitContext`.
        chunk_config_dict: For numbers of ranks, ``{"chunk_size": elements, "keep_gathered": bool}``; by default the
            size is searched for.
        chunk_init_device: Accepted for None and the device of the ranks: parameters are sharded one by one, so that no
            other device is needed.
        placement_policy: ``"static"``: as the fractions below say; ``"cuda"``: all on the device; ``"cpu"``,
            ``"const"``: all in host memory, parameters between their uses; ``"auto"``: on the device while it fits.
        enable_gradient_accumulation: Accepted as documented; gradients of several backward passes always add up.
        max_prefetch: How many chunks are gathered ahead of their use.
        shard_param_frac: Static: the fraction of the parameters that is sharded.
        offload_optim_frac: Static: the fraction of master weights, gradients and optimizer states in host memory.
        offload_param_frac: Static: the fraction of the parameters that is in host memory between its uses.
        warmup_non_model_data_ratio: Auto: the fraction of the budget that the first pass keeps free.
        steady_cuda_cap_ratio: Auto: the fraction of a GPU's memory that is the budget, if `device_budget` is not given.
        search_range_m: How far above the smallest chunk the size is searched for, in units of 2**20 elements.
        hidden_dim: The step of that search, in elements.
        min_chunk_size_m: The smallest chunk, in units of 2**20 elements; none is smaller than the largest parameter.
        pin_memory: Page-lock the host memory of chunks, from which a GPU copies faster; on a CPU there is nothing to
            page-lock.
        force_outputs_fp32: Cast floating-point outputs to float32.
        strict_ddp_mode: Keep full parameters on all ranks, on their devices.
        scatter_after_inference: Release all chunks after a forward pass without gradients.
        mixed_precision: What the model is cast to; None leaves its types.
        zero_group: The ranks over which chunks are sharded; those of the dp axis by default.
        memstats: Knows the order in which the parameters are used; that of `module.parameters()` by default.
        master_weights: Update float32 copies of parameters in half precision.
        extra_dp_group: Ranks that hold the same shards.
        verbose: Log the chunk configuration on rank 0.
        enable_async_reduce: Let the backward pass go on while gradients are reduced.
        fp8_communication: Communicate gradients in 8 bits, with a scale for each block of them; sums are in float32.
        use_fp8: Matrix products in 8 bits; not built yet.
        device_budget: The most bytes on the device, for parameters, gradients, optimizer states, and with the auto
            policy for what autograd saves; on a CPU too, in which case host memory counts as another tier.
        nvme_param_frac: Static: the fraction of the parameters that is in files between its uses; at most
            `offload_param_frac`. The states of `colossal.nn.optimizer.HybridAdam` go there by its own arguments.
        nvme_offload_dir: The folder of these files, on a fast disk; that of temporary files by default.
        device: Where the model computes: the device of the ranks, which is the default.
        search_range_mb: Another name of `search_range_m`, with the same unit: elements, not bytes.
        min_chunk_size_mb: Another name of `min_chunk_size_m`, with the same unit.

    Attributes:
        chunks: The manager that gathers and evicts chunks.
        device: Where the model computes.
        gradients: How gradients are communicated.
        partition: The ranks over which chunks are sharded.

    Raises:
        ConfigError: A value is outside its range, or the budget is too small for what cannot be elsewhere.
        UnsupportedError: An option, or a parameter or module of the model, is not supported.

    Source: Rajbhandari et al., "ZeRO", 2020, https://arxiv.org/abs/1910.02054, section 5.3; Fang et al., "Parallel
    Training of Pre-Trained Models via Chunk-Based Dynamic Memory Management", 2021, https://arxiv.org/abs/2108.05818.

    Communication: all_gather, dp, the parameters' bytes, in each forward pass, and in each backward pass for the chunks
    that are not gathered any more; reduce_scatter, dp, the gradients' bytes, in each backward pass; all_reduce, dp, 16
    bytes, in each step. broadcast, dp, the model's bytes, at the beginning.

    Example:
        >>> import torch
        >>> from colossal.testing import run_threads
        >>> from colossal.zero.gemini import GeminiAdamOptimizer, GeminiDDP
        >>> linear = torch.nn.Linear(3, 1, bias=False)
        >>> _ = torch.nn.init.ones_(linear.weight)
        >>> def program():
        ...     from copy import deepcopy
        ...     model = GeminiDDP(deepcopy(linear), mixed_precision=None)
        ...     optimizer = GeminiAdamOptimizer(model, lr=0.25)
        ...     optimizer.backward(model(torch.ones(2, 3)).mean())
        ...     optimizer.step()
        ...     return model.state_dict(only_rank_0=False)["weight"].tolist()
        >>> run_threads(program, 2)
        [[[0.75, 0.75, 0.75]], [[0.75, 0.75, 0.75]]]
    """

    module: InitVar[nn.Module]
    chunk_config_dict: Mapping[int, Mapping[str, Any]] | None = None
    chunk_init_device: DeviceLike = None
    placement_policy: str = "static"
    enable_gradient_accumulation: bool = False
    max_prefetch: int = 0
    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    warmup_non_model_data_ratio: float = 0.8
    steady_cuda_cap_ratio: float = 0.9
    search_range_m: float = 32
    hidden_dim: int | None = None
    min_chunk_size_m: float = 32
    pin_memory: bool = False
    force_outputs_fp32: bool = False
    strict_ddp_mode: bool = False
    scatter_after_inference: bool = True
    mixed_precision: torch.dtype | None = torch.float16
    zero_group: dist.ProcessGroup | None = None
    memstats: ParameterOrder | None = None
    master_weights: bool = True
    extra_dp_group: dist.ProcessGroup | None = None
    verbose: bool = False
    enable_async_reduce: bool = True
    fp8_communication: bool = False
    use_fp8: bool = False
    device_budget: int | None = None
    nvme_param_frac: float = 0.0
    nvme_offload_dir: str | None = None
    device: DeviceLike = None
    search_range_mb: float | None = None
    min_chunk_size_mb: float | None = None

    def __post_init__(self, module: nn.Module) -> None:
        super().__init__(module)
        # of parameters that know the mesh that they are distributed over, no other will do
        keywords, mesh = Keywords.of(self), operators_mesh(module.parameters()) or current_mesh()
        device = mesh.accelerator.get_current_device()
        check_devices(device, self.device, self.chunk_init_device)
        self.gradients = keywords.read(ZeroConfig, stage=2)
        if self.gradients.fp8_communication:
            check_equal_rounding(module.parameters())
        self.partition = Partition(
            self.zero_group or Replicas(mesh).group,
            self.extra_dp_group,
            compress_fp8=self.gradients.fp8_communication,
        )
        check_replicas(module, self.partition, mesh)
        self._groups = [mesh.group(axis) for axis in (DATA, "tp", "sp")]
        self.device = device
        with mesh:
            self.chunks = build_chunks(
                module,
                self.partition,
                self._partition_of(mesh),
                keywords.read(GeminiConfig),
                self.gradients,
                device,
                self.mixed_precision,
                self.memstats,
                self.scatter_after_inference,
            )
        own = unwrap_model(self)
        for name, message in _REFUSED.items():
            refuse([each for each in (own, model_without_adapters(own)) if hasattr(each, name)], name, message)
        if self.mixed_precision is not None:
            cast_inputs_and_outputs(self, self.mixed_precision)
        elif self.force_outputs_fp32:
            self.register_forward_hook(lambda _module, _args, outputs: cast_floats(outputs, torch.float32))

    def _partition_of(self, mesh: ParallelMesh) -> Callable[[nn.Parameter], Partition]:
        """Partition what is sharded over ranks of the dp axis, as experts are, over those with the same shard."""
        partitions, over_dp = Partitions(mesh, self.gradients.fp8_communication), Replicas(mesh)

        def partition_of(parameter: nn.Parameter) -> Partition:
            replicas = replicas_of(parameter, mesh)
            return self.partition if replicas == over_dp else partitions.over(replicas)

        return partition_of

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with self.chunks.forward_pass():
            return unwrap_model(self)(*args, **kwargs)

    def state_dict(
        self,
        *args: Any,
        prefix: str = "",
        only_rank_0: bool = True,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Gather the full state dict of the model in host memory, by the names of the model that was wrapped.

        Args:
            *args: Rejected, as `kwargs`: those that a module around this one passes, such as one of `torch.compile`.
            prefix: Goes in front of each name, as of a module's state dict.
            only_rank_0: Return it on the first rank only, and nothing on others.
            dtype: What floating-point tensors are converted to; by default they stay as they are.
            **kwargs: Rejected.

        Returns:
            Full tensors by name.

        Raises:
            UnsupportedError: There are other arguments.
            CommunicationError: Not all ranks call.

        Communication: all_gather, dp, the model's bytes.
        """
        if args or kwargs:
            raise UnsupportedError(
                "The state of a model in chunks is gathered from all ranks. Found a call with the arguments of a "
                "module's state_dict, as those of a module around it, such as of torch.compile(model). Call "
                "model.state_dict(only_rank_0=...) of the boosted model on all ranks, or booster.save_model."
            )
        self._copy_written()
        state = full_state(unwrap_model(self), is_kept=not only_rank_0 or self.partition.rank == 0)
        for name, value in state.items() if dtype is not None else ():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                state[name] = value.to(dtype)
        return {f"{prefix}{name}": value for name, value in state.items()}

    def state_dict_shard(
        self, max_shard_size: float = 1024, only_rank_0: bool = True
    ) -> Iterator[tuple[dict[str, Any], int]]:
        """Gather the full state dict as `state_dict` does, some of it at a time.

        Args:
            max_shard_size: How much is gathered at a time, in MiB; more if one tensor is larger.
            only_rank_0: Give it to the first rank only. The others are to iterate too.

        Yields:
            Full tensors by name, none on a rank that keeps nothing, and their size in bytes.

        Raises:
            CommunicationError: Not all ranks iterate.

        Communication: all_gather, dp, the model's bytes.
        """
        self._copy_written()
        is_kept, found, size = not only_rank_0 or self.partition.rank == 0, dict[str, Any](), 0
        for name, value in full_items(unwrap_model(self)):
            num_bytes = value.nbytes if isinstance(value, torch.Tensor) else 0
            if size and size + num_bytes > max_shard_size * 2**20:
                yield found, size
                found, size = {}, 0
            found |= {name: value} if is_kept else {}
            size += num_bytes
        if size:
            yield found, size

    def __deepcopy__(self, _memo: dict[int, Any]) -> NoReturn:
        """Refuse: between passes parameters have no values.

        Raises:
            UnsupportedError: Always; it says how to average weights.
        """
        refuse_copy("chunks, which have no values between passes")

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a full state dict, of which each rank copies its shards.

        Args:
            state_dict: Full tensors by name, the same on all ranks.
            strict: Require that the names agree.
            assign: Not possible here: parameters are in chunks.

        Returns:
            The names that are missing, and those that the model does not have, as torch returns them.

        Raises:
            UnsupportedError: `assign` is set.
            ConfigError: The state is empty on a rank.
            RuntimeError: The names do not agree and `strict` is set, or a shape differs; on all ranks, before
                anything is written.

        Communication: all_reduce, dp, tp and sp, 8 bytes.
        """
        if assign:
            raise UnsupportedError(
                "Parameters keep their places in chunks. Found assign=True. Leave it out: values are copied."
            )
        own = unwrap_model(self).state_dict(keep_vars=True)
        # also with strict=False: other ranks would load their shards of the model alone, or wait for this one
        empty = torch.tensor(dist.get_rank() if own and not state_dict else -1, device=self.chunks.memory.device)
        if (rank := int(all_reduce_over(empty, self._groups, "max"))) >= 0:
            raise ConfigError(
                f"Each rank copies its shards from a full state. Found an empty one on rank {rank}, as "
                "model.state_dict() gives to all ranks but the first. Keep model.state_dict(only_rank_0=False), or "
                "call booster.save_model and booster.load_model."
            )
        missing, unexpected = [n for n in own if n not in state_dict], [n for n in state_dict if n not in own]
        wrong = [n for n in own if n in state_dict and _full_shape(own[n]) != _full_shape(state_dict[n])]
        if wrong or (strict and (missing or unexpected)):
            raise RuntimeError(
                f"Loading needs a state of the same model. Found names missing: {missing}, unexpected: {unexpected}, "
                f"of another shape: {wrong}. Build the model with the configuration that was saved."
            )
        for name, value in own.items():
            if name in state_dict and isinstance(value, torch.Tensor):
                for region, part in local_regions_of(backing_shard(value), dist.get_rank()):
                    part.copy_(state_dict[name][region.slices])
        return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)  # noqa: SLF001 (its public name is none)


def get_static_torch_model(
    zero_ddp_model: GeminiDDP,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    only_rank_0: bool = True,
) -> nn.Module | None:
    """Copy a model out of its chunks.

    Args:
        zero_ddp_model: The wrapped model.
        device: Where the copy goes.
        dtype: What its floating-point tensors become.
        only_rank_0: Return it on the first rank only, and None on others.

    Returns:
        A plain model with full parameters.

    Communication: all_gather, dp, the model's bytes.

    Example:
        >>> import torch
        >>> from colossal.testing import fake_world
        >>> from colossal.zero.gemini import GeminiDDP, get_static_torch_model
        >>> with fake_world(1):
        ...     model = GeminiDDP(torch.nn.Linear(2, 1), mixed_precision=torch.bfloat16)
        ...     print(type(get_static_torch_model(model).weight).__name__, get_static_torch_model(model).weight.dtype)
        Parameter torch.float32
    """
    state = zero_ddp_model.state_dict(only_rank_0=only_rank_0)
    # only here, since all ranks take part in the gathers
    if only_rank_0 and zero_ddp_model.partition.rank != 0:
        return None
    memo: dict[int, Any] = {}
    for name, parameter in unwrap_model(zero_ddp_model).named_parameters():
        # deepcopy would read the parameter, whose values are sharded
        memo[id(parameter)] = nn.Parameter(state[name].to(device, dtype), requires_grad=parameter.requires_grad)
    copied = deepcopy(unwrap_model(zero_ddp_model), memo).to(device)
    lift_refusals(copied)
    return copied


def _full_shape(value: Any) -> Any:
    return tuple(placement_of(backing_shard(value)).shape) if isinstance(value, torch.Tensor) else None
