"""Embedding tables, sharded by features or by rows."""

from typing import Any

import torch
from torch.nn import functional

from colossal._src import comm
from colossal._src.cluster import ParallelMesh, TensorParallelMode
from colossal._src.comm import Channel
from colossal._src.nn.layer.tp.arguments import Initializer, check_types, initialize
from colossal._src.nn.layer.tp.parallel_layer import ParallelLayer, native_of
from colossal._src.nn.layer.tp.sharding import (
    find_mesh,
    gather_param,
    make_layout,
    packed_row_sizes,
    sum_grad_over,
    tp_sharding_of,
)
from colossal._src.tensor import Layout
from colossal.errors import ShapeError

_NOT_LOCAL = -1


class _EmbeddingLayer(ParallelLayer):
    """Implements what both embeddings have in common: the arguments, and the native module."""

    weight: torch.nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        weight_initializer: Initializer | None = None,
        mesh: ParallelMesh | None = None,
        tp_mode: TensorParallelMode | None = None,
    ) -> None:
        super().__init__(find_mesh(mesh, tp_mode))
        check_types(self, dtype=dtype, device=device, switches={})
        self.num_embeddings, self.embedding_dim, self._dtype = num_embeddings, embedding_dim, dtype
        self.padding_idx = padding_idx if padding_idx is None or padding_idx >= 0 else num_embeddings + padding_idx
        fill = None if weight_initializer is None else self._table_initializer(weight_initializer)
        self._build({"weight": self._weight_layout()}, device, {"weight": fill})

    def _table_initializer(self, fill: Initializer) -> Initializer:
        """Fill the table, but for the row of padding, which stays zero."""

        def fill_table(table: torch.Tensor) -> None:
            initialize(fill, table, (self.num_embeddings, self.embedding_dim))
            if self.padding_idx is not None:
                table[self.padding_idx].zero_()

        return fill_table

    def _weight_layout(self) -> Layout:
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Describe the sizes, and the layout of the table.

        Returns:
            What is printed between the parentheses.
        """
        layout = "" if self.mesh is None else f", weight={self.layouts['weight']} on {self.mesh}"
        return f"{self.num_embeddings}, {self.embedding_dim}{layout}"

    @classmethod
    def _arguments_of(cls, native: torch.nn.Module) -> dict[str, Any]:
        table = native_of(native, torch.nn.Embedding)
        return {
            "num_embeddings": table.num_embeddings,
            "embedding_dim": table.embedding_dim,
            "padding_idx": table.padding_idx,
        }

    def _make_native(self, device: torch.device | str | None) -> torch.nn.Module:
        return torch.nn.Embedding(
            self.num_embeddings, self.embedding_dim, self.padding_idx, device=device, dtype=self._dtype
        )


class Embedding(_EmbeddingLayer):
    """Embeddings whose features are sharded, on the ambient mesh; tokens are split as by `colossal.nn.split_input`.

    In 1D each rank looks up some of the features, which are then gathered. On a grid each rank needs the features of
    its tokens and stores a shard of those columns of the table, so that no two ranks store the same elements.

    Args:
        num_embeddings: Rows of the table.
        embedding_dim: Features of the full table.
        padding_idx: A row that stays as it is: zeros, and without a gradient.
        dtype: Of the table.
        device: Of the table.
        weight_initializer: Fills the full table in place: `f(tensor)`, or `f(tensor, fan_in, fan_out)`, whose fans are
            `num_embeddings` and `embedding_dim`; as `torch.nn.Embedding` does by default. The row of
            padding stays zero.
        mesh: The mesh; the ambient one by default.
        tp_mode: The mode that the mesh must have; any by default.

    Raises:
        MeshError: The mesh has another mode.

    Communication: 1D: all_gather, tp, the output's bytes; none backward. On a grid all_gather, its inner token axes,
    the bytes of the rank's features of the table; backward reduce_scatter, the same; for 2.5D all_reduce, depth.

    Example:
        >>> import torch
        >>> from colossal.nn import Embedding
        >>> Embedding(10, 4)(torch.tensor([[1, 2]])).shape
        torch.Size([1, 2, 4])
    """

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up this rank's tokens.

        Args:
            tokens: Their numbers, of any shape.

        Returns:
            This rank's local shard of their embeddings.
        """
        plan = tp_sharding_of(self.mesh)
        table = gather_param(self.weight, 1, self.embedding_dim, (plan.features, plan.inner), self.mesh)
        found = functional.embedding(tokens, sum_grad_over(table, plan.replica_axes, self.mesh), self.padding_idx)
        if self.mesh is not None and not plan.features:
            return comm.gather(found, "tp", -1, self.mesh, length=self.embedding_dim)
        return found

    def _weight_layout(self) -> Layout:
        plan = tp_sharding_of(self.mesh)
        axes = (*plan.features, *plan.inner) or plan.vocabulary
        return make_layout(self.mesh, (self.num_embeddings, self.embedding_dim), {1: axes})


class VocabParallelEmbedding(_EmbeddingLayer):
    """Embeddings whose rows are sharded, on the ambient mesh; tokens are split as by `colossal.nn.split_input`.

    Each rank looks up the tokens whose rows it has, also for the other ranks, and the results are summed over
    ranks. Its table has the layout of the weight of a `VocabParallelClassifier`, so that the two may be tied.

    Args:
        num_embeddings: Rows of the full table.
        embedding_dim: Features of the full table.
        padding_idx: A row that stays as it is: zeros, and without a gradient.
        dtype: Of the table.
        device: Of the table.
        weight_initializer: Fills the full table in place: `f(tensor)`, or `f(tensor, fan_in, fan_out)`, whose fans are
            `num_embeddings` and `embedding_dim`; as `torch.nn.Embedding` does by default. The row of
            padding stays zero.
        mesh: The mesh; the ambient one by default.
        tp_mode: The mode that the mesh must have; any by default.

    Raises:
        MeshError: The mesh has another mode.

    Communication: 1D: all_reduce, tp, the output's bytes; none backward. On a grid all_gather of the token numbers
    and reduce_scatter of the embeddings along row, or in 3D input; backward all_gather, the same. In addition, in 3D
    all_gather, weight, the bytes of the table that a rank uses; backward reduce_scatter; for 2.5D backward all_reduce,
    depth.

    Source: Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053.

    Example:
        >>> import torch
        >>> from colossal.nn import VocabParallelEmbedding
        >>> VocabParallelEmbedding(10, 4)(torch.tensor([[1, 2]])).shape
        torch.Size([1, 2, 4])
    """

    _row_of: torch.Tensor | None = None
    _padding_row: int | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look tokens up.

        Args:
            tokens: This rank's token ids; on a grid, sharded along the first dimension.

        Returns:
            This rank's local shard of their embeddings.

        Raises:
            ShapeError: On a grid, the tokens have no dimension to shard.
            IndexError: A token is not in the table, be it this rank's or another's.
        """
        mesh, plan = self.mesh, tp_sharding_of(self.mesh)
        if mesh is None:
            return functional.embedding(tokens, self.weight, self.padding_idx)
        if not plan.tokens:
            return comm.reduce(self._look_up(tokens, self.weight), "tp", mesh)
        if not tokens.dim():
            raise ShapeError(
                "On a grid the first dimension of the tokens is sharded. Found a single token id. Add a dimension."
            )
        axis = plan.vocabulary[0]
        length = sum(Channel(axis, mesh).lengths(tokens.shape[0]))
        everyone = comm.gather(tokens, axis, 0, mesh, length=length)
        found = self._look_up(everyone, sum_grad_over(self._rows(), plan.replica_axes, mesh))
        return comm.reduce_scatter(found, axis, 0, mesh, uneven=True)

    def _rows(self) -> torch.Tensor:
        """The rows that this rank looks up, of the table's features that it has."""
        if len(tp_sharding_of(self.mesh).vocabulary) == 1:
            return self.weight
        return torch.cat(comm.gather_packed_rows(self.weight, self.num_embeddings, self.mesh))

    def _look_up(self, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The embeddings of the tokens whose rows are here, and zeros for the others."""
        if self._row_of is None or self._row_of.device != tokens.device:
            row_of = self._find_rows()
            self._padding_row = None if self.padding_idx is None else int(row_of[self.padding_idx])
            self._row_of = row_of.to(tokens.device)
        at = self._row_of.index_select(0, tokens.flatten()).view(tokens.shape)
        if not len(rows):
            return rows.new_zeros(*tokens.shape, rows.shape[1]) + rows.sum()
        padding = None if self._padding_row == _NOT_LOCAL else self._padding_row
        found = functional.embedding(at.clamp(min=0), rows, padding)
        return found.masked_fill((at == _NOT_LOCAL).unsqueeze(-1), 0.0)

    def _find_rows(self) -> torch.Tensor:
        """The local index of each row of the full table, or `_NOT_LOCAL`."""
        assert self.mesh is not None
        axes, groups = tp_sharding_of(self.mesh).vocabulary[:1], self.layouts["weight"].groups[0]
        used = make_layout(self.mesh, (self.num_embeddings,), {0: axes}, {0: groups})
        extents = used.extents(0, used.coordinate_of(self.mesh.global_rank))
        here = torch.cat([torch.arange(at, at + n, device="cpu") for at, n in extents])
        row_of = torch.full((self.num_embeddings,), _NOT_LOCAL, device="cpu")
        row_of[here] = torch.arange(len(here), device="cpu")
        return row_of

    def _weight_layout(self) -> Layout:
        plan, shape = tp_sharding_of(self.mesh), (self.num_embeddings, self.embedding_dim)
        groups = {0: packed_row_sizes(self.num_embeddings, self.mesh)}
        return make_layout(self.mesh, shape, {0: plan.vocabulary, 1: plan.features}, groups)
