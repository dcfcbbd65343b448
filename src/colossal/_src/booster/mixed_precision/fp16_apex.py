"""Half precision by NVIDIA's apex, where it is installed."""

import importlib
from typing import Any, final

import torch
from torch import nn

from colossal._src.booster.mixed_precision.base import MixedPrecision
from colossal._src.interface import Criterion, ModelWrapper, OptimizerWrapper
from colossal.errors import ConfigError, UnsupportedError

_LEVELS = ("O0", "O1", "O2", "O3")


@final
class FP16ApexMixedPrecision(MixedPrecision):
    """Hands model and optimizer to ``apex.amp``, and drives its loss scaler.

    apex unscales gradients after each backward pass. Under data parallelism they must be reduced by then, so that
    inside of `no_sync` they are reduced as well: more communication, the same gradients.

    Args:
        opt_level: ``"O0"`` float32, ``"O1"`` patched functions, ``"O2"`` a float16 model with float32 master weights,
            ``"O3"`` float16.
        cast_model_type: What the model is cast to, instead of what the level says; as all that follow.
        patch_torch_functions: Patch torch's functions to cast their arguments.
        keep_batchnorm_fp32: Keep batch normalization in float32.
        master_weights: Keep float32 master weights.
        loss_scale: A constant scale, or ``"dynamic"``.
        cast_model_outputs: What outputs are cast to.
        num_losses: How many losses there are, which must be 1.
        verbosity: How much apex prints; 0 for nothing.
        min_loss_scale: The scale does not fall below it.
        max_loss_scale: The scale does not grow above it.

    Raises:
        UnsupportedError: apex is not installed, or `num_losses` is not 1.
        ConfigError: There is no such level.

    Example:
        >>> from colossal.booster.mixed_precision import FP16ApexMixedPrecision
        >>> from colossal.errors import ConfigError
        >>> try:
        ...     FP16ApexMixedPrecision(opt_level="O4")
        ... except ConfigError as error:
        ...     print(error)
        An optimization level of apex is one of O0, O1, O2, O3. Found opt_level='O4'. The default is 'O1'.
    """

    name = "fp16_apex"
    accumulates_locally = False

    def __init__(
        self,
        opt_level: str = "O1",
        cast_model_type: torch.dtype | None = None,
        patch_torch_functions: bool | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | None = None,
        loss_scale: float | str | None = None,
        cast_model_outputs: torch.dtype | None = None,
        num_losses: int = 1,
        verbosity: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        if opt_level not in _LEVELS:
            raise ConfigError(
                f"An optimization level of apex is one of {', '.join(_LEVELS)}. Found opt_level={opt_level!r}. "
                "The default is 'O1'."
            )
        if num_losses != 1:
            raise UnsupportedError(
                f"Booster.backward takes one loss, with one scale. Found num_losses={num_losses}. Leave it 1, and "
                "add the losses up."
            )
        # the arguments of `apex.amp.initialize`
        self._options: dict[str, Any] = {
            "opt_level": opt_level,
            "cast_model_type": cast_model_type,
            "patch_torch_functions": patch_torch_functions,
            "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights,
            "loss_scale": loss_scale,
            "cast_model_outputs": cast_model_outputs,
            "num_losses": num_losses,
            "verbosity": verbosity,
            "min_loss_scale": min_loss_scale,
            "max_loss_scale": max_loss_scale,
        }
        self._amp = _import_apex()

    def configure(
        self, model: nn.Module, optimizer: OptimizerWrapper | None = None, criterion: Criterion | None = None
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Criterion | None]:
        """Let apex change model and optimizer.

        Args:
            model: The model, on its device.
            optimizer: The optimizer of the model's parameters.
            criterion: The loss function; left as it is: apex patches what it calls, or casts the outputs.

        Returns:
            Model, optimizer and criterion; what was None stays None.
        """
        if optimizer is None:
            return ModelWrapper(self._amp.initialize(model, **self._options)), None, criterion
        from colossal._src.amp import ApexScaler

        names = [optimizer.param_names.get(parameter) for parameter in optimizer.parameters]
        model, optim = self._amp.initialize(model, optimizer.unwrap(), **self._options)
        # apex puts master weights in place of the parameters.
        masters = [parameter for group in optim.param_groups for parameter in group["params"]]
        named = {master: name for master, name in zip(masters, names, strict=True) if name is not None}
        return ModelWrapper(model), OptimizerWrapper(optim, ApexScaler(self._amp), param_names=named), criterion


def _import_apex() -> Any:
    try:
        return importlib.import_module("apex.amp")
    except ImportError as error:
        raise UnsupportedError(
            f"mixed_precision='fp16_apex' needs NVIDIA's apex with apex.amp. Found none: {error}. Pass "
            "mixed_precision='fp16', which does the same with torch alone, or build apex from its repository."
        ) from error
