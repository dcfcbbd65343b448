"""The device of a booster, by the name of the first releases."""

import os
from typing import TypeVar, final

from torch import nn

from colossal.accelerator import get_accelerator

_M = TypeVar("_M", bound=nn.Module)


@final
class DeviceBinding:
    """Binds this process to its device, and moves models there; `Booster` does both.

    Args:
        device: ``"cpu"``, or the type of the accelerator that torch finds here, such as ``"cuda"``.

    Attributes:
        device: The type of the device.

    Raises:
        ConfigError: There is no such device here.

    Example:
        >>> import torch
        >>> from colossal.legacy.utils import DeviceBinding
        >>> binding = DeviceBinding("cpu")
        >>> binding.bind()
        >>> binding.configure_model(torch.nn.Linear(2, 1)).weight.device
        device(type='cpu')
    """

    def __init__(self, device: str) -> None:
        self.device, self._accelerator = device, get_accelerator(device)

    def bind(self) -> None:
        """Take the device of the local rank, which launchers write into the environment as LOCAL_RANK.

        Raises:
            ConfigError: There are fewer devices than processes.
        """
        self._accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))

    def configure_model(self, model: _M) -> _M:
        """Move a model to the device.

        Args:
            model: The model.

        Returns:
            The same model.
        """
        return model.to(self._accelerator.get_current_device())
