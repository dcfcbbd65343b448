"""The arguments of layers in the order of the older documentation, for the layers of `colossal.nn`.

Each class stands before a layer among the bases of another class, whose `mode` the mesh must have.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from colossal._src.cluster import TensorParallelMode
from colossal._src.legacy.notice import superseded
from colossal._src.nn.layer.tp import find_mesh

Fill = Callable[..., Any] | None
"""Fills a full parameter: `f(tensor)`, or `f(tensor, fan_in, fan_out)`; as the layer does by default if None."""


class OlderOrder:
    """Has a mode, and says what supersedes it."""

    mode: ClassVar[TensorParallelMode | None] = None

    def _build_layer(self, *args: Any, **options: Any) -> None:
        """Call the constructor of the layer that follows in the order of the bases."""
        kind, mode = type(self), type(self).mode
        where = "" if mode is None else f" on ParallelMesh(tp=..., tp_mode={mode!r})"
        superseded(f"colossal.nn.{kind.__name__}", f"colossal.nn.{_layer_of(kind).__name__}{where}")
        if mode is not None:
            find_mesh(options.get("mesh"), mode)  # rejects that of another mode
        layer: Any = super()
        layer.__init__(*args, **options)


class LinearOrder(OlderOrder):
    """For `Linear`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        skip_bias_add: bool = False,
        weight_initializer: Fill = None,
        bias_initializer: Fill = None,
        **options: Any,
    ) -> None:
        given = {"weight_initializer": weight_initializer, "bias_initializer": bias_initializer}
        self._build_layer(in_features, out_features, bias, dtype, skip_bias_add=skip_bias_add, **given, **options)


class NormOrder(OlderOrder):
    """For `LayerNorm`, whose bias stands third."""

    default_eps: ClassVar[float] = 1e-5

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        self._build_layer(normalized_shape, self.default_eps if eps is None else eps, dtype, bias=bias, **options)


class EmbeddingOrder(OlderOrder):
    """For `Embedding` and `VocabParallelEmbedding`."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        weight_initializer: Fill = None,
        **options: Any,
    ) -> None:
        options["weight_initializer"] = weight_initializer
        self._build_layer(num_embeddings, embedding_dim, padding_idx, dtype, **options)


class ClassifierOrder(OlderOrder):
    """For `Classifier` and `VocabParallelClassifier`."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        weight: torch.nn.Parameter | None = None,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        weight_initializer: Fill = None,
        bias_initializer: Fill = None,
        **options: Any,
    ) -> None:
        given = {"weight_initializer": weight_initializer, "bias_initializer": bias_initializer}
        self._build_layer(in_features, num_classes, weight, bias, dtype, **given, **options)


class PatchOrder(OlderOrder):
    """For `PatchEmbedding`."""

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        in_chans: int,
        embed_size: int,
        flatten: bool = True,
        dtype: torch.dtype | None = None,
        weight_initializer: Fill = None,
        bias_initializer: Fill = None,
        position_embed_initializer: Fill = None,
        **options: Any,
    ) -> None:
        given = {
            "weight_initializer": weight_initializer,
            "bias_initializer": bias_initializer,
            "position_embed_initializer": position_embed_initializer,
        }
        self._build_layer(img_size, patch_size, in_chans, embed_size, flatten, dtype, **given, **options)


class DropoutOrder(OlderOrder):
    """For `Dropout`."""

    def __init__(self, p: float = 0.5, inplace: bool = False, **options: Any) -> None:
        self._build_layer(p, inplace, **options)


class LossOrder(OlderOrder):
    """For `CrossEntropyLoss` and `VocabParallelCrossEntropyLoss`, whose reduction stands first: a mean, or none."""

    def __init__(self, reduction: bool | str = True, **options: Any) -> None:
        words = {True: "mean", False: "none"}
        self._build_layer(reduction=words[reduction] if isinstance(reduction, bool) else reduction, **options)


class MetricOrder(OlderOrder):
    """For `Accuracy`."""

    def __init__(self, **options: Any) -> None:
        self._build_layer(**options)


def _layer_of(kind: type) -> type:
    """The class of today among the bases of a class."""
    return next(base for base in kind.__mro__[1:] if not issubclass(base, OlderOrder))
