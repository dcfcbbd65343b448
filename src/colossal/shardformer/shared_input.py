"""One sum for the gradient of an input that several layers get."""

from typing import Any, final

import torch
from torch import nn

from colossal import comm
from colossal.cluster import ParallelMesh
from colossal.nn.layer.grid.product import Column


@final
class SharedInput:
    """Lets the layers of one module that get the same tensor use one copy of it, so that its gradient is sent once.

    While the module runs, it remembers the last input and its copy; afterwards, also behind an error, nothing.

    Args:
        mesh: The mesh.

    Communication: none forward; backward all_reduce, tp, the bytes of each input that differs from the one before it.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.shardformer.shared_input import SharedInput
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     enter, x = SharedInput(ParallelMesh(tp=2)), torch.ones(1)
        ...     enter.open()
        ...     print(enter(x) is enter(x))
        ...     enter.close()
        ...     print(enter(x) is enter(x))
        True
        False
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh, self._is_open = mesh, False
        self._last: tuple[torch.Tensor, torch.Tensor, bool] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Let an input be used on all ranks.

        Args:
            x: The input, the same on all ranks.

        Returns:
            Its copy, whose gradient is the sum of the ranks' gradients; the same copy if it was the last input.
        """
        has_grad = torch.is_grad_enabled()  # also between siblings, one of which may be checkpointed by itself
        if self._last is not None and self._last[0] is x and self._last[2] == has_grad:
            return self._last[1]
        copy = comm.replicate(x, "tp", self._mesh)
        if self._is_open:
            self._last = x, copy, has_grad
        return copy

    def open(self, *_: Any) -> None:
        """Begin to remember; as a hook, before a module runs."""
        self._is_open = True

    def close(self, *_: Any) -> None:
        """Forget; as a hook, when the module has run."""
        self._is_open, self._last = False, None


def share_inputs(model: nn.Module, mesh: ParallelMesh) -> None:
    """Let column-parallel layers that lie in one module share their inputs, such as those of query, key and value.

    Args:
        model: The divided model.
        mesh: The mesh.

    Example:
        >>> from torch import nn
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.nn import Linear1D_Col
        >>> from colossal.shardformer.shared_input import share_inputs
        >>> from colossal.testing import fake_world
        >>> with fake_world(2), ParallelMesh(tp=2) as mesh:
        ...     block = nn.ModuleDict({"gate": Linear1D_Col(4, 6), "up": Linear1D_Col(4, 6)})
        ...     share_inputs(block, mesh)
        >>> block["gate"].product.enter is block["up"].product.enter
        True
    """
    for parent in model.modules():
        products = [getattr(child, "product", None) for child in parent.children()]
        columns = [found for found in products if isinstance(found, Column) and found.enter is None]
        if len(columns) > 1:
            shared = SharedInput(mesh)
            for column in columns:
                column.enter = shared
            parent.register_forward_pre_hook(shared.open)
            parent.register_forward_hook(shared.close, always_call=True)
