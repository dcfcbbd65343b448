"""ZeRO without a Booster: two functions that wrap a model and its optimizer."""

from dataclasses import fields
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer

from colossal._src.amp import DynamicScaler, ScalerConfig
from colossal._src.cluster import current_mesh
from colossal._src.comm import end_graphs_in
from colossal._src.interface import Clipping, Keywords, ModelWrapper, OptimizerWrapper, check_known, keywords_for
from colossal._src.tensor import broadcast_values, local_operations
from colossal._src.zero.low_level import shard_optimizer
from colossal._src.zero.partitions import Partitions
from colossal._src.zero.zero_config import ZeroConfig
from colossal.errors import ConfigError

end_graphs_in(__name__)  # what was written is looked up in each pass, also of a compiled model

_GEMINI = 3
_STAGE = "_colossal_zero_stage"
_ARGUMENTS = (
    "initial_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis", "min_scale", "max_scale",
    "max_norm", "norm_type",
)  # fmt: skip
_KNOWN = (
    "reduce_bucket_size",
    "verbose",
    *_ARGUMENTS,
    *(field.name for field in fields(ZeroConfig) if field.name != "stage"),
)

# apart from the models, whose copies and files would otherwise contain it
_OPTIMIZERS: "WeakKeyDictionary[nn.Module, ref[OptimizerWrapper]]" = WeakKeyDictionary()


def zero_model_wrapper(
    model: nn.Module, zero_stage: int = 1, gemini_config: dict[str, Any] | None = None, verbose: bool = False
) -> nn.Module:
    """Prepare a model for `zero_optim_wrapper`: all data-parallel ranks get the values of the first one.

    Args:
        model: In the dtype that it shall run in, on its device.
        zero_stage: 1 shards optimizer states over the ranks of the dp axis, 2 gradients too, 3 parameters as well.
        gemini_config: Of stage 3: arguments of `colossal.zero.gemini.GeminiDDP`.
        verbose: Log the chunk configuration of stage 3; stages 1 and 2 prepare a model without a choice to log.

    Returns:
        The same model; for stage 3, a `GeminiDDP` around it.

    Raises:
        ConfigError: There is no such stage, or `gemini_config` is given for another.
        UnsupportedError: Stage 3 does not support an option, or a parameter or module of the model.
        MeshError: There is no process group yet.

    Communication: broadcast, dp, the model's bytes.

    Example:
        >>> import torch
        >>> from colossal.testing import fake_world
        >>> from colossal.zero import zero_model_wrapper, zero_optim_wrapper
        >>> with fake_world(2):
        ...     model = zero_model_wrapper(torch.nn.Linear(4, 3, bias=False), zero_stage=2)
        ...     optimizer = zero_optim_wrapper(model, torch.optim.AdamW(model.parameters()))
        >>> optimizer.parameters[0].shape
        torch.Size([6])
    """
    if zero_stage == _GEMINI:
        from colossal._src.zero.gemini.gemini_ddp import GeminiDDP

        return GeminiDDP(model, **{"verbose": verbose, **(gemini_config or {})})
    stage = ZeroConfig(stage=zero_stage).stage
    if gemini_config:
        raise ConfigError(
            f"gemini_config belongs to stage 3. Found {gemini_config} with zero_stage={zero_stage}. Leave it out, or "
            "pass zero_stage=3."
        )
    broadcast_values((*model.parameters(), *model.buffers()), current_mesh())
    setattr(model, _STAGE, stage)
    return model


def zero_optim_wrapper(
    model: nn.Module,
    optimizer: Optimizer,
    initial_scale: float = 2**16,
    growth_factor: float = 2,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
    min_scale: float = 1,
    max_scale: float = 2**32,
    max_norm: float = 0.0,
    norm_type: float = 2.0,
    optim_config: dict[str, Any] | None = None,
    verbose: bool = False,
) -> OptimizerWrapper:
    """Let an optimizer update this rank's shards of a model's parameters.

    Args:
        model: What `zero_model_wrapper` returned.
        optimizer: Of its parameters; changed in place.
        initial_scale: First loss scale; greater than 0. The loss is scaled if a parameter is in float16.
        growth_factor: Factor of the scale after `growth_interval` steps without an overflow; greater than 1.
        backoff_factor: Factor of the scale after overflows; between 0 and 1.
        growth_interval: Number of steps without an overflow after which the scale grows; at least 1.
        hysteresis: Number of overflows since the scale last grew that it takes until it falls.
        min_scale: The scale does not fall below it.
        max_scale: The scale does not grow above it.
        max_norm: Clip the common norm of the gradients to it before each step; 0 does not.
        norm_type: The p of that norm.
        optim_config: For stages 1 and 2: ``reduce_bucket_size`` (in elements), ``communication_dtype``,
            ``overlap_communication``, ``overlap_allgather``, ``cpu_offload`` and ``master_weights``. For each stage:
            ``verbose``, and any of the arguments from `initial_scale` to `norm_type`, once.
        verbose: Log each change of the loss scale on rank 0; here or in `optim_config`.

    Returns:
        The optimizer, wrapped: call its ``backward(loss)``, ``step()`` and ``zero_grad()``.

    Raises:
        ConfigError: The model did not come from `zero_model_wrapper`, or an option is unknown, outside its range, or
            given twice with two values.
        UnsupportedError: The optimizer or the model does not support shards.

    Communication: none; that of a step is the plugin's.

    Example:
        >>> import torch
        >>> from colossal.testing import fake_world
        >>> from colossal.zero import zero_model_wrapper, zero_optim_wrapper
        >>> with fake_world(2):
        ...     model = zero_model_wrapper(torch.nn.Linear(2, 2).half())
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     optimizer = zero_optim_wrapper(model, optimizer, initial_scale=8, max_norm=1.0)
        >>> optimizer.scale_loss(torch.tensor(1.0)).item()
        8.0
    """
    given = dict(locals())
    config = dict(optim_config or {})
    check_known("optim_config", config, _KNOWN)
    given["verbose"] = config.pop("verbose", False) or verbose
    given |= _arguments_in(config, given)
    wrap = _over_chunks if isinstance(model, ModelWrapper) else _over_buckets  # a GeminiDDP, or the user's own model
    return wrap(model, optimizer, given, config)


def _arguments_in(config: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments of `zero_optim_wrapper` out of its `optim_config`."""
    found = {name: config.pop(name) for name in _ARGUMENTS if name in config}
    defaults = signature(zero_optim_wrapper).parameters
    for name, value in found.items():
        if given[name] not in (value, defaults[name].default):
            raise ConfigError(
                f"An option of zero_optim_wrapper has one value. Found {name}={given[name]}, and {value} in "
                "optim_config. Leave one of them out."
            )
    return found


def _over_buckets(
    model: nn.Module, optimizer: Optimizer, given: dict[str, Any], config: dict[str, Any]
) -> OptimizerWrapper:
    keywords = Keywords("zero_optim_wrapper", given | config)
    rule, zero = keywords.read(ScalerConfig), keywords.read(ZeroConfig, stage=_stage_of(model))
    half = [parameter for parameter in model.parameters() if parameter.dtype == torch.float16]
    scaler = None
    if half:
        device_type = half[0].device.type
        scaler = DynamicScaler(rule, device_type, given["verbose"], unscale_fp16_grads=not zero.master_weights)
    partitions = Partitions(current_mesh())
    wrapped = shard_optimizer(model, optimizer, partitions, zero, scaler=scaler, clipping=keywords.read(Clipping))
    _OPTIMIZERS[model] = ref(wrapped)
    model.register_forward_pre_hook(_copy_written, prepend=True)
    model.register_state_dict_pre_hook(_copy_written)
    return wrapped


def _copy_written(model: nn.Module, *_arguments: object) -> None:
    """Gather what a program has written into shards of the parameters since the last step."""
    optimizer = _OPTIMIZERS[model]() if model in _OPTIMIZERS else None
    if optimizer is not None and optimizer.masters is not None:
        with local_operations():
            optimizer.masters.copy_written()


def _over_chunks(model: Any, optimizer: Optimizer, given: dict[str, Any], config: dict[str, Any]) -> OptimizerWrapper:
    from colossal._src.zero.gemini.gemini_optimizer import GeminiOptimizer

    if config:
        raise ConfigError(
            "Of stage 3 the gemini_config of zero_model_wrapper says all there is to say. Found "
            f"optim_config={config}. Pass it there."
        )
    return GeminiOptimizer(optimizer, model, **keywords_for(GeminiOptimizer, given))


def _stage_of(model: nn.Module) -> int:
    stage = getattr(model, _STAGE, None)
    if stage is None:
        raise ConfigError(
            f"zero_optim_wrapper takes the model that zero_model_wrapper returned. Found {type(model).__name__}, "
            "which has no stage. Write: model = zero_model_wrapper(model, zero_stage=2)."
        )
    return stage
