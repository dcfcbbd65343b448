"""The boosted model."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from colossal._src.comm import RandomStreams
from colossal._src.interface.adapter_names import is_peft_model, model_without_adapters
from colossal._src.interface.copies import copy_module, refuse_copy
from colossal._src.interface.flat_values import is_program
from colossal._src.interface.full_spec import full_spec_of
from colossal._src.interface.placed_module import PlacedModule
from colossal._src.interface.refusal import attribute_hint, explain_transform
from colossal._src.tensor import backing_shard, grad_of, is_dtensor, local_operations, set_grad
from colossal.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from colossal._src.interface.optimizer import OptimizerWrapper

_OF_PARAMETERS = ("device", "dtype")
_SUBSCRIPT = (
    ". The model that was boosted is: use model.unwrap()[index]",
    ". The model is partitioned into pipeline stages: use modules of the model before it is boosted",
)

# apart from the models, whose copies and files would otherwise contain the optimizer that reduces gradients
_NO_SYNC: "WeakKeyDictionary[nn.Module, Callable[[], AbstractContextManager[Any]]]" = WeakKeyDictionary()
_OPTIMIZERS: "WeakKeyDictionary[nn.Module, ref[OptimizerWrapper]]" = WeakKeyDictionary()


class ModelWrapper(PlacedModule):
    """A model whose forward pass runs inside a context, such as autocast, and that can be unwrapped.

    Args:
        module: The model, or a parallel wrapper around it.
        forward_context: Called before each forward pass; returns the context manager that the pass runs in.

    Example:
        >>> import torch
        >>> from colossal.interface import ModelWrapper
        >>> linear = torch.nn.Linear(4, 2)
        >>> ModelWrapper(linear).unwrap() is linear
        True
    """

    def __init__(
        self, module: nn.Module, forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        super().__init__()
        self.module = module
        self._forward_context = forward_context
        self._streams: RandomStreams | None = None
        self._has_copies = False  # whether the optimizer holds something else in place of parameters
        self._prepare_pass: Callable[[ModelWrapper, nn.Module], None] | None = None
        from colossal._src.interface.full_state_dict import refuse_partial_export
        from colossal._src.interface.partial_model import refuse_own_names

        self._missing = refuse_partial_export(unwrap_model(module), self)
        self.register_load_state_dict_pre_hook(refuse_own_names)

    def __getattr__(self, name: str) -> Any:
        """Find a parameter, buffer or module, as of every `torch.nn.Module`; and ``device`` and ``dtype``.

        These are of the user's own model, as models of transformers have them, or of its first parameter; of a stage
        of a pipeline, those of this rank.

        Raises:
            AttributeError: There is none; if the user's own model has it, the message says how to get there.
        """
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name in _OF_PARAMETERS and (found := _of_parameters(self, name)) is not None:
                return found
            if advice := _attribute_hint(vars(self).get("_modules", {}).get("module"), name):
                raise AttributeError(f"{error}. {advice}") from None
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to set what the user's own model has, such as its loss function: it would not see it.

        Raises:
            UnsupportedError: A program sets it on the wrapper; the message says where to.
        """
        own = vars(self)
        is_known = name in own or name[0] == "_" or hasattr(type(self), name) or name in own.get("_modules", {})
        is_by_program = not is_known and is_program(sys._getframe(1))  # noqa: SLF001 (the only way to find the caller)
        if is_by_program and (advice := _attribute_hint(own.get("_modules", {}).get("module"), name)):
            raise UnsupportedError(
                f"A boosted model is a wrapper of the one that was boosted. Found that {name} is set on it, which that "
                f"one would not see. {advice}"
            )
        super().__setattr__(name, value)

    def __getitem__(self, index: Any) -> Any:
        """Refuse: the user's own model may have modules by number, and the wrapper has not.

        Args:
            index: That of a module.

        Raises:
            TypeError: Always; the message says where they are.
        """
        own, full_spec = self.unwrap(), full_spec_of(unwrap_model(self))
        roots = (own,) if full_spec is None else full_spec.roots
        advice = "" if not any(hasattr(root, "__getitem__") for root in roots) else _SUBSCRIPT[full_spec is not None]
        raise TypeError(f"{type(self).__name__!r} object is not subscriptable{advice}")

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of this rank, which under tensor and pipeline parallelism are a part of all.

        Args:
            recurse: That of `torch.nn.Module.parameters`.

        Returns:
            An iterator over them; once, a warning says what to compute otherwise where they are a part.
        """
        self._before_read(sys._getframe(1))  # noqa: SLF001 (as above)
        return super().parameters(recurse)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of this rank with their names, as `parameters` does.

        Args:
            prefix: That of `torch.nn.Module.named_parameters`.
            recurse: That of `torch.nn.Module.named_parameters`.
            remove_duplicate: That of `torch.nn.Module.named_parameters`.

        Returns:
            An iterator over names and parameters.
        """
        self._before_read(sys._getframe(1))  # noqa: SLF001 (as above)
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def _before_read(self, caller: Any) -> None:
        self._copy_written()
        if self._missing and is_program(caller):
            from colossal._src.interface.partial_model import warn_of_partial_values

            warn_of_partial_values(self._missing)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward pass inside the context.

        Args:
            *args: Positional inputs of the wrapped module, of the shapes that it takes.
            **kwargs: Keyword inputs of the wrapped module.

        Returns:
            What the wrapped module returns.

        Communication: that of the wrapped module; in the first pass also all_reduce, sp and tp, 8 bytes.
        """
        streams = self._streams
        if streams is None:
            return self._run(*args, **kwargs)
        if torch.compiler.is_compiling():  # which cannot end its graph inside of a context, but before and after it
            before = streams.begin()
            outputs = self._run(*args, **kwargs)
            streams.end(before)
            return outputs
        before = streams.begin()
        try:
            return self._run(*args, **kwargs)
        except RuntimeError as error:
            explain_transform(error)
            raise
        finally:
            streams.end(before)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._has_copies:
            self._copy_written()
        if self._prepare_pass is not None:
            self._prepare_pass(self, self._modules["module"])  # type: ignore[arg-type]
        module: Any = self._modules["module"]  # in each pass, and `self.module` takes two calls
        if self._forward_context is nullcontext:
            return module(*args, **kwargs)
        with self._forward_context():
            return module(*args, **kwargs)

    def set_no_sync(self, no_sync: Callable[[], AbstractContextManager[Any]]) -> None:
        """Set what `no_sync` opens.

        Args:
            no_sync: Returns a context in which backward passes do not reduce gradients over ranks.
        """
        _NO_SYNC[self] = no_sync

    def no_sync(self) -> AbstractContextManager[Any]:
        """Open a context in which gradients accumulate without being reduced over ranks, as `Booster.no_sync` does.

        Returns:
            A new context manager.

        Raises:
            ConfigError: No booster boosted this model, such as a copy of one.
        """
        if self not in _NO_SYNC:
            raise ConfigError(
                "no_sync is that of the model that boost returned. Found a model that no Booster boosted, such as a "
                "copy. Call booster.no_sync(model), or no_sync of the boosted model."
            )
        return _NO_SYNC[self]()

    def set_optimizer(self, optimizer: "OptimizerWrapper") -> None:
        """Set which optimizer holds gradients of this model that are not in its parameters.

        Args:
            optimizer: The boosted optimizer of the model.
        """
        _OPTIMIZERS[self], self._has_copies = ref(optimizer), optimizer.masters is not None

    def _copy_written(self) -> None:
        optimizer = _OPTIMIZERS[self]() if self in _OPTIMIZERS else None
        if optimizer is not None and optimizer.masters is not None:
            with local_operations():
                optimizer.masters.copy_written()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of all parameters, in the model and where the boosted optimizer holds them.

        Args:
            set_to_none: Free them rather than fill them with zeros.
        """
        optimizer = _OPTIMIZERS[self]() if self in _OPTIMIZERS else None
        if optimizer is not None:
            optimizer.zero_grad(set_to_none)
        # not torch's method: a parameter refuses its question where the optimizer holds the gradient, which is 0 by now
        for parameter in self.parameters():
            grad = grad_of(parameter)
            if set_to_none:
                set_grad(parameter, None)
            elif grad is not None:
                (grad.requires_grad_(False) if grad.grad_fn is None else grad.detach_()).zero_()

    def state_dict(self, *args: Any, only_rank_0: bool | None = None, **kwargs: Any) -> Any:
        """Return the state of this module; or the full state of the user's own model, whatever ranks shard.

        Args:
            *args: Those of `torch.nn.Module.state_dict`.
            only_rank_0: True: the first rank gets the full tensors, in host memory, by the names of the user's own
                model, and the others an empty dict; False: all ranks get them. All ranks call together.
            **kwargs: Those of `torch.nn.Module.state_dict`.

        Returns:
            Without `only_rank_0` what torch returns: tensors as they are on this rank, by names that begin with
            ``module.``. Where they are shards, the dict can be used in memory; to pickle it is refused.

        Raises:
            UnsupportedError: `only_rank_0` is given, and the model is partitioned into pipeline stages.

        Communication: with `only_rank_0`, all_gather, the ranks that shard a tensor, its bytes.
        """
        self._copy_written()
        if only_rank_0 is None:
            return super().state_dict(*args, **kwargs)
        from colossal._src.interface.full_state_dict import full_state

        is_first = not dist.is_initialized() or dist.get_rank() == 0
        return full_state(unwrap_model(self.module), is_kept=is_first or not only_rank_0)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelWrapper":
        """Copy the model as it is on this rank, to average or to evaluate it: nothing reduces gradients of a copy.

        Raises:
            UnsupportedError: Between passes, no rank has the values of a parameter as a tensor of its own.
        """
        own = unwrap_model(self.module)
        if any(is_dtensor(parameter) for parameter in own.parameters()):
            refuse_copy("units of FSDP")
        memo[id(self.module)] = deepcopy(own, memo)  # without DistributedDataParallel
        return copy_module(self, memo)

    def __copy__(self) -> "ModelWrapper":
        """Wrap the same model once more."""
        found = type(self).__new__(type(self))
        vars(found).update(vars(self))
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled where another process could not use it.

        Raises:
            UnsupportedError: The model holds process groups, or shards.
        """
        own = unwrap_model(self.module)
        is_sharded = any(is_dtensor(each) or backing_shard(each) is not each for each in own.parameters())
        if is_sharded or self._prepare_pass is not None:
            raise UnsupportedError(
                "A boosted model belongs to the process groups that reduce its gradients. Found that it is about to be "
                "pickled, as by torch.save(model). Save it by booster.save_model(model, checkpoint), or on all ranks "
                "take model.state_dict(only_rank_0=True), and save that."
            )
        return super().__reduce_ex__(protocol)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the user's own model in place, so that the wrapper runs the compiled one.

        Args:
            *args: Those of `torch.nn.Module.compile`.
            **kwargs: Those of `torch.nn.Module.compile`.

        Raises:
            UnsupportedError: The model is partitioned into pipeline stages; compile it before it is boosted.
        """
        self.unwrap(unwrap_peft=False).compile(*args, **kwargs)

    def unwrap(self, unwrap_peft: bool = True) -> nn.Module:
        """Return the user's own model, with the parameter names that it was built with.

        Args:
            unwrap_peft: Of a model with adapters, return the base model that they adapt; otherwise the
                `peft.PeftModel` that `boost` was given, which can merge them: ``merge_and_unload()``.

        Returns:
            The unwrapped module: not a wrapper such as `ModelWrapper` and `DistributedDataParallel`.
        """
        module = unwrap_model(self.module)
        return model_without_adapters(module) if unwrap_peft else module


def unwrap_model(module: nn.Module) -> nn.Module:
    """Take all wrappers off a model; of `torch.compile`, what it put around the boosted model."""
    found: Any = unwrap_compiled(module)
    while isinstance(found, ModelWrapper | DistributedDataParallel):
        found = unwrap_compiled(found.module)
    return found


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """Find the boosted model in what `torch.compile` made of it; a model compiled before it is boosted stays so."""
    compiled: Any = vars(module).get("_modules", {}).get("_orig_mod")
    return compiled if isinstance(compiled, ModelWrapper | DistributedDataParallel) else module


def forward_contexts_of(module: nn.Module) -> list[Callable[[], AbstractContextManager[Any]]]:
    """Find what opens the contexts that forward passes of a boosted model run in, such as autocast; outermost first."""
    contexts: list[Callable[[], AbstractContextManager[Any]]] = []
    found: Any = unwrap_compiled(module)
    while isinstance(found, ModelWrapper | DistributedDataParallel):
        if isinstance(found, ModelWrapper):
            contexts.append(found._forward_context)  # noqa: SLF001 (of this file)
        found = unwrap_compiled(found.module)
    return contexts


def set_random_streams(model: ModelWrapper, streams: RandomStreams) -> None:
    """Set what forward passes of a boosted model draw their random numbers from, such as those of dropout."""
    model._streams = streams  # noqa: SLF001 (of this file)


def prepare_passes(model: ModelWrapper, callback: Callable[[ModelWrapper, nn.Module], None]) -> None:
    """Set what a boosted model, or a copy of it, and its module are passed to before each forward pass.

    A hook of torch would take longer.
    """
    model._prepare_pass = callback  # noqa: SLF001 (of this file)


def random_streams_of(module: nn.Module) -> RandomStreams | None:
    """Find what a boosted model draws its random numbers from; None where that is torch's own generator."""
    found = unwrap_compiled(module)
    return found._streams if isinstance(found, ModelWrapper) else None  # noqa: SLF001 (of this file)


def copy_written(module: nn.Module) -> None:
    """Copy values into a boosted model that a program wrote into what the optimizer holds, such as shards."""
    if isinstance(found := unwrap_compiled(module), ModelWrapper):
        found._copy_written()  # noqa: SLF001 (of this file)


def has_adapters(module: nn.Module) -> bool:
    """Whether a model, boosted or not, has adapters of peft around it."""
    own = unwrap_model(module)
    full_spec = full_spec_of(own)
    return is_peft_model(own) if full_spec is None else full_spec.adapter_names is not None


def _of_parameters(model: nn.Module, name: str) -> Any:
    """Find the device or type of a model, where inputs have to be; None of one without parameters."""
    own = unwrap_model(model)
    found = getattr(own, name, None)
    return getattr(next(own.parameters(), None), name, None) if found is None else found


def _attribute_hint(module: nn.Module | None, name: str) -> str:
    return "" if module is None or name.startswith("__") else attribute_hint(unwrap_model(module), name)
