# pyright: reportIncompatibleVariableOverride=false
"""State dicts of which this rank has shards only: for use in memory, and not to be written as if they were full.

`StateMixin` has the verbs of a boosted optimizer that hand its state out and take it back.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, final

import torch
from torch import distributed as dist
from torch import nn

from colossal._src.interface.full_spec import Peers
from colossal._src.tensor import backing_shard, copy_placement, full_tensor_of, is_dtensor, placement_of
from colossal.errors import ConfigError, UnsupportedError

_MODEL = (
    "A file of a model holds full tensors of all layers. Found a state_dict of {}, which is about to be copied to a "
    "file or another process. On all ranks call booster.save_model(model, checkpoint), or "
    "model.state_dict(only_rank_0=True), which gathers full tensors; under pipelines only the first."
)
_OPTIMIZER = (
    "A file of optimizer states holds full tensors of all parameters. Found the state_dict() of one rank, which has "
    "shards of them, and is about to be copied to a file or another process. Call "
    "booster.save_optimizer(optimizer, checkpoint) on all ranks, and booster.load_optimizer, on any number of them."
)
_INTO_FULL = (
    "A model of full tensors takes the state of a full model. Found a state_dict of one rank, with shards or some "
    "layers only. On all ranks take model.state_dict(only_rank_0=False), or in a pipeline call "
    "booster.save_model(model, checkpoint), and load what is there into the full model."
)
_LOAD = nn.Module.load_state_dict.__code__
_LOAD_OWN = nn.Module._load_from_state_dict.__code__  # noqa: SLF001 (where torch compares shapes)
_FACTORED_ENDINGS = ("_row", "_col")
"""Of optimizer states that are full on all ranks: sums over rows and columns."""


@final
class LocalState(OrderedDict[Any, Any]):
    """What this rank has of a state: pickling it is refused, with what to do instead."""

    def __init__(self, items: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (), message: str = "") -> None:
        super().__init__(items)
        self.message = items.message if isinstance(items, LocalState) else message

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise UnsupportedError(self.message)

    def keys(self) -> Any:
        """Return the keys; not to load them into a model of full tensors, of which torch would say what is missing."""
        caller = sys._getframe(1)  # noqa: SLF001 (the only way to find the caller)
        is_loaded = caller.f_code is _LOAD and not any(map(is_dtensor, self.values()))  # which torch gathers
        if is_loaded and not any(map(_has_local_state, caller.f_locals["self"].modules())):
            raise UnsupportedError(_INTO_FULL)
        return super().keys()

    def __missing__(self, key: Any) -> NoReturn:
        raise KeyError(
            f"{key!r} is not in the state of this rank, which has shards or some layers only: booster.save_model and "
            "booster.save_optimizer write full states"
        )

    def __copy__(self) -> "LocalState":
        return LocalState(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LocalState":
        from copy import deepcopy

        copied = LocalState(((key, deepcopy(value, memo)) for key, value in self.items()), self.message)
        vars(copied).update(deepcopy({key: value for key, value in vars(self).items() if key != "message"}, memo))
        return copied


class LocalShard(torch.Tensor):
    """A shard in a state dict, and what is computed from it: as `{name: value.cpu()}` it is not written either."""

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        _refuse_shard(self)

    def data_ptr(self) -> NoReturn:
        """Refuse what writes a tensor's memory, as safetensors does."""
        _refuse_shard(self)

    @property
    def shape(self) -> torch.Size:
        """The shape of the shard; not to compare it with that of a full tensor which is about to take its values."""
        shape, caller = self.size(), sys._getframe(1)  # noqa: SLF001 (as above)
        if caller.f_code is _LOAD_OWN and caller.f_locals["param"].shape != shape:
            raise UnsupportedError(_INTO_FULL)
        return shape

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with shards; an error that they have another size than full tensors says where full ones are."""
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except RuntimeError as error:
            if "size" in str(error):
                raise UnsupportedError(f"{error}. {_INTO_FULL}") from error
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.detach().clone())


def _refuse_shard(tensor: torch.Tensor) -> NoReturn:
    raise UnsupportedError(_MODEL.format(f"one rank, whose shard of a tensor has the shape {list(tensor.shape)}"))


def mark_local_state(model: nn.Module, missing: str) -> None:
    """Make the `state_dict` of a model say that it has shards of tensors, or some layers, only."""
    mark = _Mark(_MODEL.format(f"one rank, with {missing}"))
    model._register_state_dict_hook(mark)  # noqa: SLF001 (the public ones cannot replace the dict)


@final
class _Mark:
    """Marks the state of a module as that of one rank, when it is taken."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> LocalState:
        owners = {f"{prefix}{name}": each for name, each in module.named_parameters(remove_duplicate=False)}
        for name in state.keys() & owners.keys():
            owner, value = owners[name], state[name]
            if value is not owner and not is_dtensor(owner) and placement_of(backing_shard(owner)).is_compute_sharded:
                state[name] = value.as_subclass(LocalShard)
        marked = LocalState(state, self._message)
        vars(marked).update({key: value for key, value in vars(state).items() if key != "message"})
        return marked


def _has_local_state(module: nn.Module) -> bool:
    hooks = module._state_dict_hooks.values()  # noqa: SLF001 (torch has no public name for them)
    return any(isinstance(hook, _Mark) for hook in hooks)


def mark_optimizer_state(
    state_dict: dict[str, Any], parameters: Iterable[torch.Tensor], *, has_peers: bool
) -> dict[str, Any]:
    """Say that the states in an optimizer's state dict are those of shards, or of some layers, if they are."""
    if not has_peers and not any(placement_of(each).is_sharded for each in parameters):
        return state_dict
    return state_dict | {"state": LocalState(state_dict["state"], _OPTIMIZER)}


def check_optimizer_state(state_dict: Mapping[str, Any], parameters: Iterable[torch.Tensor]) -> None:
    """Reject empty states, and those of full parameters where an optimizer has shards, which fail at the next step."""
    if "param_groups" not in state_dict:
        raise ConfigError(
            "load_state_dict takes what state_dict of this rank's optimizer returned. Found a dict without "
            "param_groups, as state_dict(only_rank_0=True) gives to all ranks but the first. Call state_dict() on each "
            "rank, or booster.save_optimizer and booster.load_optimizer."
        )
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    for number, parameter in zip(saved, parameters, strict=False):
        full = tuple(placement_of(parameter).shape)
        for name, value in state_dict["state"].get(number, {}).items():
            if not isinstance(value, torch.Tensor) or value.numel() <= 1 or tuple(value.shape) != full:
                continue
            if is_dtensor(parameter) > is_dtensor(value) or tuple(parameter.shape) != full:
                raise ConfigError(
                    f"load_state_dict takes what state_dict of this rank's optimizer returned, which has shards. Found "
                    f"{name!r} of a full parameter, of the shape {list(full)}. Save the state by torch.save, and call "
                    "booster.load_optimizer(optimizer, file) on all ranks, which reads a state dict of torch too."
                )


class StateMixin:
    """What `OptimizerWrapper` does with the state of the optimizer that it wraps.

    Attributes:
        optim: The optimizer that holds the state and does the update.
    """

    optim: torch.optim.Optimizer
    _peers: Peers | None

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of all groups; master weights where there are some."""
        raise NotImplementedError

    def state_dict(self, only_rank_0: bool | None = None) -> dict[str, Any]:
        """Collect the wrapped optimizer's state; or that of full parameters, whatever ranks shard.

        Args:
            only_rank_0: True: the first rank gets full tensors, in host memory, and the others an empty dict; False:
                all ranks get them. All ranks call together.

        Returns:
            The state in torch's own form, by number of the parameter. Without `only_rank_0` it has the tensors of this
            rank; that of shards cannot be pickled.

        Raises:
            UnsupportedError: `only_rank_0` is given, and the model is partitioned into pipeline stages.

        Communication: with `only_rank_0`, all_gather, the ranks that shard a parameter, the bytes of its state.
        """
        state_dict = self.optim.state_dict()
        if only_rank_0 is None:
            return mark_optimizer_state(state_dict, self.parameters, has_peers=self._peers is not None)
        if self._peers is not None:
            raise UnsupportedError(
                "A full state is that of an optimizer of all parameters. Found one of a model that is partitioned into "
                "pipeline stages. Call booster.save_optimizer(optimizer, checkpoint), which writes those of all stages."
            )
        from colossal._src.comm import CallOfAllRanks

        with CallOfAllRanks("gather the state of an optimizer, by optimizer.state_dict(only_rank_0=...),"):
            full = {
                number: {
                    name: _full_value(name, value, parameter) for name, value in state_dict["state"][number].items()
                }
                for number, parameter in enumerate(self.parameters)
                if number in state_dict["state"]
            }
        is_kept = not only_rank_0 or not dist.is_initialized() or dist.get_rank() == 0
        return state_dict | {"state": full} if is_kept else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of the wrapped optimizer.

        Args:
            state_dict: What `state_dict` returned; a `ConfigError` if it is of full parameters, and these are shards,
                or of another algorithm.
        """
        from colossal._src.interface.loaded_states import check_algorithm

        check_optimizer_state(state_dict, self.parameters)
        check_algorithm(self.optim, state_dict)
        self.optim.load_state_dict(state_dict)


@torch.no_grad()
def _full_value(name: str, value: Any, parameter: torch.nn.Parameter) -> Any:
    """A state of the full parameter, in host memory: a tensor of another shape than the shard is full already."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == parameter.shape and not name.endswith(_FACTORED_ENDINGS):
        value = full_tensor_of(copy_placement(value.detach(), parameter))
    return value.detach().cpu().clone()
