"""The weights that an engine generates with: those of a model as it is, or those that a Booster trains.

[Note: weights that change]
Pages hold what the weights of their time have computed, and an optimizer writes weights in place, under some plugins
where no version of a tensor counts it. So weights that are trained are hashed before they are used, which reads them
once, as every token does; on ranks that shard a model all are new where those of one are.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from colossal._src.comm import LostPeerGuard, all_reduce_over, equal_text_on_all_ranks, int64_digest
from colossal._src.inference.batch_invariance import batch_invariant
from colossal._src.inference.config import InferenceConfig
from colossal._src.inference.staged_forward import StagedForward
from colossal._src.interface import (
    SAVE_AND_GENERATE,
    ModelWrapper,
    forward_contexts_of,
    full_spec_of,
    model_without_adapters,
    unwrap_compiled,
    unwrap_model,
)
from colossal._src.shardformer import ShardedGeneration, sharded_generation_of
from colossal.errors import ConfigError, UnsupportedError


class Weights(ABC):
    """A model, and what has to be done around its forward passes.

    Attributes:
        parts: Of transformers, with the configuration: the model; of one that is boosted in pipeline stages those of
            this rank, in order.
        forward: Runs it.
        seed: Of the random numbers of requests without a seed; None for one of the operating system.
    """

    parts: tuple[Any, ...]
    forward: Callable[..., Any]
    seed: int | None = None

    @property
    def model(self) -> Any:
        """The model, or the first stage of it that is here."""
        return self.parts[0]

    @abstractmethod
    def in_use(self) -> AbstractContextManager[bool]:
        """Open a context in which the model generates; it gives whether the weights have changed since the last one."""

    def have_changed(self) -> bool:
        """Whether weights have changed since the last time, where `in_use` does not find out; takes milliseconds."""
        return False

    @abstractmethod
    def check_requests(self, requests: object) -> None:
        """Reject requests that the ranks that shard the model do not all have."""


@final
class FixedWeights(Weights):
    """Those of a model in evaluation mode, which are new where PyTorch has counted a write or a tensor is another.

    No write through `data` is counted: its owner says so by `reset_prefix_cache`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parts, self.forward = (model,), model
        self._check_mode()
        self._versions: list[Any] | None = None  # a model may still have to be materialized

    @contextmanager
    def in_use(self) -> Generator[bool]:
        """Reject a model in training mode."""
        self._check_mode()
        yield False

    def have_changed(self) -> bool:
        """Compare versions with those of the last time."""
        before, self._versions = self._versions, _versions(self.model)
        return before is not None and self._versions != before

    def check_requests(self, requests: object) -> None:
        """One rank has the model."""

    def _check_mode(self) -> None:
        if self.model.training:
            raise ConfigError(
                "A model generates in evaluation mode, without dropout. Found one in training mode. Call model.eval()."
            )


@final
class TrainedWeights(Weights):
    """Those of a boosted model, where they are; the model is as it was when the context ends."""

    def __init__(self, boosted: nn.Module, *, is_batch_invariant: bool) -> None:
        own = unwrap_model(boosted)
        self._stages = None if full_spec_of(own) is None else StagedForward(own)
        self.forward = own if self._stages is None else self._stages
        self.parts = (model_without_adapters(own),) if self._stages is None else self._stages.parts
        self._own, self._boosted = own, boosted
        self._is_batch_invariant = is_batch_invariant
        self._sharded = sharded_generation_of(self.model)
        self._groups = [] if self._sharded is None else _check_sharding(self._sharded)
        if self._stages is not None:
            self._groups.append(self._stages.mesh.group("pp"))
        self._digest: int | None = None
        self._is_open = False
        if self._groups:
            # of the ranks that sample the same tokens; the largest, as a number that all of them know
            drawn = torch.randint(2**62, (), generator=_fresh_generator(), device="cpu")
            self.seed = int(all_reduce_over(drawn, self._groups, "max"))

    @contextmanager
    def in_use(self) -> Generator[bool]:
        """Evaluate with full parameters, without communication over data-parallel ranks, which all open the context.

        Communication: with Gemini and FSDP all_gather, dp, the parameters' bytes; with tp and pp all_reduce, 8 bytes.
        """
        if self._is_open:
            yield False
            return
        with ExitStack() as stack:
            stack.enter_context(LostPeerGuard())
            stack.enter_context(torch.no_grad())
            stack.enter_context(_evaluation_mode(self._own))
            stack.enter_context(_full_parameters(self._boosted, self._own))
            for open_context in forward_contexts_of(self._boosted):
                stack.enter_context(open_context())
            if self._sharded is not None and (self._stages is None or self._stages.has_head):
                stack.enter_context(self._sharded.full_logits(self.parts[-1]))
            if self._is_batch_invariant:
                stack.enter_context(batch_invariant())
            stack.callback(setattr, self, "_is_open", False)
            self._is_open = True
            yield self._are_new()

    def check_requests(self, requests: object) -> None:
        """Compare them over the ranks that shard the model.

        Communication: with tp and pp all_reduce, 16 bytes.
        """
        if not equal_text_on_all_ranks(repr(requests), self._groups):
            raise ConfigError(
                "Ranks that shard a model compute each token together: all of its tensor-parallel ranks and pipeline "
                "stages pass the same prompts and parameters, in the same order. Found others on another rank. Choose "
                "prompts by the rank on the dp axis: booster.plugin.data_parallel_rank_and_size."
            )

    def _are_new(self) -> bool:
        digest = int64_digest(repr([int64_digest(_content(value)) for value in _values(self._own)]))
        are_new, self._digest = digest != self._digest, digest
        if self._groups:
            are_new = bool(all_reduce_over(torch.tensor(int(are_new), device="cpu"), self._groups, "max"))
        return are_new


def _versions(model: nn.Module) -> list[Any]:
    """What is another list after weights were written or replaced, or other adapters are active."""
    found: list[Any] = []
    for module in model.modules():
        values = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        found += [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in values]  # noqa: SLF001 (torch has no public name)
        if hasattr(module, "merged_adapters"):  # a layer of peft
            layer: Any = module
            found.append((layer.active_adapters, layer.disable_adapters, list(layer.merged_adapters)))
    return found


def weights_of(model: nn.Module, config: InferenceConfig) -> Weights:
    """Find what a model is: boosted, or not."""
    if not isinstance(unwrap_compiled(model), ModelWrapper | DistributedDataParallel):
        return FixedWeights(model)
    if config.num_ranks > 1:
        raise ConfigError(
            f"A boosted model is on ranks as its plugin has put it there. Found tp_size={config.tp_size} and "
            f"pp_size={config.pp_size}. Pass 1 for both to the InferenceConfig, also with tensor parallelism."
        )
    return TrainedWeights(model, is_batch_invariant=config.batch_invariant)


def _check_sharding(sharded: ShardedGeneration) -> list[Any]:
    """Reject what one forward pass a token cannot be computed with; return the groups that have the same prompts."""
    for is_refused, found, instead in (
        (sharded.shards_tokens, "a model whose tokens are sharded over ranks", SAVE_AND_GENERATE),
        (sharded.shares_experts, "experts that ranks with other prompts use too", "Call generate of model.unwrap()."),
    ):
        if is_refused:
            raise UnsupportedError(f"An engine computes as many tokens as its requests need. Found {found}. {instead}")
    return [sharded.mesh.group("tp")] if sharded.mesh.size("tp") > 1 else []


@contextmanager
def _evaluation_mode(model: nn.Module) -> Generator[None]:
    """Set the flags alone: a method `train` of a user's module may do more than that."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _full_parameters(boosted: nn.Module, own: nn.Module) -> Generator[None]:
    """Gather the parameters that are sharded over data-parallel ranks, once for all passes."""
    from torch.distributed.fsdp import FSDPModule

    from colossal._src.zero.gemini import GeminiDDP

    found = unwrap_compiled(boosted)
    with ExitStack() as stack:
        if isinstance(found, GeminiDDP):
            stack.enter_context(found.chunks.hold_all())
        if isinstance(own, FSDPModule):
            stack.enter_context(_unsharded(own))
        yield


@contextmanager
def _unsharded(model: Any) -> Generator[None]:
    """Keep the units of FSDP2 gathered between passes, and leave no trace of these passes for the next backward one."""
    from torch.distributed.fsdp import FSDPModule

    units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]  # noqa: SLF001 (torch has no public name for them)
    reshards = [group.post_forward_mesh_info for group in groups]
    for unit in units:
        unit.unshard()
    order = [len(group._post_forward_indices) for group in groups]  # noqa: SLF001 (as above)
    # of all groups together; before the first pass there is none
    total = len(getattr(groups[0].comm_ctx, "post_forward_order", ()))
    try:
        for group in groups:
            group.post_forward_mesh_info = None
        yield
    finally:
        for group, reshard, length in zip(groups, reshards, order, strict=True):
            group.post_forward_mesh_info = reshard
            del group._post_forward_indices[length:]  # noqa: SLF001 (as above)
        del getattr(groups[0].comm_ctx, "post_forward_order", [])[total:]
        for unit in units:
            unit.reshard()


def _values(model: nn.Module) -> Iterable[torch.Tensor]:
    """The parameters and buffers of a model, each once; the hooks of its state dict wait for those on their way."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):  # whose state dict has shards
        # copies one by one, as FSDP2 cannot free what numpy has seen
        return (each.detach().clone() for each in (*model.parameters(), *model.buffers()))
    found = model.state_dict(keep_vars=True).values()
    return {id(value): value for value in found if isinstance(value, torch.Tensor)}.values()


def _content(value: torch.Tensor) -> torch.Tensor:
    """What is hashed on the host, which an accelerator reduces to a number a row."""
    value = value.detach()
    return value if value.device.type == "cpu" or value.dim() in (0, 1) else torch.hash_tensor(value, -1)


def _fresh_generator() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator
