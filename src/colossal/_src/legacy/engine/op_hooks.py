"""What a program runs before and after each module's forward and backward pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from colossal._src.pipeline import map_tensors
from colossal.errors import ConfigError


class BaseOpHook:
    """Runs before and after the passes of modules that have parameters of their own; override what is of interest.

    Example:
        >>> import torch
        >>> from colossal.legacy.engine import BaseOpHook, Engine
        >>> class Names(BaseOpHook):
        ...     def pre_fwd_exec(self, module, *args):
        ...         print(type(module).__name__)
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), ophook_list=[Names()])
        >>> outputs = engine(torch.ones(1, 2))
        Linear
    """

    def pre_fwd_exec(self, module: nn.Module, *args: Any) -> None:
        """Run before a forward pass.

        Args:
            module: The module.
            *args: Its positional arguments.
        """

    def post_fwd_exec(self, module: nn.Module, *args: Any) -> None:
        """Run after a forward pass.

        Args:
            module: The module.
            *args: Its positional arguments.
        """

    def pre_bwd_exec(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: A002 (the documented name)
        """Run when the gradient of a module's output is there.

        Args:
            module: The module.
            input: What its forward pass got by position, without graphs.
            output: What it returned, without graphs.
        """

    def post_bwd_exec(self, module: nn.Module, input: Any) -> None:  # noqa: A002 (the documented name)
        """Run when the gradients of a module's inputs are there; if they need none, that of its last operation.

        Args:
            module: The module.
            input: What its forward pass got by position, without graphs.
        """

    def post_iter(self) -> None:
        """Run after each call of `Engine.step`."""


def check_op_hooks(hooks: Sequence[Any]) -> list[BaseOpHook]:
    """Return the hooks as a list, if they are such."""
    for hook in hooks:
        if not isinstance(hook, BaseOpHook):
            raise ConfigError(
                f"A hook on operators is a subclass of BaseOpHook. Found {hook!r}. Inherit "
                "colossal.legacy.engine.BaseOpHook, and override its methods."
            )
    return list(hooks)


class AttachedHooks:
    """The hooks on the operators of a model, which may change while it trains."""

    def __init__(self, model: nn.Module, hooks: Sequence[BaseOpHook]) -> None:
        self._model, self.hooks = model, check_op_hooks(hooks)
        self._handles: list[RemovableHandle] = []
        if self.hooks:
            self._attach()

    def add(self, hook: BaseOpHook) -> None:
        """Add a hook after the others."""
        self.hooks += check_op_hooks([hook])
        if not self._handles:
            self._attach()

    def remove(self, hook: BaseOpHook) -> None:
        """Take a hook out."""
        if hook not in self.hooks:
            raise ConfigError(
                f"A hook is removed that the engine has. Found {hook!r} among {self.hooks}. Add it first."
            )
        self.hooks.remove(hook)
        if not self.hooks:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def _attach(self) -> None:
        for module in self._model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                self._handles.append(module.register_forward_pre_hook(self._before_forward))
                self._handles.append(module.register_forward_hook(self._after_forward))

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for hook in self.hooks:
            hook.pre_fwd_exec(module, *args)

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for hook in self.hooks:
            hook.post_fwd_exec(module, *args)
        outputs = [each for each in _tensors(output) if each.requires_grad]
        if not torch.is_grad_enabled() or not outputs:
            return
        plain_args, plain_output = map_tensors((args, output), torch.Tensor.detach)

        def before_backward(_grad: Any) -> None:
            for hook in self.hooks:
                hook.pre_bwd_exec(module, plain_args, plain_output)

        def after_backward(*_grads: Any) -> None:
            for hook in self.hooks:
                hook.post_bwd_exec(module, plain_args)

        outputs[0].register_hook(before_backward)
        inputs = [each for each in _tensors(args) if each.requires_grad]
        register: Callable[..., Any] | None = inputs[0].register_hook if inputs else None
        if register is None and outputs[0].grad_fn is not None:
            register = outputs[0].grad_fn.register_hook
        if register is not None:
            register(after_backward)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from _tensors(value)
