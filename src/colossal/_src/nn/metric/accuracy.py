"""How many tokens have their class found, over all ranks of the tp axis."""

import torch

from colossal._src.cluster import Axis, ParallelMesh
from colossal._src.comm import Channel, chunk_bounds
from colossal._src.nn.layer.tp.sharding import find_mesh, tp_sharding_of
from colossal._src.nn.loss.cross_entropy import local_targets

_IGNORED = -100  # as of torch's cross_entropy


class Accuracy:
    """Counts how many of all ranks' tokens have their largest logit at their target, on the ambient mesh.

    The counts of batches add up, whatever their sizes; divide the sum by the number of targets.

    Args:
        vocab_parallel: Whether the classes are sharded, as `VocabParallelClassifier` returns them.
        mesh: The mesh; the ambient one by default.

    Communication: on a grid all_reduce, its token axes, 8 bytes; for sharded classes all_gather along tp or the feature
    axis, 16 bytes for each token and rank, and 8 for each rank.

    Example:
        >>> import torch
        >>> from colossal.nn import Accuracy
        >>> logits, targets = torch.tensor([[0.1, 0.9], [0.2, 0.8]]), torch.tensor([1, 0])
        >>> right = Accuracy()(logits, targets)
        >>> right, right / len(targets)
        (tensor(1), tensor(0.5000))
    """

    def __init__(self, *, vocab_parallel: bool = False, mesh: ParallelMesh | None = None) -> None:
        self.vocab_parallel, self.mesh = vocab_parallel, find_mesh(mesh)

    @torch.no_grad()
    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Count the right predictions.

        Args:
            logits: This rank's tokens, (tokens, ..., classes).
            targets: Their classes, (tokens, ...), split as by `colossal.nn.split_input`; or those of all ranks' tokens,
                which are split here.

        Returns:
            The number of right ones among all ranks' tokens, an int64 scalar. A target of -100 is never right.

        Raises:
            ShapeError: The targets do not fit the logits.
        """
        targets = local_targets(logits, targets, self.mesh)
        return self._sum((self._find(logits) == targets).sum())

    @torch.no_grad()
    def count_targets(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Count the targets of which some may be right: the number by which the count of a call is divided.

        Args:
            logits: As of a call.
            targets: As of a call.

        Returns:
            The number of targets of all ranks' tokens that are not -100, an int64 scalar.

        Raises:
            ShapeError: The targets do not fit the logits.

        Communication: on a grid all_reduce, its token axes, 8 bytes.
        """
        return self._sum((local_targets(logits, targets, self.mesh) != _IGNORED).sum())

    def _sum(self, number: torch.Tensor) -> torch.Tensor:
        """Add up over the ranks that have other tokens."""
        for axis in tp_sharding_of(self.mesh).tokens:
            assert self.mesh is not None
            number = Channel(axis, self.mesh).all_reduce(number)
        return number

    def _find(self, logits: torch.Tensor) -> torch.Tensor:
        """The class of the largest logit of each token; of equal ones the first."""
        if self.mesh is None or not self.vocab_parallel:
            return logits.argmax(-1)
        axes: tuple[Axis, ...] = tp_sharding_of(self.mesh).features or tp_sharding_of(self.mesh).vocabulary
        channel = Channel(axes[0], self.mesh)
        here = logits.shape[-1]
        first = chunk_bounds(sum(channel.lengths(here)), channel.size, channel.rank)[0]
        if here:
            largest, at = logits.max(-1)
        else:
            largest = logits.new_full(logits.shape[:-1], -torch.inf)
            at = torch.zeros_like(largest, dtype=torch.int64)
        found = torch.stack([largest.double(), (first + at).double()])  # exact for any number of classes
        values, classes = channel.all_gather(found[None], 0).unbind(1)
        return classes.gather(0, values.argmax(0, keepdim=True))[0].long()
