"""A model whose gradients `DistributedDataParallel` averages, whatever of it trains and however often it is called."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, final
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from colossal._src.interface import ModelWrapper, OptimizerWrapper
from colossal.errors import ConfigError

_requires_grad: Callable[[torch.Tensor], bool] = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


@final
class ReplicatedModel:
    """Wraps a model, and keeps its gradients averaged where `DistributedDataParallel` by itself would not.

    [Note: what trains] It reduces the gradients of what trained when it was built, and waits for all of these. So it is
    built anew, without communication, for the first forward pass after another parameter was frozen or thawed, which
    all ranks do in the same way.

    [Note: passes] It reduces the gradients of one backward pass for each forward pass, and leaves those of a second
    one, of another loss of the same outputs, as they are on each rank. So the optimizer prepares it for that pass. As
    ranks have the same sum of earlier passes, the mean of all sums is the sum of all means. A pass that is not the
    optimizer's shows by a gradient of the first parameter, and is refused.
    """

    def __init__(self, model: nn.Module, replicate: Callable[..., DistributedDataParallel]) -> None:
        self._replicate, self._model = replicate, model
        self._parameters = list(model.parameters())
        self._trained = list(map(_requires_grad, self._parameters))
        self._ddp = replicate(model)
        self._is_prepared = self._is_expected = False
        self._watch()

    def __deepcopy__(self, _memo: object) -> "ReplicatedModel":
        """A hook in a copy of the boosted model finds that the copy is not its own."""
        return self

    def wrap(self, optimizer: OptimizerWrapper | None) -> ModelWrapper:
        """Return the boosted model, and prepare for the backward passes of its optimizer."""
        wrapper = ModelWrapper(self._ddp)
        wrapper.register_forward_pre_hook(self._before_forward)
        if optimizer is not None:
            optimizer.register_backward_hook(self._before_backward)
            optimizer.register_zero_grad_hook(self._reset)
            optimizer.limit_parameters(self._parameters)
        return wrapper

    def no_sync(self) -> AbstractContextManager[Any]:
        """Open a context in which gradients stay as they are on each rank."""
        return self._ddp.no_sync()

    def _watch(self) -> None:
        first = next(parameter for parameter in self._parameters if parameter.requires_grad)
        self._handle = first.register_post_accumulate_grad_hook(partial(_grad_hook, ref(self)))

    def _before_forward(self, wrapper: nn.Module, _args: object) -> None:
        if wrapper.module is not self._ddp:  # a copy
            return
        if (trained := list(map(_requires_grad, self._parameters))) != self._trained and any(trained):
            # else its hooks would stay at the parameters
            vars(self._ddp).update(reducer=None, logger=None)
            self._ddp = self._replicate(self._model, init_sync=False)
            self._ddp.training = wrapper.training
            wrapper.module, self._trained = self._ddp, trained
            self._handle.remove()
            self._watch()
        if torch.is_grad_enabled() and self._ddp.require_backward_grad_sync:
            self._is_prepared = self._is_expected = True

    def _before_backward(self, loss: torch.Tensor) -> None:
        if self._ddp.require_backward_grad_sync and not self._is_prepared:  # what a forward pass does
            self._ddp.reducer._rebuild_buckets()  # noqa: SLF001 (it has no public name)
            self._ddp.reducer.prepare_for_backward([loss] if self._ddp.find_unused_parameters else [])
        # also inside of no_sync: what a forward pass outside has prepared is reduced by any backward pass
        self._is_prepared, self._is_expected = False, True

    def _reset(self) -> None:
        """Discard what a backward pass left that an exception ended, so that the next batch can follow."""
        reducer: Any = self._ddp.reducer
        try:
            reducer._check_reducer_finalized()  # noqa: SLF001 (torch has no public name for it)
        except RuntimeError:
            reducer._reset_state()  # noqa: SLF001 (nor for this)

    def on_grad(self) -> None:
        """Refuse a gradient of a pass that nothing reduces."""
        is_expected, self._is_expected = self._is_expected, False
        # in a static graph, a parameter of several checkpointed layers gets several gradients in one pass
        if self._ddp.require_backward_grad_sync and not is_expected and not self._ddp.static_graph:
            raise ConfigError(
                "Gradients of a replicated model are reduced over ranks in one backward pass for each forward pass of "
                "the boosted model. Found another pass: a second loss of the same outputs, outputs of a forward pass "
                "inside of no_sync, or of model.unwrap(). Call the boosted model, and booster.backward(loss, "
                "optimizer) or optimizer.backward(loss, retain_graph=True), which reduce several losses of one pass."
            )


def _grad_hook(model: "ref[ReplicatedModel]", _parameter: torch.Tensor) -> None:
    # a parameter holds its hooks where the garbage collector does not look
    if (found := model()) is not None:
        found.on_grad()
