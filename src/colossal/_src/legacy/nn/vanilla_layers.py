"""Layers of the older documentation that know nothing of tensor parallelism."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from colossal._src.cluster import ambient_mesh, set_ambient_mesh
from colossal._src.legacy.nn.older_order import ClassifierOrder, LinearOrder, NormOrder, PatchOrder
from colossal._src.nn.layer import Classifier, LayerNorm, Linear, PatchEmbedding, broadcast_rng_state


@final
class VanillaLinear(LinearOrder, Linear):
    """A linear layer that every rank has in full."""

    def __init__(self, *args: Any, **options: Any) -> None:
        with _without_mesh():
            super().__init__(*args, **options)


@final
class VanillaClassifier(ClassifierOrder, Classifier):
    """A classifier that every rank has in full."""

    def __init__(self, *args: Any, **options: Any) -> None:
        with _without_mesh():
            super().__init__(*args, **options)


@final
class VanillaPatchEmbedding(PatchOrder, PatchEmbedding):
    """Patches of images as tokens, which every rank has in full."""

    def __init__(self, *args: Any, **options: Any) -> None:
        with _without_mesh():
            super().__init__(*args, **options)


@final
class VanillaLayerNorm(NormOrder, LayerNorm):
    """A layer norm that every rank has in full."""

    def __init__(self, *args: Any, **options: Any) -> None:
        with _without_mesh():
            super().__init__(*args, **options)


@contextmanager
def _without_mesh() -> Iterator[None]:
    """Build a layer as if there was no mesh, with the same values on all ranks of a tp axis.

    Communication: broadcast, tp, the state of the random numbers.
    """
    mesh = ambient_mesh()
    broadcast_rng_state(mesh if mesh is not None and mesh.size("tp") > 1 else None)
    set_ambient_mesh(None)
    try:
        yield
    finally:
        set_ambient_mesh(mesh)
