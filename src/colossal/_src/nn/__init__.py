"""Parts that a model and its training loop are made of.

* :mod:`colossal._src.nn.layer` - layers that follow the ambient mesh; their names are here as well.
* :mod:`colossal._src.nn.loss` and :mod:`colossal._src.nn.metric` - losses and figures of merit for what they put out.
* :mod:`colossal.nn.lr_scheduler` - learning-rate schedules that know how many steps the training has.
* :mod:`colossal.nn.optimizer` - optimizers, for full parameters and for shards of them.
"""

from colossal._src.nn import layer, loss, lr_scheduler, metric, optimizer
from colossal._src.nn.layer import (
    Classifier,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    Linear1D_Col,
    Linear1D_Row,
    Linear2D,
    Linear2p5D,
    Linear3D,
    ParallelLayer,
    PatchEmbedding,
    RMSNorm,
    VocabParallelClassifier,
    VocabParallelEmbedding,
    gather_output,
    split_input,
)
from colossal._src.nn.loss import CrossEntropyLoss, VocabParallelCrossEntropyLoss
from colossal._src.nn.metric import Accuracy

__all__ = [
    "Accuracy",
    "Classifier",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Linear1D_Col",
    "Linear1D_Row",
    "Linear2D",
    "Linear2p5D",
    "Linear3D",
    "ParallelLayer",
    "PatchEmbedding",
    "RMSNorm",
    "VocabParallelClassifier",
    "VocabParallelCrossEntropyLoss",
    "VocabParallelEmbedding",
    "gather_output",
    "layer",
    "loss",
    "lr_scheduler",
    "metric",
    "optimizer",
    "split_input",
]
