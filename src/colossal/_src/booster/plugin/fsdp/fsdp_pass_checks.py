"""Passes that FSDP2 would run wrongly: in inference mode, after an exception, or of other units than on other ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import nn

from colossal._src.cluster import ParallelMesh
from colossal._src.comm import end_graphs_in, equal_text_on_all_ranks
from colossal._src.interface import refuse_tracing
from colossal._src.tensor import DATA, is_dtensor
from colossal.errors import CommunicationError, ConfigError, UnsupportedError

_DIFFERENT = (
    "Under TorchFSDPPlugin, all ranks reduce gradients of the same parameters. Where ranks use different ones, call "
    "all of them on all ranks, with the factor 0 where they do not count, or use LowLevelZeroPlugin, GeminiPlugin, or "
    "TorchDDPPlugin(find_unused_parameters=True)."
)

_FREED = (
    "TorchFSDPPlugin frees the full parameters when a backward pass has used them. Found another one that needs them, "
    "as that of a gradient penalty or a Hessian, of torch.autograd.grad(..., create_graph=True), or of an output of "
    "which a view was written in place. Use TorchDDPPlugin, LowLevelZeroPlugin, GeminiPlugin or HybridParallelPlugin, "
    "which keep them."
)

_UNREDUCED = (
    "FSDP2 reduces gradients where the backward pass goes through outputs of its units or of the model. Found a step "
    "after one that went through neither, such as of a loss of what a hook took from inside, so that gradients of each "
    "rank are not reduced. Return that from the model's forward, or add 0 * output.sum() to the loss, and call "
    "optimizer.zero_grad() on all ranks before the next pass."
)

end_graphs_in(__name__)  # FSDP2 ends graphs at its hooks too


@final
class PassChecks:
    """Looks at the forward passes of a model that is sharded in units."""

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], mesh: ParallelMesh) -> None:
        names = {module: name for name, module in model.named_modules()}
        self._root: Any = model
        self._group, self._has_peers = mesh.group(DATA), mesh.size(DATA) > 1
        self._units: list[Any] = [*units, model]
        self._held: list[Any] = []  # what torch holds for each parameter
        self._order: list[str] = []
        self._agreed: list[str] | None = None
        self._used: list[str] | None = None
        self._named: list[tuple[str, nn.Parameter]] = []
        self._witness: nn.Parameter | None = None  # one that had a gradient in the last step
        self._ran = False  # whether a pass ran since gradients were discarded
        self._num_full = 0  # of them, those that FSDP2 does not shard
        self.lift_watch: Callable[[], None] | None = None  # after `no_sync`, of parameters without reduced gradients
        self.keeps_gradients = False  # whether `no_sync` left some that are not reduced
        model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)
        for unit in units:
            unit.register_forward_pre_hook(partial(self._note, names[unit]))
        model.register_forward_hook(self._end)

    def reset(self) -> bool:
        """Shard all parameters again, if an exception ended a pass; return whether one did."""
        if is_unfinished := self._is_unfinished():
            if not hasattr(self._root, "reset_iter_state"):
                raise UnsupportedError(
                    f"FSDP2 of torch {torch.__version__} cannot go on after a pass that an exception ended, as torch "
                    "2.13 can. Found one. Load the last checkpoint into a new model."
                )
            self._root.reset_iter_state()
        return is_unfinished

    def _begin(self, _model: nn.Module, args: Any, kwargs: Any) -> None:
        if is_in_backward():  # which recomputes the model
            return
        if torch.is_inference_mode_enabled():
            raise UnsupportedError(
                "TorchFSDPPlugin keeps the memory of gathered parameters for later passes, which cannot write tensors "
                "made in inference mode. Found a forward pass inside of torch.inference_mode(). Use torch.no_grad()."
            )
        _check_transforms()
        refuse_tracing("TorchFSDPPlugin")
        self._check_parameters()
        self._order = []
        if torch.is_grad_enabled():
            self._ran = True
            self._watch_inputs([*args, *kwargs.values()])
            if self.lift_watch is not None:
                self.lift_watch()
                self.lift_watch = None
        if self._is_unfinished():
            if self._fails_in_backward() or self.keeps_gradients:
                raise ConfigError(
                    "A forward pass follows complete ones. Found that an exception ended the last one, which left "
                    "some parameters gathered and some gradients not reduced. Call optimizer.zero_grad() on all ranks "
                    "where the exception is handled, and go on with the next batch."
                )
            self.reset()

    def _watch_inputs(self, inputs: list[Any]) -> None:
        """Refuse passes through the gradients of inputs, which need parameters that are freed by then."""
        for each in inputs:
            if isinstance(each, torch.Tensor) and each.requires_grad:
                each.register_hook(self._watch_gradient)

    def _watch_gradient(self, grad: torch.Tensor) -> None:
        if grad.requires_grad:  # by create_graph=True
            grad.register_hook(self._refuse_second_pass)

    def _refuse_second_pass(self, _grad: torch.Tensor) -> None:
        gathered = [getattr(held, "_unsharded_param", None) for held in self._held]
        if any(each is not None and each.numel() > each.untyped_storage().size() for each in gathered):
            raise UnsupportedError(_FREED)

    def _check_parameters(self) -> None:
        """Refuse a parameter in the place of another, which FSDP2 would put back without a word."""
        self._held = self._held or [*fsdp_params(self._units)]
        for held in self._held:
            place = held._module_info  # noqa: SLF001 (torch has no public name for it)
            own = place.module._parameters.get(place.param_name)  # noqa: SLF001 (without the search of getattr)
            if own is not held.sharded_param and own is not getattr(held, "_unsharded_param", None):
                raise ConfigError(
                    "Under TorchFSDPPlugin a model keeps the parameters that it had when it was boosted. Found another "
                    f"one in the place of {place.param_name} of a {type(place.module).__name__}, which FSDP2 would put "
                    "back. Exchange it before boost, or write values into the parameter that is there: "
                    "load_state_dict, or copy_ under torch.no_grad(). For torch.func.functional_call with other values "
                    "take TorchDDPPlugin or LowLevelZeroPlugin."
                )
            if held.sharded_param._backward_hooks:  # noqa: SLF001 (torch has no public name for them)
                raise UnsupportedError(
                    "FSDP2 replaces parameters by shards, on which hooks of a full gradient do not run. Found a hook "
                    f"on {place.param_name} of a {type(place.module).__name__}. Remove it, or register it by "
                    "register_post_accumulate_grad_hook, which gets the averaged gradient of the shard."
                )

    def _note(self, name: str, *_forward: Any) -> None:
        self._order.append(name)

    def _end(self, *_forward: Any) -> None:
        """Compare the units that this pass used with those of the other ranks, where they are not those of the last.

        Gathers of equal sizes would meet those of other units without an error.

        Communication: all_reduce, dp, 16 bytes, in the first pass, and in one that uses other units than the last.
        """
        if not self._has_peers or is_in_backward() or self._order == self._agreed:
            return
        message = (
            "Under TorchFSDPPlugin all ranks call the units of a model in one order, as each call gathers parameters "
            f"from all of them. Found that ranks differ; this one called {', '.join(self._order)}. Call every unit on "
            "all ranks, also an expert without tokens on an empty batch, or use LowLevelZeroPlugin or GeminiPlugin, or "
            "pass an auto_wrap_policy whose units are used as a whole."
        )
        try:
            are_equal = equal_text_on_all_ranks(repr(self._order), [self._group])
        except CommunicationError as error:  # as others called what they had called before
            error.add_note(message)
            raise
        if not are_equal:
            raise ConfigError(message)
        self._agreed = self._order

    def check_used(self) -> None:
        """Compare the parameters that have gradients with those of the other ranks, where they are others than last.

        The gradient of one would else have been reduced with that of another of the same size.

        Communication: all_reduce, dp, 16 bytes, in the first step, and in one with other gradients than the last.
        """
        if not self._named:  # once: forward passes refuse another parameter in the place of one
            self._named = list(self._root.named_parameters())
            self._num_full = sum(not is_dtensor(parameter) for _, parameter in self._named)
        used = [name for name, parameter in self._named if parameter.grad is not None]
        # FSDP2 reduces all of them or none, see `_UNREDUCED`
        if len(used) <= self._num_full and any(map(_has_unreduced_grad, self._held)):
            raise ConfigError(_UNREDUCED)
        if used == self._used:
            return
        sharded = (parameter for _, parameter in self._named if is_dtensor(parameter))
        self._witness = next((parameter for parameter in sharded if parameter.grad is not None), None)
        if not self._has_peers:
            self._used = used
            return
        try:
            are_equal = equal_text_on_all_ranks(repr(used), [self._group])
        except CommunicationError as error:
            error.add_note(_DIFFERENT)
            raise
        if not are_equal:
            names = [name for name, parameter in self._named if parameter.requires_grad]
            unused = [name for name in names if name not in used]
            raise ConfigError(
                f"{_DIFFERENT} Found that ranks differ; this one has no gradient of {', '.join(unused) or 'none'}."
            )
        self._used = used

    def has_unreduced(self) -> bool:
        """Whether passes since this was last asked left gradients that no unit reduced, see `_UNREDUCED`."""
        if not self._ran or (self._witness is not None and self._witness.grad is not None):
            return False  # where there is one that is reduced, all are
        self._ran = False
        return any(map(_has_unreduced_grad, self._held))

    def _is_unfinished(self) -> bool:
        context = self._root._get_fsdp_state()._state_ctx  # noqa: SLF001 (torch has no public name for it)
        return context.iter_forward_root is not None or context.post_backward_final_callback_queued

    def _fails_in_backward(self) -> bool:
        return self._root._get_fsdp_state()._state_ctx.post_backward_final_callback_queued  # noqa: SLF001 (as above)


def _has_unreduced_grad(held: Any) -> bool:
    return getattr(getattr(held, "_unsharded_param", None), "grad", None) is not None


def fsdp_params(units: Iterable[Any]) -> Iterator[Any]:
    """Find what torch holds for each sharded parameter; it has no public name."""
    for unit in units:
        state = unit._get_fsdp_state()  # noqa: SLF001 (as above)
        for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):  # noqa: SLF001 (as above)
            yield from group.fsdp_params


_inside: Any = torch
_transforms_of_torch: Any = _inside._C._functorch  # noqa: SLF001 (it has no public name)
_transforms: Callable[[], Any] = _transforms_of_torch.peek_interpreter_stack


def _check_transforms() -> None:
    """Refuse transforms of torch.func that differentiate, through whose tensors parameters cannot be gathered."""
    if _transforms() is None:
        return
    if any(
        each.key() != _transforms_of_torch.TransformType.Vmap for each in _transforms_of_torch.get_interpreter_stack()
    ):
        raise UnsupportedError(
            "TorchFSDPPlugin gathers parameters in each pass, which torch.func does not differentiate. Found a model "
            "in a function that torch.func transforms, such as by grad, jacrev or jvp. Use TorchDDPPlugin or "
            "LowLevelZeroPlugin, and transform the model that was boosted, as torch.func.jacrev(model.unwrap())."
        )


def explain_backward_error(error: Exception) -> None:
    """Say what works instead of a second backward pass, or of gradients that only some ranks have."""
    if isinstance(error, RuntimeError) and "setStorage" in str(error):
        raise UnsupportedError(_FREED) from error
    if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
        raise UnsupportedError(
            "Under TorchFSDPPlugin parameters are shards between passes. Found a loss that has them in it beside "
            "outputs of the model, such as a penalty of their norm. Use weight_decay of the optimizer, or compute that "
            "part inside of a module's forward, where its own parameters are full, and return it with the outputs."
        ) from error
    if isinstance(error, CommunicationError):
        error.add_note(_DIFFERENT)


def is_in_backward() -> bool:
    """Whether the caller runs inside of a backward pass."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 (as FSDP2 itself asks)
