"""Parts that a model and its training loop are made of.

* Here: layers that follow the ambient mesh, and losses and figures of merit for what they put out.
* :mod:`colossal.nn.attention` - attention over sequences that are sharded.
* :mod:`colossal.nn.lr_scheduler` - learning-rate schedules that know how many steps the training has.
* :mod:`colossal.nn.optimizer` - optimizers, for full parameters and for shards of them.
"""

from colossal._src.nn import (
    Accuracy,
    Classifier,
    CrossEntropyLoss,
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
    VocabParallelCrossEntropyLoss,
    VocabParallelEmbedding,
    gather_output,
    split_input,
)
from colossal.nn import lr_scheduler as lr_scheduler
from colossal.nn import optimizer as optimizer

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
    "split_input",
]
