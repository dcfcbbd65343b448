"""Layers, losses and metrics that follow the ambient mesh.

Learning-rate schedules are in :mod:`colossal.nn.lr_scheduler`, optimizers in :mod:`colossal.nn.optimizer`.
"""

from colossal._src.nn.layer import (
    Classifier,
    Dropout,
    DropPath,
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
from colossal.nn import lr_scheduler as lr_scheduler
from colossal.nn import optimizer as optimizer

__all__ = [
    "Accuracy",
    "Classifier",
    "CrossEntropyLoss",
    "DropPath",
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
