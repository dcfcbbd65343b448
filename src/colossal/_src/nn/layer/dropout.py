"""Dropout that is independent where activations are sharded, and equal where they are replicated."""

from typing import final

import torch
from torch.nn import functional

from colossal._src.cluster import Axis, ParallelMesh
from colossal._src.nn.layer.tp.parallel_layer import broadcast_rng_state
from colossal._src.nn.layer.tp.sharding import find_mesh, tp_sharding_of
from colossal.errors import ConfigError

_STRIDE = 0x9E3779B97F4A7C15  # odd, so that ranks get seeds of their own
_SEEDS = 2**63


class Dropout(torch.nn.Module):
    """Sets elements to zero at random, and scales the others up, on the ambient mesh.

    Every forward pass draws one number from the random stream that all ranks of the tp axis have in common (see
    `ParallelLayer`). The masks follow from it: on a grid, and in 1D for a parallel input, one for each rank; otherwise
    the same on all ranks of the axis. Data-parallel replicas always have their own. Recomputation draws the same number
    again.

    Args:
        p: The probability of zero.
        inplace: Overwrite the input.
        parallel_input: In 1D, whether the input is sharded along the tp axis, as that between a column-parallel and a
            row-parallel layer is.
        mesh: The mesh; the ambient one by default.

    Raises:
        ConfigError: `p` is no probability.

    Communication: when it is built, broadcast, tp, 5 KB of the state of the random numbers.

    Source: Srivastava et al., "Dropout", 2014, https://jmlr.org/papers/v15/srivastava14a.html.

    Example:
        >>> import torch
        >>> from colossal.nn import Dropout
        >>> Dropout(0.5)(torch.ones(1000)).unique().tolist()
        [0.0, 2.0]
    """

    def __init__(
        self, p: float = 0.5, inplace: bool = False, *, parallel_input: bool = False, mesh: ParallelMesh | None = None
    ) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ConfigError(f"The probability of dropout is between 0 and 1. Found p={p!r}. Pass such a number.")
        self.p, self.inplace, self.parallel_input, self.mesh = p, inplace, parallel_input, find_mesh(mesh)
        broadcast_rng_state(self.mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop elements of this rank's local shard of an activation, in training.

        Args:
            x: Any shape.

        Returns:
            The same shape.
        """
        if self.mesh is None or not self.training or self.p == 0.0:
            return functional.dropout(x, self.p, self.training, self.inplace)
        generator = torch.Generator(x.device).manual_seed(_draw_seed(self._stream()))
        keep = torch.empty_like(x).bernoulli_(1.0 - self.p, generator=generator)
        scale = keep.div_(1.0 - self.p) if self.p < 1.0 else keep
        return x.mul_(scale) if self.inplace else x * scale

    def _stream(self) -> int:
        assert self.mesh is not None
        is_sharded = bool(tp_sharding_of(self.mesh).features) or self.parallel_input
        return self.mesh.global_rank if is_sharded else self.mesh.ranks("tp")[0]

    def extra_repr(self) -> str:
        """Name the probability.

        Returns:
            What is printed between the parentheses.
        """
        return f"p={self.p}, inplace={self.inplace}, parallel_input={self.parallel_input}"


@final
class DropPath(torch.nn.Module):
    """Sets all that a residual branch adds to a sample to zero at random, and scales that of others up.

    The ranks that have a sample's features decide the same for it. As in `Dropout`, they draw one number in each
    forward pass.

    Args:
        drop_prob: The probability of zero; None for 0.
        mesh: The mesh; the ambient one by default.

    Raises:
        ConfigError: `drop_prob` is no probability.

    Communication: when it is built, broadcast, tp, 5 KB of the state of the random numbers.

    Source: Huang et al., "Deep Networks with Stochastic Depth", 2016, https://arxiv.org/abs/1603.09382.

    Example:
        >>> import torch
        >>> from colossal.nn import DropPath
        >>> dropped = DropPath(0.5)(torch.ones(1000, 3))
        >>> dropped.unique().tolist(), bool((dropped == dropped[:, :1]).all())
        ([0.0, 2.0], True)
    """

    def __init__(self, drop_prob: float | None = None, *, mesh: ParallelMesh | None = None) -> None:
        super().__init__()
        self.drop_prob = drop_prob or 0.0
        if not 0.0 <= self.drop_prob <= 1.0:
            raise ConfigError(
                f"The probability of a drop is between 0 and 1. Found drop_prob={drop_prob!r}. Pass such a number."
            )
        self.mesh = find_mesh(mesh)
        broadcast_rng_state(self.mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop samples of this rank's local shard of an activation, in training.

        Args:
            x: Samples first.

        Returns:
            The same shape.
        """
        if not self.training or self.drop_prob == 0.0:
            return x
        generator = None
        if self.mesh is not None:
            axes: tuple[Axis, ...] = tp_sharding_of(self.mesh).features or ("tp",)
            generator = torch.Generator(x.device).manual_seed(_draw_seed(self.mesh.ranks(*axes)[0]))
        keep_prob = 1.0 - self.drop_prob
        keep = x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(keep_prob, generator=generator)
        return x * (keep.div_(keep_prob) if keep_prob else keep)

    def extra_repr(self) -> str:
        """Name the probability.

        Returns:
            What is printed between the parentheses.
        """
        return f"drop_prob={self.drop_prob}"


def _draw_seed(stream: int) -> int:
    """Draw the seed of a mask, from the random stream that all ranks of the tp axis have in common."""
    drawn = int(torch.randint(_SEEDS - 1, (), device="cpu"))
    return (drawn + _STRIDE * (1 + stream)) % _SEEDS
