"""Layers of the older documentation that know nothing of tensor parallelism."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from colossal._src.cluster import ambient_mesh, set_ambient_mesh
from colossal._src.legacy.nn.older_order import ClassifierOrder, LinearOrder, NormOrder, PatchOrder
from colossal._src.nn.layer import Classifier, LayerNorm, Linear, PatchEmbedding
from colossal.errors import MeshError


@final
class VanillaLinear(LinearOrder, Linear):
    """A linear layer of one rank."""

    def __init__(self, *args: Any, **options: Any) -> None:
        with _without_mesh("Linear"):
            super().__init__(*args, **options)


@final
class VanillaClassifier(ClassifierOrder, Classifier):
    """A classifier of one rank."""

    def __init__(self, *args: Any, **options: Any) -> None:
        with _without_mesh("Classifier"):
            super().__init__(*args, **options)


@final
class VanillaPatchEmbedding(PatchOrder, PatchEmbedding):
    """Patches of images as tokens, on one rank."""

    def __init__(self, *args: Any, **options: Any) -> None:
        with _without_mesh("PatchEmbedding"):
            super().__init__(*args, **options)


@final
class VanillaLayerNorm(NormOrder, LayerNorm):
    """A layer norm of one rank."""

    def __init__(self, *args: Any, **options: Any) -> None:
        with _without_mesh("LayerNorm"):
            super().__init__(*args, **options)


@contextmanager
def _without_mesh(layer: str) -> Iterator[None]:
    """Build a layer as if there was no mesh; reject one whose tp axis has several ranks."""
    mesh = ambient_mesh()
    if mesh is not None and mesh.size("tp") > 1:
        raise MeshError(
            f"Vanilla{layer} is a layer without tensor parallelism. Found {mesh}. Use colossal.nn.{layer}, which "
            "follows the mesh."
        )
    set_ambient_mesh(None)
    try:
        yield
    finally:
        set_ambient_mesh(mesh)
