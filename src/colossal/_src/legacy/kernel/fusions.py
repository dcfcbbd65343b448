"""Biases, activations and dropout in one call, as older models write them; `torch.compile` fuses what is in a call."""

import torch
from torch.nn import functional

from colossal._src.legacy.notice import superseded


def bias_gelu_impl(input: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:  # noqa: A002 (the documented name)
    """Add a bias, and apply GELU by its tanh formula.

    Args:
        input: A tensor of any shape.
        bias: What is added to it; of a shape that broadcasts to that of `input`.

    Returns:
        A tensor of the shape of `input`.

    Example:
        >>> import torch
        >>> from colossal.legacy.kernel import bias_gelu_impl
        >>> bias_gelu_impl(torch.zeros(1), torch.ones(1))
        tensor([0.8412])
    """
    superseded("colossal.kernel.jit.bias_gelu_impl", 'gelu(input + bias, approximate="tanh"), under torch.compile')
    return functional.gelu(input + bias, approximate="tanh")


def bias_dropout_add_fused_train(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, prob: float
) -> torch.Tensor:
    """Add a bias, drop elements, and add a residual.

    Args:
        x: A tensor of any shape.
        bias: What is added to it before; of a shape that broadcasts to that of `x`.
        residual: What is added to it after; of the shape of `x`.
        prob: The probability that an element is dropped.

    Returns:
        A tensor of the shape of `x`.

    Example:
        >>> import torch
        >>> from colossal.legacy.kernel import bias_dropout_add_fused_train
        >>> bias_dropout_add_fused_train(torch.ones(1), torch.ones(1), torch.ones(1), 0.0)
        tensor([3.])
    """
    return _bias_dropout_add(x, bias, residual, prob, is_training=True)


def bias_dropout_add_fused_inference(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, prob: float
) -> torch.Tensor:
    """Add a bias and a residual, and drop nothing.

    Args:
        x: A tensor of any shape.
        bias: What is added to it; of a shape that broadcasts to that of `x`.
        residual: What is added to it; of the shape of `x`.
        prob: Not needed: nothing is dropped.

    Returns:
        A tensor of the shape of `x`.

    Example:
        >>> import torch
        >>> from colossal.legacy.kernel import bias_dropout_add_fused_inference
        >>> bias_dropout_add_fused_inference(torch.ones(1), torch.ones(1), torch.ones(1), 0.5)
        tensor([3.])
    """
    return _bias_dropout_add(x, bias, residual, prob, is_training=False)


def set_jit_fusion_options() -> None:
    """Say that there is nothing to set: `torch.compile` fuses without options.

    Example:
        >>> from colossal.legacy.kernel import set_jit_fusion_options
        >>> print(set_jit_fusion_options())
        None
    """
    superseded("colossal.kernel.jit.set_jit_fusion_options", "model.compile(), which has nothing to set")


def _bias_dropout_add(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, prob: float, *, is_training: bool
) -> torch.Tensor:
    name = "train" if is_training else "inference"
    superseded(
        f"colossal.kernel.jit.bias_dropout_add_fused_{name}", "residual + dropout(x + bias, p), under torch.compile"
    )
    return residual + functional.dropout(x + bias, p=prob, training=is_training)
