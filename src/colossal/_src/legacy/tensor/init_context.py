"""Build a model whose parameters are distributed."""

from contextlib import ExitStack
from types import TracebackType
from typing import Self, final

import torch
from torch import nn

from colossal._src.legacy.notice import superseded
from colossal._src.legacy.registration_hooks import registration_hook
from colossal._src.legacy.tensor.colo_parameter import ColoParameter, convert_to_colo_parameter
from colossal._src.legacy.tensor.process_group import ProcessGroup
from colossal._src.legacy.tensor.specs import DistSpec
from colossal._src.tensor import set_data
from colossal.accelerator import get_accelerator
from colossal.errors import ConfigError


@final
class ColoInitContext:
    """Turns the parameters of the modules that are built inside into `ColoParameter` objects, when it ends.

    Superseded by `colossal.lazy.LazyInitContext`, with which a model is built without memory, and a `Booster`.

    Args:
        device: Where parameters and buffers go: a device, its name, or the index of an accelerator.
        dtype: What floating-point parameters become.
        default_pg: Their ranks; all by default.
        default_dist_spec: How they are distributed; replicated by default. Dimensions that a parameter does not have
            are an error.

    Raises:
        ConfigError: A parameter has no values yet, as one that is built lazily.

    Example:
        >>> import torch
        >>> from colossal.legacy.tensor import ColoInitContext
        >>> from colossal.testing import fake_world
        >>> with fake_world(2), ColoInitContext(device="cpu"):
        ...     layer = torch.nn.Linear(2, 2)
        >>> type(layer.weight).__name__, layer.weight.process_group.dp_world_size()
        ('ColoParameter', 2)
    """

    def __init__(
        self,
        device: torch.device | str | int = "cpu",
        dtype: torch.dtype = torch.float,
        default_pg: ProcessGroup | None = None,
        default_dist_spec: DistSpec | None = None,
    ) -> None:
        superseded("ColoInitContext", "with LazyInitContext(): model = ..., then Booster(plugin=...).boost(model)")
        is_index = isinstance(device, int)
        self._device = torch.device(get_accelerator().name, device) if is_index else torch.device(device)
        self._dtype, self._group, self._dist_spec = dtype, default_pg, default_dist_spec
        self._parameters: dict[int, nn.Parameter] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        self._hooks.enter_context(registration_hook("parameter", self._note_parameter))
        self._hooks.enter_context(registration_hook("buffer", self._note_buffer))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()
        parameters, buffers = list(self._parameters.values()), list(self._buffers.values())
        self._parameters, self._buffers = {}, {}
        if error is not None:
            return
        with torch.no_grad():
            for parameter in parameters:
                self._convert(parameter)
            for buffer in buffers:
                if buffer.device != self._device:
                    set_data(buffer, buffer.to(self._device))

    def _note_parameter(self, _module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            self._parameters[id(parameter)] = parameter

    def _note_buffer(self, _module: nn.Module, _name: str, buffer: torch.Tensor | None) -> None:
        if buffer is not None:
            self._buffers[id(buffer)] = buffer

    def _convert(self, parameter: nn.Parameter) -> None:
        if isinstance(parameter, ColoParameter):
            return
        if type(parameter) is not nn.Parameter:
            raise ConfigError(
                "A model gets its values inside of ColoInitContext, and is distributed when it ends. Found a "
                f"{type(parameter).__name__} of the shape {tuple(parameter.shape)}. Use one such context alone."
            )
        dtype = self._dtype if parameter.is_floating_point() else parameter.dtype
        set_data(parameter, parameter.detach().to(self._device, dtype))
        convert_to_colo_parameter(parameter, self._group, self._dist_spec)
