"""Initializers by the names of `torch.nn.init`, which take the fans of a layer.

Each function returns one that fills a tensor in place, as the layers of `colossal.nn` call it: with the full tensor and
the fans of the layer, whichever shard a rank keeps. The variance for a bias, which has one dimension, follows from
`fan_in` alone.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch.nn import init

from colossal.errors import ConfigError

_TRUNCATED_STD = 0.87962566103423978  # of a standard normal distribution, truncated at two standard deviations


FanInitializer = Callable[..., torch.Tensor]
"""Fills a tensor in place, and returns it: `f(tensor, fan_in=None, fan_out=None)`."""


def zeros_() -> FanInitializer:
    """Fill with zeros.

    Returns:
        The initializer.

    Example:
        >>> import torch
        >>> from colossal.legacy.nn.init import zeros_
        >>> weight = torch.empty(2, 4)
        >>> zeros_()(weight, fan_in=4, fan_out=2) is weight
        True
    """
    return _ignoring_fans(init.zeros_)


def ones_() -> FanInitializer:
    """Fill with ones.

    Returns:
        The initializer.

    Example:
        >>> import torch
        >>> from colossal.legacy.nn.init import ones_
        >>> weight = torch.empty(2, 4)
        >>> ones_()(weight, fan_in=4, fan_out=2) is weight
        True
    """
    return _ignoring_fans(init.ones_)


def uniform_(a: float = 0.0, b: float = 1.0) -> FanInitializer:
    """Draw from a uniform distribution.

    Args:
        a: The lower bound.
        b: The upper bound.

    Returns:
        The initializer.

    Example:
        >>> import torch
        >>> from colossal.legacy.nn.init import uniform_
        >>> weight = torch.empty(2, 4)
        >>> uniform_(0.0, 1.0)(weight, fan_in=4, fan_out=2) is weight
        True
    """
    return _ignoring_fans(lambda tensor: init.uniform_(tensor, a, b))


def normal_(mean: float = 0.0, std: float = 1.0) -> FanInitializer:
    """Draw from a normal distribution.

    Args:
        mean: Its mean.
        std: Its standard deviation.

    Returns:
        The initializer.

    Example:
        >>> import torch
        >>> from colossal.legacy.nn.init import normal_
        >>> weight = torch.empty(2, 4)
        >>> normal_()(weight, fan_in=4, fan_out=2) is weight
        True
    """
    return _ignoring_fans(lambda tensor: init.normal_(tensor, mean, std))


def trunc_normal_(mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0) -> FanInitializer:
    """Draw from a normal distribution that is truncated.

    Args:
        mean: Its mean before it is truncated.
        std: Its standard deviation before it is truncated.
        a: The lower bound.
        b: The upper bound.

    Returns:
        The initializer.

    Example:
        >>> import torch
        >>> from colossal.legacy.nn.init import trunc_normal_
        >>> weight = torch.empty(2, 4)
        >>> trunc_normal_()(weight, fan_in=4, fan_out=2) is weight
        True
    """
    return _ignoring_fans(lambda tensor: init.trunc_normal_(tensor, mean, std, a, b))


FanMode = Literal["fan_in", "fan_out"]


def kaiming_uniform_(a: float = 0.0, mode: FanMode = "fan_in", nonlinearity: str = "leaky_relu") -> FanInitializer:
    """Draw from the uniform distribution whose variance is gain^2 / fan.

    Args:
        a: Negative slope of a leaky ReLU.
        mode: The fan: ``"fan_in"`` keeps the variance of activations, ``"fan_out"`` that of gradients.
        nonlinearity: What follows the layer, by its name in `torch.nn.init.calculate_gain`.

    Returns:
        The initializer.

    Raises:
        ConfigError: There is no such mode; and where it is called, the fan is missing.

    Source: He et al., "Delving Deep into Rectifiers", 2015, https://arxiv.org/abs/1502.01852.

    Example:
        >>> import torch
        >>> from colossal.legacy.nn.init import kaiming_uniform_
        >>> weight = torch.empty(2, 4)
        >>> kaiming_uniform_()(weight, fan_in=4, fan_out=2) is weight
        True
    """
    std = _kaiming_std(a, mode, nonlinearity)
    return lambda tensor, fan_in=None, fan_out=None: _uniform(tensor, math.sqrt(3.0) * std(fan_in, fan_out))


def kaiming_normal_(a: float = 0.0, mode: FanMode = "fan_in", nonlinearity: str = "leaky_relu") -> FanInitializer:
    """Draw from the normal distribution whose variance is gain^2 / fan.

    Args:
        a: Negative slope of a leaky ReLU.
        mode: The fan: ``"fan_in"`` keeps the variance of activations, ``"fan_out"`` that of gradients.
        nonlinearity: What follows the layer, by its name in `torch.nn.init.calculate_gain`.

    Returns:
        The initializer.

    Raises:
        ConfigError: There is no such mode; and where it is called, the fan is missing.

    Source: He et al., "Delving Deep into Rectifiers", 2015, https://arxiv.org/abs/1502.01852.

    Example:
        >>> import torch
        >>> from colossal.legacy.nn.init import kaiming_normal_
        >>> weight = torch.empty(2, 4)
        >>> kaiming_normal_()(weight, fan_in=4, fan_out=2) is weight
        True
    """
    std = _kaiming_std(a, mode, nonlinearity)
    return lambda tensor, fan_in=None, fan_out=None: init.normal_(tensor, 0.0, std(fan_in, fan_out))


def xavier_uniform_(a: float = math.sqrt(3.0), scale: float = 2.0, gain: float = 1.0) -> FanInitializer:
    """Draw from the uniform distribution between -bound and bound, which is a * gain * sqrt(scale / (sum of the fans)).

    Args:
        a: Bounds in standard deviations.
        scale: Factor of the variance.
        gain: Factor of the standard deviation.

    Returns:
        The initializer.

    Raises:
        ConfigError: Where it is called, `fan_in` is missing.

    Source: Glorot, Bengio, "Understanding the difficulty of training deep feedforward neural networks", 2010,
    https://proceedings.mlr.press/v9/glorot10a.html.

    Example:
        >>> import torch
        >>> from colossal.legacy.nn.init import xavier_uniform_
        >>> weight = torch.empty(2, 4)
        >>> xavier_uniform_()(weight, fan_in=4, fan_out=2) is weight
        True
    """
    std = _xavier_std(scale, gain)
    return lambda tensor, fan_in=None, fan_out=None: _uniform(tensor, a * std(tensor, fan_in, fan_out))


def xavier_normal_(scale: float = 2.0, gain: float = 1.0) -> FanInitializer:
    """Draw from the normal distribution with the standard deviation gain * sqrt(scale / (sum of the fans)).

    Args:
        scale: Factor of the variance.
        gain: Factor of the standard deviation.

    Returns:
        The initializer.

    Raises:
        ConfigError: Where it is called, `fan_in` is missing.

    Source: Glorot, Bengio, "Understanding the difficulty of training deep feedforward neural networks", 2010,
    https://proceedings.mlr.press/v9/glorot10a.html.

    Example:
        >>> import torch
        >>> from colossal.legacy.nn.init import xavier_normal_
        >>> weight = torch.empty(2, 4)
        >>> xavier_normal_()(weight, fan_in=4, fan_out=2) is weight
        True
    """
    std = _xavier_std(scale, gain)
    return lambda tensor, fan_in=None, fan_out=None: init.normal_(tensor, 0.0, std(tensor, fan_in, fan_out))


def lecun_uniform_() -> FanInitializer:
    """Draw from the uniform distribution whose variance is 1 / fan_in.

    Returns:
        The initializer.

    Raises:
        ConfigError: Where it is called, `fan_in` is missing.

    Example:
        >>> import torch
        >>> from colossal.legacy.nn.init import lecun_uniform_
        >>> weight = torch.empty(2, 4)
        >>> lecun_uniform_()(weight, fan_in=4, fan_out=2) is weight
        True
    """

    def fill(tensor: torch.Tensor, fan_in: int | None = None, fan_out: int | None = None) -> torch.Tensor:
        del fan_out
        return _uniform(tensor, math.sqrt(3.0 / _given(fan_in, "fan_in")))

    return fill


def lecun_normal_() -> FanInitializer:
    """Draw from the normal distribution that, truncated at two standard deviations, has the variance 1 / fan_in.

    Returns:
        The initializer.

    Raises:
        ConfigError: Where it is called, `fan_in` is missing.

    Example:
        >>> import torch
        >>> from colossal.legacy.nn.init import lecun_normal_
        >>> weight = torch.empty(2, 4)
        >>> lecun_normal_()(weight, fan_in=4, fan_out=2) is weight
        True
    """

    def fill(tensor: torch.Tensor, fan_in: int | None = None, fan_out: int | None = None) -> torch.Tensor:
        del fan_out
        std = math.sqrt(1.0 / _given(fan_in, "fan_in")) / _TRUNCATED_STD
        return init.trunc_normal_(tensor, 0.0, std, -2.0 * std, 2.0 * std)

    return fill


def _ignoring_fans(fill: Callable[[torch.Tensor], torch.Tensor]) -> FanInitializer:
    def fill_tensor(tensor: torch.Tensor, fan_in: int | None = None, fan_out: int | None = None) -> torch.Tensor:
        del fan_in, fan_out
        return fill(tensor)

    return fill_tensor


def _uniform(tensor: torch.Tensor, bound: float) -> torch.Tensor:
    return init.uniform_(tensor, -bound, bound)


def _kaiming_std(a: float, mode: FanMode, nonlinearity: str) -> Callable[[int | None, int | None], float]:
    if mode not in ("fan_in", "fan_out"):
        raise ConfigError(f"The mode is the fan that counts: 'fan_in' or 'fan_out'. Found {mode!r}. Pass one of them.")
    gain = init.calculate_gain(nonlinearity, a)  # pyright: ignore[reportArgumentType] (torch lists the names)
    return lambda fan_in, fan_out: gain / math.sqrt(_given(fan_in if mode == "fan_in" else fan_out, mode))


def _xavier_std(scale: float, gain: float) -> Callable[[torch.Tensor, int | None, int | None], float]:
    def std(tensor: torch.Tensor, fan_in: int | None, fan_out: int | None) -> float:
        fans = _given(fan_in, "fan_in") + (0 if fan_out is None or tensor.dim() == 1 else fan_out)
        return gain * math.sqrt(scale / fans)

    return std


def _given(fan: int | None, name: str) -> int:
    if fan is None:
        raise ConfigError(f"This initializer needs {name}. Found none. Call it with the fans of the layer.")
    return fan
