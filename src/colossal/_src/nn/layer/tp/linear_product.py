"""The products of linear layers: how the weight is sharded, and what is sent, in each mode of the tp axis.

================  ===========================  =====================================================================
product           weight (out, in)             how X W^T + b is computed
================  ===========================  =====================================================================
Unsharded         full                         by one rank
ColumnParallel    out by tp                    every rank computes some of the features
RowParallel       in by tp                     every rank computes a partial sum of all features, from some of X's
SummaAB           out by col, in by row        A B of colossal._src.comm.summa: X and W travel
SummaABt          out by row, in by col        A B^T of it: W and the result travel
Matmul3D          out by input and weight,     colossal._src.comm.matmul3d
                  in by output
ReplicatedOutput  in by all token and feature  W is gathered, and the result, whose features are few, all-reduced
                  axes
================  ===========================  =====================================================================

On a 2D or 2.5D grid a layer with more output than input features is a SummaAB, any other a SummaABt: the smaller
activation travels.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch.nn import functional

from colossal._src import comm
from colossal._src.cluster import Axis, ParallelMesh
from colossal._src.nn.layer.tp.sharding import (
    gather_param,
    local_length,
    make_layout,
    packed_row_sizes,
    sum_grad_over,
    tp_sharding_of,
)
from colossal._src.tensor import relayout
from colossal.errors import ShapeError, UnsupportedError


class LinearProduct(ABC):
    """X W^T + b on one arrangement of ranks."""

    _advice = "Split a full input with colossal.nn.split_input, and build the layers on one mesh."
    weight_axes: tuple[tuple[Axis, ...], tuple[Axis, ...]] = (), ()
    bias_axes: tuple[Axis, ...] = ()

    def __init__(
        self,
        mesh: ParallelMesh | None,
        in_features: int,
        out_features: int,
        split_sizes: Sequence[int] | None = None,
    ) -> None:
        self.mesh, self.in_features, self.out_features = mesh, in_features, out_features
        self.split_sizes = tuple(split_sizes or (out_features,))
        if sum(self.split_sizes) != out_features:
            raise ShapeError(
                f"The blocks of a packed layer add up to its features. Found split_sizes {self.split_sizes} for "
                f"{out_features} features. Pass lengths that add up to them."
            )
        self._check_split_sizes()
        out_axes, in_axes = self.weight_axes
        self.weight = make_layout(
            mesh, (out_features, in_features), {0: out_axes, 1: in_axes}, {0: self._packed_row_sizes()}
        )
        self.bias = make_layout(mesh, (out_features,), {0: self.bias_axes}, {0: self.split_sizes})
        self._token_axes = tp_sharding_of(mesh).tokens
        self._local_in_features = local_length(in_features, tp_sharding_of(mesh).features or in_axes, mesh)

    @abstractmethod
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply local shards."""

    def prepare_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Prepare the bias for being added by this rank, to its local tokens."""
        return sum_grad_over(bias, self._token_axes, self.mesh) if self._token_axes else bias

    def shard_tokens(self, axes: tuple[Axis, ...]) -> None:
        """Sum the gradient of the bias over axes whose ranks have different tokens of the output."""
        self._token_axes = axes

    def output_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Convert a prepared bias to the features of this rank's output."""
        return bias

    def gather_output(self) -> None:
        """Return all features on every rank from now on; no effect where they already are."""
        raise UnsupportedError(
            f"gather_output is for a tp axis that is arranged as 1d. Found {self.mesh}, on which the next layer takes "
            "sharded features. Leave it out, and call colossal.nn.gather_output where the full output is needed."
        )

    def _packed_row_sizes(self) -> tuple[int, ...]:
        return self.split_sizes

    def _check_split_sizes(self) -> None:  # noqa: B027 (most products have nothing to refuse)
        """Reject packed blocks that this product cannot keep separate."""

    def _check_features(self, x: torch.Tensor, *expected: int, least_dims: int = 1) -> None:
        if x.dim() < least_dims or x.shape[-1] not in expected:
            shape = "(tokens, ..., features)" if least_dims > 1 else "(..., features)"
            raise ShapeError(
                f"The input of this layer has the shape {shape} with {' or '.join(map(str, dict.fromkeys(expected)))} "
                f"features on this rank, of {self.in_features} on all. Found {tuple(x.shape)}. {self._advice}"
            )


@final
class Unsharded(LinearProduct):
    """One rank has everything."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `LinearProduct`."""
        return functional.linear(x, weight, bias)

    def gather_output(self) -> None:
        """See `LinearProduct`."""


@final
class ColumnParallel(LinearProduct):
    """Every rank computes some of the features; a sharded input is gathered first.

    Communication: none forward for a full input; backward all_reduce, tp, the input's bytes. Where the output is
    gathered, all_gather, tp, its bytes, and none backward.
    """

    _advice = "Pass all features, or the sharded output of a column-parallel layer with as many features."
    weight_axes = ("tp",), ()
    bias_axes = ("tp",)
    _gathers_output = False
    input_transform: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Makes a full input ready, so that its gradient is summed over ranks; `colossal.comm.replicate` by default."""
    matmul: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] | None = None
    """Replaces the entire product: takes input, weight and bias."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `LinearProduct`."""
        assert self.mesh is not None
        if self.matmul is not None:
            y = self.matmul(x, weight, bias)
            return self._gather_features(y) if self._gathers_output else y
        if x.shape[-1] != self.in_features:
            self._check_features(x, self.in_features, local_length(self.in_features, ("tp",), self.mesh))
        if x.shape[-1] == self.in_features:
            x = self.input_transform(x) if self.input_transform else comm.replicate(x, "tp", self.mesh)
        else:
            # The ranks compute different features from it, so each has a partial sum of its gradient.
            x = comm.gather(x, "tp", -1, self.mesh, partial_grad=True, length=self.in_features)
        y = functional.linear(x, weight, bias)
        return self._gather_features(y) if self._gathers_output else y

    def output_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """See `LinearProduct`."""
        return self._gather_features(bias) if self._gathers_output else bias

    def set_input_transform(self, enter: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the transform of a full input, which must sum its gradient over ranks."""
        self.input_transform = enter

    def set_matmul(self, multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]) -> None:
        """Replace the product of input and weight, with the bias added."""
        self.matmul = multiply

    def gather_output(self) -> None:
        """See `LinearProduct`."""
        self._gathers_output = True

    def _gather_features(self, y: torch.Tensor) -> torch.Tensor:
        if len(self.split_sizes) == 1:
            return comm.gather(y, "tp", -1, self.mesh, length=self.out_features)
        last, shape = y.dim() - 1, (*y.shape[:-1], self.out_features)
        source = make_layout(self.mesh, shape, {last: ("tp",)}, {last: self.split_sizes})
        return relayout(y, source, make_layout(self.mesh, shape, {}, {last: self.split_sizes}), self.mesh)


@final
class RowParallel(LinearProduct):
    """Every rank computes a partial sum of all features; a full input is split first.

    Communication: all_reduce, tp, the output's bytes; none backward, but for a full input all_gather, tp, its bytes.
    """

    _advice = "A column-parallel layer returns sharded features; Linear1D_Row(parallel_input=False) takes full ones."
    weight_axes = (), ("tp",)
    parallel_input: bool | None = None
    """Whether inputs are sharded; None accepts both."""
    matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """Multiplies a sharded input by the weight, and sums over ranks; by default with `colossal.comm.reduce`."""

    def set_matmul(self, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        """Replace the product of a sharded input and the weight, which must sum over ranks."""
        self.matmul = multiply

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `LinearProduct`."""
        assert self.mesh is not None
        local = self._local_in_features
        if x.shape[-1] != local or self.parallel_input is False:
            expected = {None: (local, self.in_features), True: (local,), False: (self.in_features,)}
            self._check_features(x, *expected[self.parallel_input])
        if x.shape[-1] != local:
            x = comm.scatter(x, "tp", -1, self.mesh, uneven=True)
        y = self.matmul(x, weight) if self.matmul else comm.reduce(functional.linear(x, weight), "tp", self.mesh)
        # After the sum over the ranks, which would otherwise count the bias once for each of them.
        return y if bias is None else y + bias

    def gather_output(self) -> None:
        """See `LinearProduct`."""


class _SummaBase(LinearProduct):
    bias_axes = ("col",)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `LinearProduct`."""
        mesh = self.mesh
        assert mesh is not None
        self._check_features(x, self._local_in_features, least_dims=2)
        # The layers of a 2.5D grid multiply different tokens by the same weight.
        weight = sum_grad_over(weight, tp_sharding_of(mesh).replica_axes, mesh)
        y = self._multiply(x.flatten(0, -2), weight, mesh).unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias

    @abstractmethod
    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor: ...

    def _check_split_sizes(self) -> None:
        assert self.mesh is not None
        q = self.mesh.size("col")
        if len(self.split_sizes) > 1 and any(length % q for length in self.split_sizes):
            raise ShapeError(
                f"On a grid of {q} x {q} ranks the blocks of a packed layer are divisible by {q}. Found split_sizes "
                f"{self.split_sizes}. Pad them, or make a separate layer for each block."
            )


@final
class SummaAB(_SummaBase):
    """X and W travel over a 2D or 2.5D grid.

    Communication: that of `colossal.comm.summa_ab`; backward for 2.5D all_reduce, depth, the weight's bytes.
    """

    weight_axes = ("col",), ("row",)

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
        return comm.summa_ab(x, weight.mT, self.in_features, mesh)


@final
class SummaABt(_SummaBase):
    """W and the result travel over a 2D or 2.5D grid.

    Communication: that of `colossal.comm.summa_abt`; backward for 2.5D all_reduce, depth, the weight's bytes.
    """

    weight_axes = ("row",), ("col",)

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
        return comm.summa_abt(x, weight, self.out_features, mesh)


@final
class Matmul3D(LinearProduct):
    """X, W and the result are gathered or summed up along the three axes of a 3D grid.

    Communication: that of `colossal.comm.matmul_3d`.
    """

    weight_axes = ("input", "weight"), ("output",)
    bias_axes = ("output",)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `LinearProduct`."""
        mesh = self.mesh
        assert mesh is not None
        self._check_features(x, self._local_in_features, least_dims=2)
        y = comm.matmul_3d(x, weight, self.out_features, mesh)
        return y if bias is None else y + bias

    def _packed_row_sizes(self) -> tuple[int, ...]:
        return packed_row_sizes(self.out_features, self.mesh)

    def _check_split_sizes(self) -> None:
        if len(self.split_sizes) > 1:
            raise UnsupportedError(
                f"A 3D grid shards the features of a layer as one block. Found split_sizes {self.split_sizes}. Make a "
                "separate layer for each block, or use the mode 1d, 2d or 2.5d."
            )


@final
class ReplicatedOutput(LinearProduct):
    """The output features are full on every rank of a grid: a few classes, for local tokens.

    Communication: all_gather, the inner token axes, the bytes of the weight's features on this rank; all_reduce, the
    feature axes, the output's bytes. Backward reduce_scatter, the inner token axes, the same.
    """

    def __init__(
        self,
        mesh: ParallelMesh | None,
        in_features: int,
        out_features: int,
        split_sizes: Sequence[int] | None = None,
    ) -> None:
        self._tp_sharding = tp_sharding_of(mesh)
        self.weight_axes = (), (*self._tp_sharding.features, *self._tp_sharding.inner)
        super().__init__(mesh, in_features, out_features, split_sizes)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `LinearProduct`."""
        mesh, plan = self.mesh, self._tp_sharding
        self._check_features(x, self._local_in_features, least_dims=2)
        weight = gather_param(weight, 1, self.in_features, (plan.features, plan.inner), mesh)
        y = functional.linear(x, sum_grad_over(weight, plan.replica_axes, mesh))
        for axis in plan.features:
            y = comm.reduce(y, axis, mesh)
        return y if bias is None else y + bias


def make_product(
    mesh: ParallelMesh | None, in_features: int, out_features: int, split_sizes: Sequence[int] | None = None
) -> LinearProduct:
    """Choose the product for a linear layer on a mesh."""
    # Packed blocks, such as queries, keys and values, are blocks of output features.
    widens = out_features > in_features or len(split_sizes or ()) > 1
    planar = SummaAB if widens else SummaABt
    kinds = {
        None: Unsharded,
        "1d": ColumnParallel if widens else RowParallel,
        "2d": planar,
        "2.5d": planar,
        "3d": Matmul3D,
    }
    return kinds[mesh and mesh.tp_mode](mesh, in_features, out_features, split_sizes)
