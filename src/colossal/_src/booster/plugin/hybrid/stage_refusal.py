"""What one stage of a pipeline refuses, and the others do not know of."""

from collections.abc import Iterator
from contextlib import contextmanager

from colossal._src.cluster import ParallelMesh
from colossal._src.comm import equal_text_on_all_ranks, gather_objects
from colossal.errors import ColossalError


@contextmanager
def refused_by_all_stages(mesh: ParallelMesh) -> Iterator[None]:
    """Raise on all stages what is refused on one, whose ranks the others would wait for.

    Communication: all_reduce, pp, 16 bytes; after an error also all_gather_object, of its message.
    """
    if mesh.size("pp") == 1:
        yield
        return
    error: ColossalError | None = None
    try:
        yield
    except ColossalError as refused:
        error = refused
    groups = [mesh.group("pp")]
    if not equal_text_on_all_ranks(repr(error), groups):
        errors = gather_objects(error, groups, "refuses a stage of a model")
        error = error or next(each for each in errors if each is not None)
    if error is not None:
        raise error
