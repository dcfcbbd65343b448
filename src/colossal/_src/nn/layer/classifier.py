"""The last layer of a model: from features to classes, or to the tokens of a vocabulary."""

from typing import Any

import torch

from colossal._src.cluster import ParallelMesh, TensorParallelMode
from colossal._src.nn.layer.linear import LinearLayer
from colossal._src.nn.layer.tp.arguments import Initializer
from colossal._src.nn.layer.tp.linear_product import (
    ColumnParallel,
    Matmul3D,
    ReplicatedOutput,
    RowParallel,
    SummaABt,
    Unsharded,
)
from colossal._src.nn.layer.tp.sharding import find_mesh
from colossal.errors import ShapeError


class _ClassifierLayer(LinearLayer):
    """Implements what both classifiers have in common: a weight that may be tied, and the names of the sizes."""

    def _tie_weight(self, weight: torch.nn.Parameter | None) -> None:
        if weight is None:
            return
        if weight.shape != self.weight.shape:
            raise ShapeError(
                f"A tied weight must have this layer's local shape, {tuple(self.weight.shape)} on this rank. "
                f"Found {tuple(weight.shape)}. Tie the table of an embedding of the same kind, sizes and mesh."
            )
        self.weight = weight

    @classmethod
    def _arguments_of(cls, native: torch.nn.Module) -> dict[str, Any]:
        arguments = super()._arguments_of(native)
        return {"num_classes": arguments.pop("out_features"), **arguments}


class Classifier(_ClassifierLayer):
    """A linear layer whose few classes are replicated on every rank, for local tokens, on the ambient mesh.

    Args:
        in_features: Features of the full input.
        num_classes: Number of classes.
        weight: The weight of an `Embedding` on the same mesh with as many rows, to be shared; one of its own by
            default.
        bias: Whether to add a bias.
        dtype: Of the parameters.
        device: Of the parameters.
        skip_bias_add: Return the bias separately instead of adding it.
        weight_initializer: Fills the full weight in place; see `Linear`.
        bias_initializer: Fills the full bias in place.
        mesh: The mesh; the ambient one by default.
        tp_mode: The mode that the mesh must have; any by default.

    Raises:
        MeshError: The mesh has another mode.
        ShapeError: The tied weight does not have the shape of this rank's shard.

    Communication: 1D: that of a row-parallel layer. 2D, 2.5D and 3D: all_gather, the inner token axes, the bytes of the
    weight's features on this rank; all_reduce, the feature axes, the output's bytes. Backward reduce_scatter, the inner
    token axes, the same.

    Example:
        >>> import torch
        >>> from colossal.nn import Classifier
        >>> Classifier(8, 3)(torch.ones(2, 8)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        weight: torch.nn.Parameter | None = None,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        skip_bias_add: bool = False,
        weight_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None,
        mesh: ParallelMesh | None = None,
        tp_mode: TensorParallelMode | None = None,
    ) -> None:
        found = find_mesh(mesh, tp_mode)
        kinds = {
            None: Unsharded,
            "1d": RowParallel,
            "2d": ReplicatedOutput,
            "2.5d": ReplicatedOutput,
            "3d": ReplicatedOutput,
        }
        super().__init__(
            kinds[found and found.tp_mode](found, in_features, num_classes),
            bias,
            dtype,
            device,
            skip_bias_add=skip_bias_add,
            weight_initializer=weight_initializer,
            bias_initializer=bias_initializer,
        )
        self._tie_weight(weight)


class VocabParallelClassifier(_ClassifierLayer):
    """A linear layer whose many classes are sharded, for `VocabParallelCrossEntropyLoss`, on the ambient mesh.

    Args:
        in_features: Features of the full input.
        num_classes: Number of classes.
        weight: The weight of a `VocabParallelEmbedding` on the same mesh with as many rows, to be shared; one of its
            own by default.
        bias: Whether to add a bias.
        dtype: Of the parameters.
        device: Of the parameters.
        skip_bias_add: Return the bias separately instead of adding it.
        gather_output: In 1D, gather the classes on all ranks.
        weight_initializer: Fills the full weight in place; see `Linear`.
        bias_initializer: Fills the full bias in place.
        mesh: The mesh; the ambient one by default.
        tp_mode: The mode that the mesh must have; any by default.

    Raises:
        MeshError: The mesh has another mode.
        ShapeError: The tied weight does not have the shape of this rank's shard.
        UnsupportedError: The output is to be gathered, and the mesh is a grid.

    Communication: 1D: that of a column-parallel layer. On a grid that of `colossal.comm.summa_abt`, or of
    `colossal.comm.matmul_3d`.

    Example:
        >>> import torch
        >>> from colossal.nn import VocabParallelClassifier, VocabParallelEmbedding
        >>> table = VocabParallelEmbedding(10, 4)
        >>> VocabParallelClassifier(4, 10, weight=table.weight, bias=False)(torch.ones(2, 4)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        weight: torch.nn.Parameter | None = None,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        skip_bias_add: bool = False,
        gather_output: bool = False,
        weight_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None,
        mesh: ParallelMesh | None = None,
        tp_mode: TensorParallelMode | None = None,
    ) -> None:
        found = find_mesh(mesh, tp_mode)
        kinds = {None: Unsharded, "1d": ColumnParallel, "2d": SummaABt, "2.5d": SummaABt, "3d": Matmul3D}
        product = kinds[found and found.tp_mode](found, in_features, num_classes)
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
        self._tie_weight(weight)
