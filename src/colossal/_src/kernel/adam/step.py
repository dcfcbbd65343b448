"""The numbers of one step of Adam."""

import math
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class AdamStep:
    """The hyperparameters of one step, the same for all its tensors.

    Args:
        step: The number of this step, from 1.
        lr: The learning rate.
        betas: The decay rates of the first and second moments.
        eps: Added to the root of the second moment.
        weight_decay: How much of the parameter is taken away (times `lr`), or added to the gradient.
        is_decoupled: The former, as in AdamW; if not the latter, as in Adam.
        bias_correction: Whether the moments are corrected for their initialization with zero.
        grad_scale: What the gradients are multiplied with: undoes a loss scale, and clips.

    Example:
        >>> from colossal.kernel import AdamStep
        >>> AdamStep(step=1, lr=0.5, betas=(0.5, 0.75)).step_size
        1.0
    """

    step: int
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    is_decoupled: bool = True
    bias_correction: bool = True
    grad_scale: float = 1.0

    @property
    def step_size(self) -> float:
        """The learning rate over the correction of the mean."""
        return self.lr / (1 - self.betas[0] ** self.step) if self.bias_correction else self.lr

    @property
    def root_of_correction(self) -> float:
        """The root of the correction of the mean of squares."""
        return math.sqrt(1 - self.betas[1] ** self.step) if self.bias_correction else 1.0
