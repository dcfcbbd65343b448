"""The digits of scikit-learn, which a process reads once."""

from functools import cache
from typing import Any

from sklearn.datasets import load_digits


@cache
def digits() -> tuple[Any, Any]:
    """Images of shape (1797, 64), from 0 to 16, and their labels; not to be written to."""
    images, labels = load_digits(return_X_y=True)
    for array in (images, labels):
        array.setflags(write=False)
    return images, labels
