"""One sum for the gradient of an input that several layers get."""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn

from colossal._src import comm
from colossal._src.cluster import ParallelMesh
from colossal._src.nn.layer.tp import ColumnParallel


class InputCache:
    """Caches what was computed from the last input of the layers in one module, while the module runs.

    The cache is cleared afterwards, also after an error.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._last: tuple[torch.Tensor, torch.Tensor, bool] | None = None

    def find(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return what was computed from an input, if it is cached."""
        has_grad = torch.is_grad_enabled()  # also between siblings, one of which may be checkpointed by itself
        if self._last is not None and self._last[0] is x and self._last[2] == has_grad:
            return self._last[1]
        return None

    def keep(self, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Remember what was made of an input, if the module runs."""
        # Outside of the module nothing would clear it, and activations would stay in memory.
        if self._is_open:
            self._last = x, made, torch.is_grad_enabled()
        return made

    def watch(self, module: nn.Module) -> None:
        """Remember while a module runs."""
        module.register_forward_pre_hook(self.open)
        module.register_forward_hook(self.close, always_call=True)

    def open(self, *_: Any) -> None:
        """Begin to remember; as a hook, before a module runs."""
        self._is_open = True

    def close(self, *_: Any) -> None:
        """Forget; as a hook, when the module has run."""
        self._is_open, self._last = False, None


@final
class MergedInputGradient(InputCache):
    """Lets the layers of one module that get the same tensor use one copy of it, so that its gradient is sent once."""

    def __init__(self, enter: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._enter = enter

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Let an input be used on all ranks."""
        found = self.find(x)
        return self.keep(x, self._enter(x)) if found is None else found


def merge_input_gradients(model: nn.Module, mesh: ParallelMesh) -> None:
    """All-reduce the gradient of an input once for all column-parallel layers of a module, such as those of attention.

    Communication: none forward; backward all_reduce, tp, the bytes of each input that differs from the one before it.
    """
    for parent in model.modules():
        products = [getattr(child, "product", None) for child in parent.children()]
        # Layers with a transform of their own, such as one of sequence parallelism, reduce the gradient there.
        columns = [found for found in products if isinstance(found, ColumnParallel) and found.input_transform is None]
        if len(columns) > 1:
            shared = MergedInputGradient(lambda x: comm.replicate(x, "tp", mesh))
            for column in columns:
                column.set_input_transform(shared)
            shared.watch(parent)
