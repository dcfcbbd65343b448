"""Layers that follow the ambient mesh: the same model runs on one rank, and in every mode of the tp axis."""

from colossal._src.nn.layer.classifier import Classifier, VocabParallelClassifier
from colossal._src.nn.layer.dropout import Dropout, DropPath
from colossal._src.nn.layer.embedding import Embedding, VocabParallelEmbedding
from colossal._src.nn.layer.linear import Linear, Linear1D_Col, Linear1D_Row, Linear2D, Linear2p5D, Linear3D
from colossal._src.nn.layer.norm import LayerNorm, RMSNorm
from colossal._src.nn.layer.patch import PatchEmbedding
from colossal._src.nn.layer.tp import ParallelLayer, broadcast_rng_state, gather_output, split_input

__all__ = [
    "Classifier",
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
    "VocabParallelEmbedding",
    "broadcast_rng_state",
    "gather_output",
    "split_input",
]
