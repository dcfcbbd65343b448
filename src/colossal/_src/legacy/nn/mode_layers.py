"""Layers by the names that they have in each mode of tensor parallelism.

Each is the layer of `colossal.nn` whose name it begins with, takes its arguments in their older order, and rejects a
mesh of another mode. The name of a class says what it does; how its parameters are sharded, says that of its layer.
"""

from typing import Any, final

import torch

from colossal._src.legacy.nn.older_order import (
    ClassifierOrder,
    DropoutOrder,
    EmbeddingOrder,
    Fill,
    LinearOrder,
    LossOrder,
    MetricOrder,
    NormOrder,
    PatchOrder,
)
from colossal._src.nn.layer import (
    Classifier,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    PatchEmbedding,
    VocabParallelClassifier,
    VocabParallelEmbedding,
)
from colossal._src.nn.loss import CrossEntropyLoss, VocabParallelCrossEntropyLoss
from colossal._src.nn.metric import Accuracy


@final
class Linear1D(LinearOrder, Linear):
    """A linear layer on a 1D axis: column-parallel if it has more output than input features, else row-parallel."""

    mode = "1d"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        weight_initializer: Fill = None,
        bias_initializer: Fill = None,
        **options: Any,
    ) -> None:
        options |= {"weight_initializer": weight_initializer, "bias_initializer": bias_initializer}
        super().__init__(in_features, out_features, bias, dtype, skip_bias_add, gather_output=gather_output, **options)


@final
class Linear2D(LinearOrder, Linear):
    """A linear layer, on a 2D grid."""

    mode = "2d"


@final
class Linear2p5D(LinearOrder, Linear):
    """A linear layer, on a 2.5D grid."""

    mode = "2.5d"


@final
class Linear3D(LinearOrder, Linear):
    """A linear layer, on a 3D grid."""

    mode = "3d"


@final
class LayerNorm1D(NormOrder, LayerNorm):
    """A layer norm, on a 1D axis."""

    mode = "1d"


@final
class LayerNorm2D(NormOrder, LayerNorm):
    """A layer norm, on a 2D grid."""

    mode = "2d"


@final
class LayerNorm2p5D(NormOrder, LayerNorm):
    """A layer norm, on a 2.5D grid."""

    mode = "2.5d"


@final
class LayerNorm3D(NormOrder, LayerNorm):
    """A layer norm, on a 3D grid."""

    mode = "3d"
    default_eps = 1e-12


@final
class PatchEmbedding1D(PatchOrder, PatchEmbedding):
    """Patches of images as tokens, on a 1D axis."""

    mode = "1d"


@final
class PatchEmbedding2D(PatchOrder, PatchEmbedding):
    """Patches of images as tokens, on a 2D grid."""

    mode = "2d"


@final
class PatchEmbedding2p5D(PatchOrder, PatchEmbedding):
    """Patches of images as tokens, on a 2.5D grid."""

    mode = "2.5d"


@final
class PatchEmbedding3D(PatchOrder, PatchEmbedding):
    """Patches of images as tokens, on a 3D grid."""

    mode = "3d"


@final
class Embedding1D(EmbeddingOrder, Embedding):
    """An embedding whose features are sharded, on a 1D axis."""

    mode = "1d"


@final
class Embedding2D(EmbeddingOrder, Embedding):
    """An embedding whose features are sharded, on a 2D grid."""

    mode = "2d"


@final
class Embedding2p5D(EmbeddingOrder, Embedding):
    """An embedding whose features are sharded, on a 2.5D grid."""

    mode = "2.5d"


@final
class Embedding3D(EmbeddingOrder, Embedding):
    """An embedding whose features are sharded, on a 3D grid."""

    mode = "3d"


@final
class VocabParallelEmbedding1D(EmbeddingOrder, VocabParallelEmbedding):
    """An embedding whose rows are sharded, on a 1D axis."""

    mode = "1d"


@final
class VocabParallelEmbedding2D(EmbeddingOrder, VocabParallelEmbedding):
    """An embedding whose rows are sharded, on a 2D grid."""

    mode = "2d"


@final
class VocabParallelEmbedding2p5D(EmbeddingOrder, VocabParallelEmbedding):
    """An embedding whose rows are sharded, on a 2.5D grid."""

    mode = "2.5d"


@final
class VocabParallelEmbedding3D(EmbeddingOrder, VocabParallelEmbedding):
    """An embedding whose rows are sharded, on a 3D grid."""

    mode = "3d"


@final
class Classifier1D(ClassifierOrder, Classifier):
    """A classifier whose classes are replicated, on a 1D axis."""

    mode = "1d"


@final
class Classifier2D(ClassifierOrder, Classifier):
    """A classifier whose classes are replicated, on a 2D grid."""

    mode = "2d"


@final
class Classifier2p5D(ClassifierOrder, Classifier):
    """A classifier whose classes are replicated, on a 2.5D grid."""

    mode = "2.5d"


@final
class Classifier3D(ClassifierOrder, Classifier):
    """A classifier whose classes are replicated, on a 3D grid."""

    mode = "3d"


@final
class VocabParallelClassifier1D(ClassifierOrder, VocabParallelClassifier):
    """A classifier whose classes are sharded, on a 1D axis."""

    mode = "1d"


@final
class VocabParallelClassifier2D(ClassifierOrder, VocabParallelClassifier):
    """A classifier whose classes are sharded, on a 2D grid."""

    mode = "2d"


@final
class VocabParallelClassifier2p5D(ClassifierOrder, VocabParallelClassifier):
    """A classifier whose classes are sharded, on a 2.5D grid."""

    mode = "2.5d"


@final
class VocabParallelClassifier3D(ClassifierOrder, VocabParallelClassifier):
    """A classifier whose classes are sharded, on a 3D grid."""

    mode = "3d"


@final
class Dropout1D(DropoutOrder, Dropout):
    """Dropout, on a 1D axis."""

    mode = "1d"


@final
class CrossEntropyLoss1D(LossOrder, CrossEntropyLoss):
    """Cross-entropy of logits with all classes, on a 1D axis."""

    mode = "1d"


@final
class CrossEntropyLoss2D(LossOrder, CrossEntropyLoss):
    """Cross-entropy of logits with all classes, on a 2D grid."""

    mode = "2d"


@final
class CrossEntropyLoss2p5D(LossOrder, CrossEntropyLoss):
    """Cross-entropy of logits with all classes, on a 2.5D grid."""

    mode = "2.5d"


@final
class CrossEntropyLoss3D(LossOrder, CrossEntropyLoss):
    """Cross-entropy of logits with all classes, on a 3D grid."""

    mode = "3d"


@final
class VocabParallelCrossEntropyLoss1D(LossOrder, VocabParallelCrossEntropyLoss):
    """Cross-entropy of logits with sharded classes, on a 1D axis."""

    mode = "1d"


@final
class VocabParallelCrossEntropyLoss2D(LossOrder, VocabParallelCrossEntropyLoss):
    """Cross-entropy of logits with sharded classes, on a 2D grid."""

    mode = "2d"


@final
class VocabParallelCrossEntropyLoss2p5D(LossOrder, VocabParallelCrossEntropyLoss):
    """Cross-entropy of logits with sharded classes, on a 2.5D grid."""

    mode = "2.5d"


@final
class VocabParallelCrossEntropyLoss3D(LossOrder, VocabParallelCrossEntropyLoss):
    """Cross-entropy of logits with sharded classes, on a 3D grid."""

    mode = "3d"


@final
class Accuracy1D(MetricOrder, Accuracy):
    """How many predictions are right, on a 1D axis."""

    mode = "1d"


@final
class Accuracy2D(MetricOrder, Accuracy):
    """How many predictions are right, on a 2D grid."""

    mode = "2d"


@final
class Accuracy2p5D(MetricOrder, Accuracy):
    """How many predictions are right, on a 2.5D grid."""

    mode = "2.5d"


@final
class Accuracy3D(MetricOrder, Accuracy):
    """How many predictions are right, on a 3D grid."""

    mode = "3d"
