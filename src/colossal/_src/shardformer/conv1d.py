"""Linear layers whose weight is transposed, as GPT-2 has them."""

from abc import ABC
from collections.abc import Sequence
from typing import Any

import torch

from colossal._src.cluster import ParallelMesh
from colossal._src.nn.layer.tp import (
    ColumnParallel,
    LinearProduct,
    ParallelLayer,
    RowParallel,
    Unsharded,
    find_mesh,
    make_layout,
)


class Conv1DLayer(ParallelLayer, ABC):
    """`transformers.pytorch_utils.Conv1D`, of which each rank has a part."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter
    _kind: type[LinearProduct]

    def __init__(
        self,
        nf: int,
        nx: int,
        split_sizes: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        mesh: ParallelMesh | None = None,
    ) -> None:
        super().__init__(find_mesh(mesh, "1d"))
        self.nf, self.nx, self._dtype = nf, nx, dtype
        kind = Unsharded if self.mesh is None else self._kind
        self.product: LinearProduct = kind(self.mesh, nx, nf, split_sizes)
        out_axes, in_axes = self.product.weight_axes
        weight = make_layout(self.mesh, (nx, nf), {0: in_axes, 1: out_axes}, {1: self.product.split_sizes})
        self._build({"weight": weight, "bias": self.product.bias}, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer.

        Args:
            x: Of shape (..., nx), or the features of this rank of it.

        Returns:
            The result, of shape (..., nf), or the features of this rank of it.
        """
        return self.product(x, self.weight.mT, self.product.prepare_bias(self.bias))

    @classmethod
    def _arguments_of(cls, native: torch.nn.Module) -> dict[str, Any]:
        nx, nf = native.get_parameter("weight").shape
        return {"nf": nf, "nx": nx}

    def _make_native(self, device: torch.device | str | None) -> torch.nn.Module:
        from transformers.pytorch_utils import Conv1D

        with torch.device(device or "cpu"):
            return Conv1D(self.nf, self.nx).to(self._dtype)


class Conv1DCol(Conv1DLayer):
    """The column-parallel form: each rank makes some of the features.

    Communication: none forward; backward all_reduce, tp, the input's bytes.
    """

    _kind = ColumnParallel


class Conv1DRow(Conv1DLayer):
    """The row-parallel form: each rank takes some of the features, and the results are summed up.

    Communication: all_reduce, tp, the output's bytes; none backward.
    """

    _kind = RowParallel
