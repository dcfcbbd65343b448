"""A model whose gradients `DistributedDataParallel` averages, whatever of it trains and however often it is called."""

from collections.abc import Callable, Generator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, final
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from colossal._src.booster.plugin.ddp.late_hooks import HookDelay
from colossal._src.booster.plugin.replica_sync import GradientSync, HookedAverager, check_averaged
from colossal._src.comm import all_reduce_over
from colossal._src.interface import ModelWrapper, OptimizerWrapper, prepare_passes, unwrap_model
from colossal._src.tensor import DATA, grad_of, set_grad
from colossal.errors import CommunicationError, ConfigError, UnsupportedError

_NAMES_SHOWN = 3
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

    def __init__(
        self,
        model: nn.Module,
        replicate: Callable[..., DistributedDataParallel],
        averager: HookedAverager,
        others: AbstractSet[torch.Tensor],
    ) -> None:
        self._replicate, self._model, self._sync_of_others = replicate, model, averager.sync
        self._sync = GradientSync(averager.sync.mesh)
        # others are those that `DistributedDataParallel` leaves to the averager, or to the program
        self._parameters = [parameter for parameter in model.parameters() if parameter not in others]
        self._trained = list(map(_requires_grad, self._parameters))
        # of what does not train, `DistributedDataParallel` has nothing to reduce, and refuses it
        self._ddp = replicate(model) if any(self._trained) else None
        self._is_prepared = self._is_expected = self._has_pass = self._has_grad = False
        self._refuses_graphs: set[torch.Tensor] = set()
        self._hook_delay = HookDelay(self._parameters, partial(_reduces, ref(self)))
        self._watch()

    def __deepcopy__(self, _memo: object) -> "ReplicatedModel":
        """A hook in a copy of the boosted model finds that the copy is not its own."""
        return self

    def wrap(self, optimizer: OptimizerWrapper | None) -> ModelWrapper:
        """Return the boosted model, and prepare for the backward passes of its optimizer."""
        wrapper = ModelWrapper(self._ddp or self._model)
        prepare_passes(wrapper, self._before_forward)
        if optimizer is not None:
            if optimizer.masters is not None:
                optimizer.masters.refresh()  # takes note of the values of rank 0, which are no writes of a program
            optimizer.register_backward_error_hook(_explain)
            optimizer.register_step_check(partial(_check_hook, ref(self)))
            # of every optimizer that updates the model, of which the boosted one may have some parameters only
            handle = register_optimizer_step_pre_hook(partial(_step_hook, ref(self), ref(optimizer.unwrap())))
            finalize(self, handle.remove)
            optimizer.register_backward_hook(self._before_backward)
            optimizer.register_zero_grad_hook(self._reset)
            optimizer.limit_parameters(self._model.parameters())
        return wrapper

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Leave gradients as they are on each rank."""
        with self._sync_of_others.paused(), nullcontext() if self._ddp is None else self._ddp.no_sync():
            yield

    def _watch(self) -> None:
        self._handle = None
        if self._ddp is None:
            return
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        self._handle = trained[0].register_post_accumulate_grad_hook(partial(_grad_hook, ref(self)))
        if trained[-1] not in self._refuses_graphs:  # whose gradient comes before others are reduced
            trained[-1].register_post_accumulate_grad_hook(_refuse_graph)
            self._refuses_graphs.add(trained[-1])

    def _before_forward(self, wrapper: ModelWrapper, module: nn.Module) -> None:
        ddp = self._ddp
        if module is not (self._model if ddp is None else ddp):  # a copy
            return
        if (trained := list(map(_requires_grad, self._parameters))) != self._trained and any(trained):
            is_first = self._ddp is None
            if self._ddp is not None:  # else its hooks would stay at the parameters
                vars(self._ddp).update(reducer=None, logger=None)
            self._ddp = self._replicate(self._model, init_sync=is_first)
            self._ddp.training = wrapper.training
            wrapper.module, self._trained = self._ddp, trained
            if self._handle is not None:
                self._handle.remove()
            self._watch()
            ddp = self._ddp
        if torch.is_grad_enabled():
            self._hook_delay.update()
        if ddp is not None and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            self._is_prepared = self._is_expected = True

    @property
    def reduces(self) -> bool:
        """Whether a backward pass that begins now reduces gradients."""
        return self._ddp is not None and self._ddp.require_backward_grad_sync

    def _before_backward(self, loss: torch.Tensor) -> None:
        if self._ddp is None:
            return
        # What of a loss does not use a parameter, `DistributedDataParallel` takes from the outputs of one forward pass,
        # as far as it finds tensors in them.
        finds_unused = self._ddp.find_unused_parameters and not self._ddp.static_graph
        if self._ddp.require_backward_grad_sync and (finds_unused or not self._is_prepared):
            self._ddp.reducer._rebuild_buckets()  # noqa: SLF001 (it has no public name)
            self._ddp.reducer.prepare_for_backward([loss] if self._ddp.find_unused_parameters else [])
        self._has_pass, self._sync.is_accumulating = True, not self._ddp.require_backward_grad_sync
        # also inside of no_sync: what a forward pass outside has prepared is reduced by any backward pass
        self._is_prepared, self._is_expected = False, True

    def _reset(self) -> None:
        """Discard what a backward pass left that an exception ended, so that the next batch can follow."""
        self._has_pass = self._has_grad = False
        if self._ddp is not None and not self._is_reduced():
            self._ddp.reducer._reset_state()  # noqa: SLF001 (torch has no public name for it)

    def average_assigned(self) -> None:
        """Average gradients that no backward pass brought, such as those of `torch.autograd.grad`, and nothing reduced.

        Those that a program averaged itself stay as they are.

        Communication: all_reduce, dp, the bytes of these gradients; where passes may leave out parameters, and none was
        the optimizer's, also 8 bytes for each parameter.
        """
        ddp, has_pass, has_grad = self._ddp, self._has_pass, self._has_grad
        self._has_pass = self._has_grad = False
        if ddp is None or has_pass or (has_grad and not ddp.find_unused_parameters):
            return
        group: Any = ddp.process_group
        if (size := dist.get_world_size(group)) == 1:
            return
        grads = list(map(grad_of, self._parameters))
        present = [grad is not None for grad in grads]
        if ddp.find_unused_parameters:  # a rank may have left out the parameter by which passes show, or others
            counts = torch.tensor([has_grad, *present], dtype=torch.int64, device=self._parameters[0].device)
            has_grad, *present = map(bool, all_reduce_over(counts, [group], "sum").tolist())
        for parameter, grad, is_present in zip(self._parameters, grads, present, strict=True):
            if is_present and not has_grad:
                own = torch.zeros_like(parameter) if grad is None else grad.clone()
                set_grad(parameter, all_reduce_over(own, [group], "sum") / size)

    @property
    def _accumulates(self) -> bool:
        """Whether the last gradients are those of this rank."""
        return self._sync.is_accumulating or self._sync_of_others.is_accumulating

    def has_accumulated_for(self, optimizer: Optimizer) -> bool:
        """Whether `no_sync` left gradients of parameters that an optimizer has."""
        if not self._accumulates:
            return False
        own = set(self._model.parameters())
        return any(each in own for group in optimizer.param_groups for each in group["params"])

    def _is_reduced(self) -> bool:
        """Whether no backward pass has begun to reduce gradients and has not come to the end."""
        reducer: Any = None if self._ddp is None else self._ddp.reducer
        try:
            if reducer is not None:
                reducer._check_reducer_finalized()  # noqa: SLF001 (as above)
        except RuntimeError:
            return False
        return True

    def check_reduced(self, optimizer: Optimizer) -> None:
        """Refuse a step by gradients that still are those of this rank, as others of their bucket never came."""
        # until a pass averages: other optimizers may have yet to step
        if self._accumulates and self._sync.mesh.size(DATA) > 1:
            check_averaged(optimizer, self._sync.mesh)
        if self._ddp is None or self._is_reduced() or dist.get_world_size(self._ddp.process_group) == 1:
            return
        names = {parameter: name for name, parameter in unwrap_model(self._model).named_parameters()}
        unused = [names.get(each, "one") for each in self._parameters if each.requires_grad and each.grad is None]
        raise ConfigError(
            "Gradients of a replicated model are reduced over ranks when all of them are there. Found a step after a "
            f"backward pass that did not use all parameters{_listing(unused)}, so that others were not reduced. "
            f"{_UNUSED}, or freeze what does not train by requires_grad_(False)."
        )

    def on_grad(self) -> None:
        """Refuse a gradient of a pass that nothing reduces."""
        is_expected, self._is_expected, self._has_grad = self._is_expected, False, True
        # in a static graph, a parameter of several checkpointed layers gets several gradients in one pass
        if self._ddp is None:
            return
        self._sync.is_accumulating = not self._ddp.require_backward_grad_sync
        if self._ddp.require_backward_grad_sync and not is_expected and not self._ddp.static_graph:
            raise ConfigError(
                "Gradients of a replicated model are reduced over ranks in one backward pass for each forward pass of "
                "the boosted model. Found another pass: a second loss of the same outputs, outputs of a forward pass "
                "inside of no_sync, or of model.unwrap(), or of the same model boosted again, or a layer that runs "
                "inside and outside of a reentrant checkpoint. Boost a model once, and call it, and "
                "booster.backward(loss, optimizer) or optimizer.backward(loss, retain_graph=True), which reduce "
                "several losses of one pass; and checkpoint layers with use_reentrant=False."
            )


_TWICE = "Expected to mark a variable ready only once"
_UNUSED = "Pass find_unused_parameters=True to the plugin"


def _listing(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    return f" ({shown})" if names else ""


def _explain(error: Exception) -> None:
    # torch wraps what its reducer raises in a RuntimeError, with the place in its text
    _, wrapped, text = f"{type(error).__name__}: {error}".partition(f"{CommunicationError.__name__}: ")
    if wrapped:
        raise CommunicationError(
            "In a backward pass of a replicated model, all ranks reduce the gradients of all parameters. Where ranks "
            f"use different ones, {_UNUSED[0].lower()}{_UNUSED[1:]}. {text.partition('At:')[0].strip()}"
        ) from error
    if _TWICE in str(error):
        name = str(error).partition(" with name ")[2].partition(" ")[0].removeprefix("module.")
        raise UnsupportedError(
            f"Each parameter of a replicated model gets its gradient once in a backward pass. Found {name or 'one'} "
            "twice, as of a layer that runs inside and outside of a reentrant checkpoint. Checkpoint layers with "
            "use_reentrant=False, or pass static_graph=True to TorchDDPPlugin if all steps use the same layers."
        ) from error


def _refuse_graph(_parameter: torch.Tensor) -> None:
    if torch.is_grad_enabled():  # in a backward pass: it records a graph
        raise UnsupportedError(
            "Gradients of a replicated model are reduced by operations that autograd does not record. Found a backward "
            "pass with create_graph=True. Take gradients by torch.autograd.grad(loss, list(model.parameters()), "
            "create_graph=True), add what depends on them to the loss, and call booster.backward(loss, optimizer)."
        )


def _step_hook(model: "ref[ReplicatedModel]", own: "ref[Optimizer]", optimizer: Optimizer, *_step: Any) -> None:
    # the boosted one may hold master weights in place of parameters
    if (found := model()) is not None and (optimizer is own() or found.has_accumulated_for(optimizer)):
        found.check_reduced(optimizer)


def _check_hook(model: "ref[ReplicatedModel]") -> None:
    if (found := model()) is not None:
        found.average_assigned()


def _reduces(model: "ref[ReplicatedModel]") -> bool:
    return (found := model()) is not None and found.reduces


def _grad_hook(model: "ref[ReplicatedModel]", _parameter: torch.Tensor) -> None:
    # a parameter holds its hooks where the garbage collector does not look
    if (found := model()) is not None:
        found.on_grad()
