"""From the mode of a config file to a precision of today, and from model, optimizer and criterion to converted ones."""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, final

import torch
from torch import nn

from colossal._src.booster.mixed_precision import (
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    FP32MixedPrecision,
    MixedPrecision,
)
from colossal._src.interface import Criterion, ModelWrapper, OptimizerWrapper, check_known
from colossal._src.legacy.notice import superseded
from colossal._src.legacy.utils.parallel_state import note_loss_scale
from colossal.errors import ConfigError

_TORCH_OPTIONS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
_APEX_OPTIONS = (
    "enabled", "opt_level", "cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights",
    "loss_scale", "cast_model_outputs", "num_losses", "verbosity", "min_loss_scale", "max_loss_scale",
)  # fmt: skip
_NAIVE_OPTIONS = (
    "log_num_zeros_in_grad", "initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval",
    "hysteresis", "max_scale", "verbose", "dynamic_grad_scale",
)  # fmt: skip
_NAIVE_CLIPPING = ("clip_grad_norm", "clip_grad")  # which the optimizer of this mode took, under both names
_NAIVE_DEFAULTS = {"initial_scale": 2.0**32, "max_scale": None}


@final
class AMP_TYPE(Enum):  # noqa: N801 (the documented name)
    """A mode of mixed precision in a config file: ``fp16=dict(mode=AMP_TYPE.TORCH)``.

    Attributes:
        TORCH: Autocast to float16 and a loss scale; ``mixed_precision="fp16"`` of a `Booster`.
        APEX: NVIDIA's apex, which must be installed; ``"fp16_apex"``.
        NAIVE: The entire model in float16, float32 master weights in the optimizer; ``"fp16_naive"``.

    Example:
        >>> from colossal.legacy.amp import AMP_TYPE
        >>> AMP_TYPE("naive") is AMP_TYPE.NAIVE
        True
    """

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"


class AMPOptimizer(OptimizerWrapper):
    """The optimizer of a conversion: that of today, with the older name of the clipping method.

    Args:
        scaled: The optimizer as a precision of today wraps it; only its scaler and its copies are used from here on.

    Example:
        >>> import torch
        >>> from colossal.interface import OptimizerWrapper
        >>> from colossal.legacy.amp import AMPOptimizer
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AMPOptimizer(OptimizerWrapper(torch.optim.SGD(model.parameters(), lr=0.1)))
        >>> optimizer.backward(model(torch.ones(3, 2)).sum())
        >>> optimizer.clip_grad_norm(model, max_norm=1.0) > 1.0
        True
    """

    def __init__(self, scaled: OptimizerWrapper) -> None:
        super().__init__(scaled.unwrap(), scaled.scaler, scaled.param_names, scaled.masters)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> float:  # noqa: ARG002 (the documented argument)
        """Scale all gradients by one factor so that their common norm is at most `max_norm`.

        Args:
            model: The converted model; the optimizer knows its parameters.
            max_norm: The largest norm that is left.

        Returns:
            The norm before clipping.

        Communication: as in `OptimizerWrapper.clip_grad_by_norm`.
        """
        return float(self.clip_grad_by_norm(max_norm))


@final
class _WithoutLossScaling(MixedPrecision):
    """Autocast to float16 whose loss is not scaled: ``enabled=False`` of the torch mode."""

    name = "fp16"

    def __init__(self, scaled: MixedPrecision) -> None:
        self._scaled = scaled

    def configure(
        self, model: nn.Module, optimizer: OptimizerWrapper | None = None, criterion: Criterion | None = None
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Criterion | None]:
        """Configure as with a loss scale, and leave the scale out."""
        wrapped, scaled, criterion = self._scaled.configure(model, optimizer, criterion)
        plain = None if scaled is None else OptimizerWrapper(scaled.unwrap(), param_names=scaled.param_names)
        return wrapped, plain, criterion


def _torch_precision(enabled: bool = True, **options: Any) -> MixedPrecision:
    precision = FP16TorchMixedPrecision(**options)
    return precision if enabled else _WithoutLossScaling(precision)


def _apex_precision(enabled: bool = True, **options: Any) -> MixedPrecision:
    return FP16ApexMixedPrecision(**options) if enabled else FP32MixedPrecision()


def _naive_precision(dynamic_grad_scale: bool = True, **options: Any) -> MixedPrecision:
    options = _NAIVE_DEFAULTS | options
    if not dynamic_grad_scale:
        options["min_scale"] = options["max_scale"] = options["initial_scale"]
    return FP16NaiveMixedPrecision(**options)


_PRECISIONS: Mapping[AMP_TYPE, tuple[Callable[..., MixedPrecision], tuple[str, ...]]] = {
    AMP_TYPE.TORCH: (_torch_precision, _TORCH_OPTIONS),
    AMP_TYPE.APEX: (_apex_precision, _APEX_OPTIONS),
    AMP_TYPE.NAIVE: (_naive_precision, _NAIVE_OPTIONS),
}


def mixed_precision_from(mode: AMP_TYPE, amp_config: Mapping[str, Any] | None = None) -> MixedPrecision:
    """Make the precision of a `Booster` that a mode of a config file means.

    Args:
        mode: The mode.
        amp_config: Its options, under the names of ``fp16=dict(mode=..., ...)``; the documented defaults hold for the
            others. ``enabled=False`` of the torch mode leaves out the loss scale, of the apex mode everything.

    Returns:
        A new object.

    Raises:
        ConfigError: There is no such mode or option, or a value is outside its range.
        UnsupportedError: The apex mode without apex.

    Example:
        >>> from colossal.legacy.amp import AMP_TYPE, mixed_precision_from
        >>> mixed_precision_from(AMP_TYPE.NAIVE, {"initial_scale": 1024}).name
        'fp16_naive'
    """
    if not isinstance(mode, AMP_TYPE):
        names = ", ".join(f"AMP_TYPE.{each.name}" for each in AMP_TYPE)
        raise ConfigError(f"The mode of mixed precision is one of {names}. Found {mode!r}. Pass one of them.")
    make, options = _PRECISIONS[mode]
    given = dict(amp_config or {})
    check_known(f"fp16=dict(mode=AMP_TYPE.{mode.name})", given, options)
    return make(**given)


def split_clipping(mode: AMP_TYPE | None, amp_config: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], float]:
    """Split the options of a mode into those of the precision, and the norm to which the naive mode clips gradients.

    Args:
        mode: The mode.
        amp_config: Its options.

    Returns:
        The other options, and the norm; 0 does not clip.

    Raises:
        ConfigError: Both names of the norm are given, with two values, or it is below 0.
    """
    options = dict(amp_config or {})
    if mode is not AMP_TYPE.NAIVE:
        return options, 0.0
    found = {options.pop(name) for name in _NAIVE_CLIPPING if name in options}
    if len(found) > 1 or any(norm < 0 for norm in found):
        raise ConfigError(
            f"fp16=dict(mode=AMP_TYPE.NAIVE) clips gradients to one norm of at least 0. Found {sorted(found)} as "
            "clip_grad_norm and clip_grad. Write one of them."
        )
    return options, float(next(iter(found), 0.0))


def convert_to_amp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Criterion | None,
    mode: AMP_TYPE,
    amp_config: Mapping[str, Any] | None = None,
) -> tuple[ModelWrapper, AMPOptimizer, Criterion | None]:
    """Convert a model, its optimizer and its criterion to mixed precision, without a `Booster`.

    Args:
        model: The model, on its device.
        optimizer: The optimizer of its parameters.
        criterion: The loss function; None where there is none.
        mode: The mode.
        amp_config: Options of the mode; see `mixed_precision_from`.

    Returns:
        The converted model, an optimizer with `backward`, `clip_grad_norm`, `step` and `zero_grad`, and the criterion.

    Raises:
        ConfigError: There is no such mode or option, or a value is outside its range.
        UnsupportedError: The apex mode without apex.

    Example:
        >>> import torch
        >>> from colossal.legacy.amp import AMP_TYPE, convert_to_amp
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer, criterion = convert_to_amp(model, optimizer, torch.nn.MSELoss(), AMP_TYPE.TORCH)
        >>> model(torch.ones(3, 2)).dtype
        torch.float16
    """
    options, max_norm = split_clipping(mode, amp_config)
    precision = mixed_precision_from(mode, options)
    superseded("colossal.amp.convert_to_amp", f"Booster(mixed_precision={precision.name!r}).boost(model, optimizer)")
    names = {parameter: name for name, parameter in model.named_parameters()}
    wrapper = OptimizerWrapper(optimizer, param_names=names)
    converted, scaled, criterion = precision.configure(model, wrapper, criterion)
    assert scaled is not None
    own = AMPOptimizer(scaled)
    if max_norm > 0:
        own.set_max_norm(max_norm)
    note_loss_scale(own)
    return converted, own, criterion


def convert_to_torch_amp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Criterion | None = None,
    amp_config: Mapping[str, Any] | None = None,
) -> tuple[ModelWrapper, AMPOptimizer, Criterion | None]:
    """Convert to autocast with a loss scale.

    Args:
        model: The model, on its device.
        optimizer: The optimizer of its parameters.
        criterion: The loss function; None where there is none.
        amp_config: Any of ``init_scale=2**16``, ``growth_factor=2.0``, ``backoff_factor=0.5``,
            ``growth_interval=2000`` and ``enabled=True``; without the last the loss is not scaled.

    Returns:
        The converted model, optimizer and criterion.

    Raises:
        ConfigError: There is no such option, or a value is outside its range.

    Example:
        >>> import torch
        >>> from colossal.legacy.amp import convert_to_torch_amp
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> _, optimizer, _ = convert_to_torch_amp(model, optimizer, amp_config={"init_scale": 512.0})
        >>> optimizer.scale_loss(torch.tensor(0.5)).item()
        256.0
    """
    return convert_to_amp(model, optimizer, criterion, AMP_TYPE.TORCH, amp_config)


def convert_to_naive_amp(
    model: nn.Module, optimizer: torch.optim.Optimizer, amp_config: Mapping[str, Any] | None = None
) -> tuple[ModelWrapper, AMPOptimizer]:
    """Convert to a model entirely in float16, with float32 master weights in the optimizer.

    Args:
        model: The model, on its device.
        optimizer: The optimizer of its parameters.
        amp_config: Any of ``log_num_zeros_in_grad=False``, ``initial_scale=2**32``, ``min_scale=1``,
            ``growth_factor=2``, ``backoff_factor=0.5``, ``growth_interval=1000``, ``hysteresis=2``,
            ``max_scale=None``, ``verbose=False``, ``clip_grad_norm=0`` (also ``clip_grad``), to which each step clips
            the norm of the gradients, and ``dynamic_grad_scale=True``; without the last the scale stays.

    Returns:
        The converted model and optimizer.

    Raises:
        ConfigError: There is no such option, or a value is outside its range.

    Example:
        >>> import torch
        >>> from colossal.legacy.amp import convert_to_naive_amp
        >>> model = torch.nn.Linear(2, 1)
        >>> model, optimizer = convert_to_naive_amp(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> optimizer.scaler.scale_value == 2.0**32, model.unwrap().weight.dtype
        (True, torch.float16)
    """
    converted, scaled, _ = convert_to_amp(model, optimizer, None, AMP_TYPE.NAIVE, amp_config)
    return converted, scaled


def convert_to_apex_amp(
    model: nn.Module, optimizer: torch.optim.Optimizer, amp_config: Mapping[str, Any] | None = None
) -> tuple[ModelWrapper, AMPOptimizer]:
    """Convert by NVIDIA's apex, which must be installed.

    Args:
        model: The model, on its device.
        optimizer: The optimizer of its parameters.
        amp_config: ``enabled=True`` and the arguments of `FP16ApexMixedPrecision`; without the first nothing is
            converted.

    Returns:
        The converted model and optimizer.

    Raises:
        ConfigError: There is no such option, or a value is outside its range.
        UnsupportedError: apex is not installed.

    Example:
        >>> import torch
        >>> from colossal.legacy.amp import convert_to_apex_amp
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = convert_to_apex_amp(model, optimizer, {"enabled": False})
        >>> model(torch.ones(3, 2)).dtype
        torch.float32
    """
    converted, scaled, _ = convert_to_amp(model, optimizer, None, AMP_TYPE.APEX, amp_config)
    return converted, scaled
