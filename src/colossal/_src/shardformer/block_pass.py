"""One pass through a copy of a block, with values that are given to it, whose outputs and gradients are compared."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map_only

_PLAIN = (torch.Tensor, int, float, str, type(None))


class BlockInputs(NamedTuple):
    """What a block is called with.

    Args:
        args: Its arguments.
        kwargs: Those by name.
        buffers: The values of its buffers.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    buffers: Mapping[str, torch.Tensor]

    @property
    def is_plain(self) -> bool:
        """Whether all arguments are values, and not objects that a block may change, such as a cache of keys."""
        return all(isinstance(each, _PLAIN) for each in tree_leaves((self.args, self.kwargs)))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The arguments that are tensors."""
        return [each for each in tree_leaves((self.args, self.kwargs)) if isinstance(each, torch.Tensor)]


class BlockPass(NamedTuple):
    """What a pass computed.

    Args:
        leaves: Floating-point inputs, and the parameters whose gradients are compared, by their names.
        outputs: What the named layers returned, and then the block, under an empty name.
    """

    leaves: Mapping[str, torch.Tensor]
    outputs: Sequence[tuple[str, torch.Tensor]]

    def pairs(self, other: "BlockPass") -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Pair outputs of the same name and shape; those of each head have others where heads are sharded."""
        if [name for name, _ in self.outputs] != [name for name, _ in other.outputs]:
            return []
        both = zip(self.outputs, other.outputs, strict=True)
        return [(name, one, two) for (name, one), (_, two) in both if one.shape == two.shape]


def run_copy(
    block: nn.Module,
    values: Mapping[str, torch.Tensor],
    compared: Sequence[str],
    layers: Iterable[str],
    inputs: BlockInputs,
) -> BlockPass:
    """Run a block without values of its own, forward.

    Args:
        block: The block.
        values: Those of its parameters.
        compared: The names of the parameters whose gradients are compared.
        layers: The names of the layers whose outputs are.
        inputs: The inputs, which stay as they are.
    """
    leaves: dict[str, torch.Tensor] = {}
    made = {id(each): each.detach() for each in values.values()}  # a parameter with two names stays one
    params = {name: made[id(each)] for name, each in values.items()}
    for name in compared:
        leaves[name] = params[name].requires_grad_(params[name].is_floating_point())

    def enter(value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return value.clone()
        leaf = value.detach()
        if value.requires_grad:  # not positions, which each rank uses for its own heads
            leaves[f"input {len(leaves) - len(compared)}"] = leaf.requires_grad_()
        return leaf.clone()  # into which the block may write

    args, kwargs = tree_map_only(torch.Tensor, enter, (inputs.args, inputs.kwargs))
    outputs: list[tuple[str, Any]] = []

    def note(name: str, _layer: nn.Module, _args: Any, output: Any) -> None:
        outputs.append((name, output))

    handles = [block.get_submodule(name).register_forward_hook(partial(note, name)) for name in layers]
    buffers = {name: each.clone() for name, each in inputs.buffers.items()}
    try:
        returned = functional_call(block, params | buffers, args, kwargs)
    finally:
        for handle in handles:
            handle.remove()
    outputs += [("", each) for each in tree_leaves(returned)]
    floats = [each for each in outputs if isinstance(each[1], torch.Tensor) and each[1].is_floating_point()]
    return BlockPass(leaves, floats)


def gradients_of(one: BlockPass, outputs: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Take the gradients of all leaves, for gradients of the outputs that depend on nothing but the shapes of these."""
    random = torch.Generator("cpu").manual_seed(0)
    given = [torch.randn(each.shape, generator=random, device="cpu").to(each) for each in outputs]
    leaves = {name: each for name, each in one.leaves.items() if each.requires_grad}
    grads = torch.autograd.grad(outputs, [*leaves.values()], given, allow_unused=True)
    both = zip(leaves.items(), grads, strict=True)
    return {name: torch.zeros_like(leaf) if grad is None else grad for (name, leaf), grad in both}
