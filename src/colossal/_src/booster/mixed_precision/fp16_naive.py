"""The entire model in float16, with float32 master weights in the optimizer."""

from typing import final

import torch
from torch import nn

from colossal._src.amp import (
    DynamicScaler,
    MasterWeights,
    ScalerConfig,
    cast_inputs_and_outputs,
    cast_model,
    castable_parameters,
)
from colossal._src.booster.mixed_precision.base import MixedPrecision
from colossal._src.interface import Criterion, Keywords, ModelWrapper, OptimizerWrapper


@final
class FP16NaiveMixedPrecision(MixedPrecision):
    """Casts the entire model to float16, and updates float32 master weights that the optimizer holds.

    Every operation of the model runs in float16; there is no autocast. Floating-point inputs are cast on the way in,
    and outputs to float32 on the way out, so that a criterion computes in float32. Normalizations with running
    statistics, such as batch normalization, stay in float32, and so do buffers that the state dict does not hold.
    Other layers compute norms and softmax in float32 inside, as torch's kernels do, and return float16.

    Gradients accumulate in float16 in the model. Clipping, `step` and everything else that needs them unscaled moves
    them to the master weights: ``optimizer.parameters`` then have them, and ``model.parameters()`` have none.

    Args:
        log_num_zeros_in_grad: Log on rank 0, at each step, how many elements of the float16 gradients are exactly 0:
            many, and growing in number, are a sign of a scale that is too small.
        initial_scale: First loss scale; greater than 0.
        growth_factor: Factor of the scale after `growth_interval` steps without an overflow; greater than 1.
        backoff_factor: Factor of the scale after overflows; between 0 and 1.
        hysteresis: Number of overflows since the scale last grew that it takes until it falls.
        max_scale: The scale does not grow above it.
        verbose: Log each change of the scale on rank 0.
        growth_interval: Number of steps without an overflow after which the scale grows; at least 1.
        min_scale: The scale does not fall below it.

    Raises:
        ConfigError: A value is outside its range.

    Source: Micikevicius et al., "Mixed Precision Training", 2018, https://arxiv.org/abs/1710.03740.

    Example:
        >>> import torch
        >>> from colossal.booster import Booster
        >>> from colossal.booster.mixed_precision import FP16NaiveMixedPrecision
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> precision = FP16NaiveMixedPrecision(initial_scale=1024.0)
        >>> model, optimizer, *_ = Booster(device="cpu", mixed_precision=precision).boost(model, optimizer)
        >>> model(torch.ones(3, 2)).dtype, model.unwrap().weight.dtype, optimizer.parameters[0].dtype
        (torch.float32, torch.float16, torch.float32)
    """

    name = "fp16_naive"

    def __init__(
        self,
        log_num_zeros_in_grad: bool = False,
        initial_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        hysteresis: int = 2,
        max_scale: float | None = 2.0**32,
        verbose: bool | None = None,
        growth_interval: int = 1000,
        min_scale: float | None = 1.0,
    ) -> None:
        self._rule = Keywords("FP16NaiveMixedPrecision", locals()).read(ScalerConfig)
        self._log_zeros = log_num_zeros_in_grad
        self._verbose = bool(verbose)

    def configure(
        self, model: nn.Module, optimizer: OptimizerWrapper | None = None, criterion: Criterion | None = None
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Criterion | None]:
        """Cast the model in place, and put master weights into the optimizer.

        Args:
            model: The model, on its device.
            optimizer: The optimizer of the model's parameters.
            criterion: The loss function; left as it is.

        Returns:
            Model, optimizer and criterion; what was None stays None.
        """
        device_type = next((parameter.device.type for parameter in model.parameters()), "cpu")
        if optimizer is not None:
            masters = MasterWeights(
                optimizer.unwrap(), castable_parameters(model), torch.float16, log_zeros=self._log_zeros
            )
            scaler = DynamicScaler(self._rule, device_type, verbose=self._verbose)
            optimizer = OptimizerWrapper(optimizer.unwrap(), scaler, optimizer.param_names, masters)
        cast_model(model, torch.float16)
        wrapper = ModelWrapper(model)
        cast_inputs_and_outputs(wrapper, torch.float16)
        return wrapper, optimizer, criterion
