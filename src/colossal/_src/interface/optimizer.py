"""The boosted optimizer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any, ClassVar
from weakref import WeakMethod

import torch

from colossal._src.amp import LossScaler, MasterParams, NoScaler
from colossal._src.interface.clipping_mixin import ClippingMixin
from colossal._src.interface.direct_steps import DirectSteps
from colossal._src.interface.full_spec import FullOptimizerSpec, Peers
from colossal._src.interface.guarded_params import discard_gradients, guard_parameters, guard_state, plain_parameters
from colossal._src.interface.local_state import StateMixin
from colossal._src.interface.nonfinite_check import NonFiniteCheck
from colossal._src.interface.optimizer_check import check_optimizer
from colossal._src.interface.optimizer_hooks import HooksMixin
from colossal._src.interface.torch_optimizer import TorchOptimizer
from colossal._src.tensor import local_of, local_operations, placement_of, strip_compile_prefix
from colossal.errors import ConfigError, UnsupportedError


class OptimizerWrapper(ClippingMixin, HooksMixin, StateMixin, TorchOptimizer):
    """Decides when gradients become an update: backward, clip, step, zero_grad.

    Gradients that the caller sees through the clip methods and `get_grad_norm` are unscaled. Schedules may be built of
    it as well as of the optimizer that it wraps, whose parameter groups it has.

    Args:
        optim: The optimizer that holds the state and does the update.
        scaler: The loss scaler; none by default.
        param_names: Name of each parameter in the model; checkpoints store optimizer state under these names. A master
            has the name of its working parameter.
        masters: What the optimizer holds in place of parameters: float32 copies, or this rank's shards of them;
            by default it holds the parameters themselves.
        max_norm: Clip the common norm of the gradients to it before each step; 0 does not.
        norm_type: The p of that norm.
        peers: The ranks that have other parameters of the model; none by default.
        full_spec: What the full optimizer is, where this rank has only some of its parameters.

    Raises:
        UnsupportedError: The optimizer needs full parameters, and one of them is sharded.

    Example:
        >>> import torch
        >>> from colossal.interface import OptimizerWrapper
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = OptimizerWrapper(torch.optim.SGD([weight], lr=1.0))
        >>> optimizer.backward((weight**2).sum() / 2)
        >>> optimizer.clip_grad_by_norm(1.0).item()
        5.0
        >>> optimizer.step()
        >>> [round(x, 4) for x in weight.tolist()]
        [2.4, 3.2]
    """

    _num_steps: ClassVar[int] = 0

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        scaler: LossScaler | None = None,
        param_names: Mapping[torch.nn.Parameter, str] | None = None,
        masters: MasterParams | None = None,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        peers: Peers | None = None,
        full_spec: FullOptimizerSpec | None = None,
    ) -> None:
        shards = any(placement_of(each).is_sharded for group in optim.param_groups for each in group["params"])
        check_optimizer(optim, shards=shards, subsets=peers is not None)
        super().__init__(optim)
        self.scaler = scaler or NoScaler()
        self.param_names = {each: strip_compile_prefix(name) for each, name in (param_names or {}).items()}
        self.masters, self.full_spec = masters, full_spec
        self._max_norm, self._norm_type, self._peers = max_norm, norm_type, peers
        self._name_masters(masters.pairs if masters else {})
        self._make_hooks()
        self._reduced: frozenset[torch.Tensor] | None = None
        self._has_scaled_grads = False
        self._nonfinite: NonFiniteCheck | None = None
        self._direct = DirectSteps.watch(optim, has_masters=masters is not None)
        self._guard()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer.

        Args:
            param_group: ``{"params": [...]}`` with the group's own hyperparameters.

        Raises:
            ConfigError: The model did not have one of the parameters when it was boosted: nothing reduces its gradient.
        """
        self.optim.add_param_group(param_group)
        try:
            self._take_group(self.param_groups[-1])
        except ConfigError:
            del self.param_groups[-1]
            raise

    def _take_group(self, group: dict[str, Any]) -> None:
        strange = 0 if self._reduced is None else sum(each not in self._reduced for each in group["params"])
        if strange:
            raise ConfigError(
                "Gradients are reduced over ranks for parameters that the model had when it was boosted. Found "
                f"{strange} others in a new group, which would be trained on the samples of each rank. Add their "
                "modules to the model before boost, frozen by requires_grad_(False) if they are to train later."
            )
        if self.masters is not None:
            self._name_masters(self.masters.add_group(group))
        self._guard()

    def _take_appended(self) -> None:
        """Take groups that a program has appended to the list, unless gradients of theirs are not in masters."""
        if self.masters is not None:
            raise ConfigError(
                "Master weights and shards of parameters are made when their group is added. Found a group more in "
                "optimizer.param_groups. Call optimizer.add_param_group(group) before the backward pass."
            )
        for group in self.param_groups[self._num_groups :]:
            self._take_group(group)

    def _guard(self) -> None:
        self._num_groups = len(self.param_groups)
        is_full, is_scaled = self.has_full_grads, not isinstance(self.scaler, NoScaler)
        self._is_guarded = is_scaled or not is_full
        unscale = WeakMethod(self.unscale_grad) if is_scaled else None
        guard_parameters(self.parameters, self.masters, has_full_grads=is_full, unscale=unscale)

    def _name_masters(self, pairs: Mapping[torch.nn.Parameter, torch.nn.Parameter]) -> None:
        self.param_names |= {new: self.param_names.pop(old) for new, old in pairs.items() if old in self.param_names}

    @property
    def has_full_grads(self) -> bool:
        """Whether torch's functions can take the gradients, which are in the parameters then, full or as DTensors."""
        sharded = any(placement_of(each).is_sharded and local_of(each) is each for each in self.parameters)
        return self.masters is None and self._peers is None and not sharded

    @TorchOptimizer.state.getter
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The per-parameter state of the wrapped optimizer; with master weights, of these."""
        if self.masters is not None:
            guard_state(self.optim)
        return self.optim.state

    def refuse_nonfinite(self, check: NonFiniteCheck) -> None:
        """Raise an error at `step`, on all ranks, if a loss or a gradient is infinite or NaN.

        Args:
            check: Looks at them.

        Raises:
            ConfigError: The loss is scaled: then an overflow is not an error, but makes the scale fall.
        """
        if not isinstance(self.scaler, NoScaler):
            raise ConfigError(
                "Non-finite gradients are refused where the loss is not scaled. Found loss scaling, under which they "
                "are expected: the step is skipped, and the scale falls. Leave it out, or train in bf16 or fp32."
            )
        self._nonfinite = check

    @property
    def has_accumulated_grads(self) -> bool:
        """Whether `backward` has left gradients that neither `step` has taken nor `zero_grad` discarded."""
        return self._has_scaled_grads

    def limit_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Reject groups with other parameters, whose gradients would stay those of one rank.

        Args:
            parameters: Those whose gradients are reduced over ranks.
        """
        self._reduced = frozenset(parameters)

    def backward(
        self, loss: torch.Tensor, inputs: Sequence[torch.Tensor] | None = None, retain_graph: bool = False
    ) -> None:
        """Add the gradients of `loss`, times the loss scale, to the parameters.

        Args:
            loss: A scalar.
            inputs: Accumulate into these tensors only; into all leaves by default.
            retain_graph: Keep the graph for another backward pass.
        """
        inputs = None if inputs is None else list(inputs)
        self._has_scaled_grads = True
        if self._nonfinite is not None:
            self._nonfinite.record_loss(loss)
        for callback in self._prepare_backward:
            callback(loss)
        try:
            with self._backward_pass(), self.scaler.scaled_loss(loss, self.optim) as scaled:
                torch.autograd.backward(scaled, retain_graph=retain_graph, inputs=inputs)
        except Exception as error:
            self._explain(error)
            raise

    def _backward_pass(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.masters is None else self.masters.backward_pass()

    def _explain(self, error: Exception) -> None:
        for callback in self._explain_errors:
            callback(error)

    def backward_by_grad(
        self,
        tensor: torch.Tensor | Sequence[torch.Tensor],
        grad: torch.Tensor | Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor] | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Continue a backward pass from `tensor`, whose gradient is known and scaled already.

        Args:
            tensor: Any tensor of the graph, or several.
            grad: The gradient of the scaled loss with respect to `tensor`, of the same shape, or one for each.
            inputs: Accumulate into these tensors only; into all leaves by default.
            retain_graph: Keep the graph for another backward pass.
        """
        inputs = None if inputs is None else list(inputs)
        self._has_scaled_grads = True
        for callback in self._prepare_backward:
            callback(tensor if isinstance(tensor, torch.Tensor) else tensor[0])
        try:
            with self._backward_pass():
                torch.autograd.backward(tensor, grad, retain_graph=retain_graph, inputs=inputs)
        except Exception as error:
            self._explain(error)
            raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, unless loss scaling found an overflow.

        Args:
            closure: Discards the gradients, computes the loss and new ones, and returns the loss. These gradients are
                clipped and averaged like those of a step without it. Loss scaling refuses it.

        Returns:
            What the wrapped optimizer's step returns; None for a step that was skipped.

        Raises:
            ConfigError: The loss is scaled, and these are gradients of one that was not.
            NonFiniteError: A loss or a gradient is infinite or NaN, after `refuse_nonfinite`.
            UnsupportedError: There is a closure, and loss scaling or `refuse_nonfinite`.

        Communication: as in `unscale_grad`; with a `max_norm`, as in `clip_grad_by_norm`.
        """
        for check in self._step_checks:
            check()
        if len(self.optim.param_groups) > self._num_groups:
            self._take_appended()
        if self._nonfinite is not None and closure is not None:
            raise UnsupportedError(
                "Non-finite gradients are refused before a step. Found a closure, which computes them in the step. "
                "Leave one out."
            )
        if closure is not None:
            result = self._update(self._evaluation(closure))
        else:
            self._take_grads()
            step_options = self._clip_and_divide()
            self._unscale()
            result = self._update(**step_options)
        self._has_scaled_grads = False
        OptimizerWrapper._num_steps += 1
        # all ranks skip the same steps: none waits for the others in the gather
        if self.masters is not None and not self.scaler.skipped:
            with local_operations():
                self.masters.copy_params_from_masters()
        if not self.scaler.skipped:
            self._run_post_hooks(() if closure is None else (closure,))
        return result

    def _update(self, *args: Any, **options: Any) -> Any:
        if self._direct is None and not self._is_guarded:
            return self.scaler.step(self.optim, *args, **options)
        with plain_parameters(self.parameters) if self._is_guarded else nullcontext(), self.direct_step():
            return self.scaler.step(self.optim, *args, **options)

    def direct_step(self) -> AbstractContextManager[Any]:
        """Let the wrapped optimizer be stepped, whose own step is refused where it holds master weights.

        Returns:
            The context in which it may be.
        """
        return self._direct or nullcontext()

    def _move_grads(self) -> None:
        # operations look up for each parameter of a subclass whether it overrides them, which those guarded do not
        if self.masters is not None:
            with local_operations():
                self.masters.copy_grads_to_masters()

    def _take_grads(self) -> None:
        self._move_grads()
        if self._nonfinite is not None:
            self._nonfinite.check({each: self.param_names.get(each, "a parameter") for each in self.parameters})

    def _evaluation(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Make what an optimizer calls, maybe several times in a step: each loss is that of the values it has now."""
        calls = count()

        def evaluate() -> Any:
            if next(calls) and self.masters is not None:
                with local_operations():
                    self.masters.copy_params_from_masters()
            loss = closure()
            self._take_grads()
            if self._max_norm > 0:
                self.clip_grad_by_norm(self._max_norm, self._norm_type)
            return loss

        return evaluate

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients.

        Args:
            set_to_none: Free them rather than fill them with zeros.
        """
        self.scaler.discard()
        self._has_scaled_grads = False
        if self._nonfinite is not None:
            self._nonfinite.clear()
        for callback in self._zero_grad_hooks:
            callback()
        discard_gradients(self.optim, set_to_none)
        if self.masters is not None:
            with local_operations():
                self.masters.zero_grad(set_to_none)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the loss scale.

        Args:
            loss: Any shape.

        Returns:
            The scaled loss; same shape.
        """
        self._has_scaled_grads = True
        return self.scaler.scale(loss)

    def unscale_grad(self) -> None:
        """Divide the gradients by the loss scale, once for each step however often it is called.

        With master weights, the gradients of the model's parameters move to these first.

        Communication: all_reduce, the axes that shard a parameter, 4 bytes each, if the loss is scaled: an overflow is
        agreed on.
        """
        self._move_grads()
        self._unscale()

    def _unscale(self) -> None:
        if isinstance(self.scaler, NoScaler):
            return
        self._check_scaled()
        self.scaler.unscale(self.optim, () if self._peers is None else self._peers.groups)

    def _check_scaled(self) -> None:
        """Refuse gradients of a loss that was not scaled, which unscaling would make vanish."""
        if not (self._has_scaled_grads or isinstance(self.scaler, NoScaler)) and self._grads:
            raise ConfigError(
                "Under loss scaling, gradients come from booster.backward(loss, optimizer), which multiplies the loss "
                f"by {self.scaler.scale_value:g}. Found gradients without such a call since the last step, as "
                "loss.backward() leaves them: the update would be that many times too small. Call "
                "booster.backward(loss, optimizer)."
            )

    def unwrap(self) -> torch.optim.Optimizer:
        """Take the wrapper off.

        Returns:
            The optimizer that was wrapped.
        """
        return self.optim


def num_boosted_steps() -> int:
    """Count the steps of all boosted optimizers of this process, which all ranks that train together have made."""
    return OptimizerWrapper._num_steps  # noqa: SLF001 (of this file)
