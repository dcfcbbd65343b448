"""Noise for the logits of a router."""

from dataclasses import dataclass
from typing import final

import torch


@final
@dataclass(frozen=True)
class GaussianNoise:
    """Adds noise of a normal distribution to the logits of a router in training.

    Args:
        std: Its standard deviation.

    Example:
        >>> import torch
        >>> from colossal.nn.moe import GaussianNoise, Router
        >>> router = Router(8, num_experts=4, top_k=1, noise=GaussianNoise(100.0))
        >>> len(set(router(torch.ones(100, 8)).chosen.flatten().tolist()))  # equal tokens go to all experts
        4
    """

    std: float

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Add noise.

        Args:
            logits: Any shape.

        Returns:
            The same shape.
        """
        return logits + self.std * torch.randn_like(logits)


@final
@dataclass(frozen=True)
class UniformNoise:
    """Multiplies the logits of a router by random numbers close to 1 in training, which is called jitter.

    Args:
        eps: By how much they differ from 1 at most.

    Example:
        >>> import torch
        >>> from colossal.nn.moe import UniformNoise
        >>> noisy = UniformNoise(0.01)(torch.ones(1000))
        >>> bool(0.99 <= noisy.min() < noisy.max() <= 1.01)
        True
    """

    eps: float = 1e-2

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Multiply by noise.

        Args:
            logits: Any shape.

        Returns:
            The same shape.
        """
        return logits * (1 + self.eps * (2 * torch.rand_like(logits) - 1))
