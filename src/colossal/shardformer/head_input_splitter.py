"""Arguments of attention that hold something for each head of the whole model."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from colossal import comm
from colossal.cluster import ParallelMesh


@final
class HeadInputSplitter:
    """A hook that keeps of some arguments what this rank's heads need.

    Communication: none forward; backward all_gather, tp, the argument's bytes.
    """

    def __init__(self, arguments: Sequence[str], mesh: ParallelMesh) -> None:
        self._arguments, self._mesh = arguments, mesh

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Cut the arguments of a call."""
        heads = module.num_heads * self._mesh.size("tp")
        given = {name: kwargs[name] for name in self._arguments if kwargs.get(name) is not None}
        return args, {**kwargs, **{name: self._own(whole, heads) for name, whole in given.items()}}

    def _own(self, whole: torch.Tensor, heads: int) -> torch.Tensor:
        if whole.dim() > 1 and whole.shape[1] == heads:
            return comm.scatter(whole, "tp", 1, self._mesh)
        if whole.shape[0] % heads:
            return whole
        return comm.scatter(whole.unflatten(0, (-1, heads)), "tp", 1, self._mesh).flatten(0, 1)
