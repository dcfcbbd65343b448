"""Linear layers on every arrangement of ranks."""

from abc import ABC
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from colossal._src.cluster import ParallelMesh, TensorParallelMode
from colossal._src.nn.layer.tp.arguments import Initializer, check_types
from colossal._src.nn.layer.tp.linear_product import ColumnParallel, LinearProduct, RowParallel, Unsharded, make_product
from colossal._src.nn.layer.tp.parallel_layer import ParallelLayer, native_of
from colossal._src.nn.layer.tp.sharding import find_mesh

Outputs = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]


class LinearLayer(ParallelLayer, ABC):
    """A linear layer whose product is given.

    Args:
        product: How it multiplies.
        bias: Whether it has a bias.
        dtype: Of the parameters.
        device: Of the parameters.
        skip_bias_add: Return the bias separately instead of adding it.
        weight_initializer: Fills the full weight; as `torch.nn.Linear` does by default.
        bias_initializer: Fills the full bias.

    Attributes:
        product: How it multiplies.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        product: LinearProduct,
        bias: bool,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        *,
        skip_bias_add: bool = False,
        weight_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None,
    ) -> None:
        super().__init__(product.mesh)
        check_types(self, dtype=dtype, device=device, switches={"bias": bias, "skip_bias_add": skip_bias_add})
        self.in_features, self.out_features, self.skip_bias_add = (
            product.in_features,
            product.out_features,
            skip_bias_add,
        )
        self.product, self._has_bias, self._dtype = product, bias, dtype
        self._build(
            {"weight": product.weight, "bias": product.bias},
            device,
            {"weight": weight_initializer, "bias": bias_initializer},
            (self.in_features, self.out_features),
        )

    def forward(self, x: torch.Tensor) -> Outputs:
        """Apply the layer to this rank's local shard of the input.

        Args:
            x: Its features last; on a grid, tokens first.

        Returns:
            This rank's local shard of the output; with `skip_bias_add`, the product and the bias.

        Raises:
            ShapeError: The input does not have the features of the layer.
        """
        bias = None if self.bias is None else self.product.prepare_bias(self.bias)
        if self.skip_bias_add:
            return self.product(x, self.weight, None), None if bias is None else self.product.output_bias(bias)
        return self.product(x, self.weight, bias)

    def extra_repr(self) -> str:
        """Describe the sizes, and the layout of the weight.

        Returns:
            What is printed between the parentheses.
        """
        layout = "" if self.mesh is None else f", weight={self.layouts['weight']} on {self.mesh}"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self._has_bias}{layout}"

    @classmethod
    def _arguments_of(cls, native: torch.nn.Module) -> dict[str, Any]:
        linear = native_of(native, torch.nn.Linear)
        return {
            "in_features": linear.in_features,
            "out_features": linear.out_features,
            "bias": linear.bias is not None,
        }

    def _make_native(self, device: torch.device | str | None) -> torch.nn.Module:
        return torch.nn.Linear(self.in_features, self.out_features, self._has_bias, device, self._dtype)


class Linear(LinearLayer):
    """X W^T + b on the ambient mesh, whatever the mode of its tp axis; without one, a plain linear layer.

    In 1D a layer with more output than input features is column-parallel and leaves its output sharded; any other is
    row-parallel, takes full or sharded features, and returns full ones. On the grids every layer takes and returns
    activations that are sharded as by `colossal.nn.split_input`.

    Args:
        in_features: Features of the full input.
        out_features: Features of the full output.
        bias: Whether to add a bias.
        dtype: Of the parameters.
        device: Of the parameters.
        gather_output: In 1D, return all features on every rank instead of leaving those of a column-parallel layer
            sharded. Those of a row-parallel one are full anyway.
        skip_bias_add: Return the bias separately instead of adding it, for a kernel that adds it later.
        split_sizes: The lengths of the blocks that are packed into the output, such as query, key and value: each of
            them is sharded separately. In 1D such a layer is column-parallel.
        weight_initializer: Fills the full weight in place, whichever shard this rank keeps: `f(tensor)` as in
            `torch.nn.init`, or `f(tensor, fan_in, fan_out)`, whose fans are `in_features` and `out_features`; as
            `torch.nn.Linear` does by default.
        bias_initializer: Fills the full bias in place, and gets the same fans.
        mesh: The mesh; the ambient one by default.
        tp_mode: The mode that the mesh must have; any by default.

    Raises:
        ConfigError: A value has the type of another argument, or an initializer takes others.
        MeshError: The mesh has another mode.
        ShapeError: The packed blocks do not add up to the output, or are not divisible on this grid.
        UnsupportedError: There are packed blocks in mode 3d; or the output is to be gathered on a grid.

    Communication: 1D: none forward; backward all_reduce, tp, the input's bytes. 2D and 2.5D: that of
    `colossal.comm.summa_ab`; backward for 2.5D all_reduce, depth, the weight's bytes. 3D: that of
    `colossal.comm.matmul_3d`.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.nn import Linear
        >>> from colossal.testing import fake_world
        >>> with fake_world(4), ParallelMesh(tp=4, tp_mode="2d"):
        ...     layer = Linear(256, 1024)
        >>> tuple(layer.weight.shape), tuple(layer.bias.shape)
        ((512, 128), (512,))
        >>> Linear(256, 1024)(torch.ones(2, 256)).shape
        torch.Size([2, 1024])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        split_sizes: Sequence[int] | None = None,
        weight_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None,
        mesh: ParallelMesh | None = None,
        tp_mode: TensorParallelMode | None = None,
    ) -> None:
        product = make_product(find_mesh(mesh, tp_mode), in_features, out_features, split_sizes)
        if gather_output:
            product.gather_output()
        super().__init__(
            product,
            bias,
            dtype,
            device,
            skip_bias_add=skip_bias_add,
            weight_initializer=weight_initializer,
            bias_initializer=bias_initializer,
        )


class Linear1D_Col(LinearLayer):  # noqa: N801 (the documented name)
    """A column-parallel layer: each rank of a 1D tp axis has some rows of the weight and makes some of the features.

    Args:
        in_features: Features of the input.
        out_features: Features of the full output.
        bias: Whether to add a bias.
        dtype: Of the parameters.
        device: Of the parameters.
        gather_output: Gather the full output on all ranks.
        skip_bias_add: Return the product and the bias separately; the bias is this rank's local shard, unless the
            output is gathered.
        split_sizes: The lengths of the blocks that are packed into the output; each of them is sharded separately.
        weight_initializer: Fills the full weight in place; see `Linear`.
        bias_initializer: Fills the full bias in place.
        mesh: The mesh; the ambient one by default.

    Raises:
        MeshError: The tp axis is not arranged as 1d.
        ShapeError: The packed blocks do not add up to the output.

    Communication: none forward; backward all_reduce, tp, the input's bytes. With `gather_output` all_gather, tp, the
    output's bytes.

    Source: Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.nn import Linear1D_Col
        >>> from colossal.testing import fake_world
        >>> with fake_world(2), ParallelMesh(tp=2):
        ...     Linear1D_Col(4, 6)(torch.ones(1, 4)).shape
        torch.Size([1, 3])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        split_sizes: Sequence[int] | None = None,
        weight_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None,
        mesh: ParallelMesh | None = None,
    ) -> None:
        found = find_mesh(mesh, "1d")
        product = (ColumnParallel if found else Unsharded)(found, in_features, out_features, split_sizes)
        if gather_output:
            product.gather_output()
        super().__init__(
            product,
            bias,
            dtype,
            device,
            skip_bias_add=skip_bias_add,
            weight_initializer=weight_initializer,
            bias_initializer=bias_initializer,
        )


class Linear1D_Row(LinearLayer):  # noqa: N801 (the documented name)
    """A row-parallel layer: each rank of a 1D tp axis has some columns of the weight, and takes some of the features.

    Args:
        in_features: Features of the full input.
        out_features: Features of the output.
        bias: Whether to add a bias.
        dtype: Of the parameters.
        device: Of the parameters.
        parallel_input: Whether inputs are already sharded; full ones are rejected then. If not, each rank splits them.
        skip_bias_add: Return the bias separately instead of adding it.
        weight_initializer: Fills the full weight in place; see `Linear`.
        bias_initializer: Fills the full bias in place.
        mesh: The mesh; the ambient one by default.
        stream_chunk_num: Accepted as documented: the product is computed at once.

    Raises:
        MeshError: The tp axis is not arranged as 1d.

    Communication: all_reduce, tp, the output's bytes; none backward, but for a full input all_gather, tp, its bytes.

    Source: Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.nn import Linear1D_Row
        >>> from colossal.testing import fake_world
        >>> with fake_world(2), ParallelMesh(tp=2):
        ...     Linear1D_Row(6, 4)(torch.ones(1, 3)).shape
        torch.Size([1, 4])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        parallel_input: bool = True,
        skip_bias_add: bool = False,
        weight_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None,
        mesh: ParallelMesh | None = None,
        stream_chunk_num: int = 1,
    ) -> None:
        del stream_chunk_num
        found = find_mesh(mesh, "1d")
        product = (RowParallel if found else Unsharded)(found, in_features, out_features)
        if isinstance(product, RowParallel):
            product.parallel_input = parallel_input
        super().__init__(
            product,
            bias,
            dtype,
            device,
            skip_bias_add=skip_bias_add,
            weight_initializer=weight_initializer,
            bias_initializer=bias_initializer,
        )

    def chunk_weight(self) -> None:
        """Do nothing: accepted as documented for `stream_chunk_num`."""


Linear2D = partial(Linear, tp_mode="2d")
"""`Linear` on a mesh that must be a 2D grid."""

Linear2p5D = partial(Linear, tp_mode="2.5d")
"""`Linear` on a mesh that must be a 2.5D grid."""

Linear3D = partial(Linear, tp_mode="3d")
"""`Linear` on a mesh that must be a 3D grid."""
