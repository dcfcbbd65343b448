"""Base classes of a user's own plugins of two kinds, as the older documentation has them."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from colossal._src.interface import ModelWrapper, OptimizerWrapper
from colossal._src.legacy.booster.older_plugin import OlderPlugin
from colossal.errors import ConfigError, UnsupportedError


class DPPluginBase(OlderPlugin):
    """The base class of a data-parallel plugin of your own.

    Attributes:
        rank: The number of this process.
        world_size: The number of processes.

    Raises:
        ConfigError: No process group is initialized.

    Example:
        >>> from colossal.legacy.booster import DPPluginBase, OlderPlugin
        >>> issubclass(DPPluginBase, OlderPlugin)
        True
    """

    def __init__(self) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise ConfigError(
                "A data-parallel plugin is built by processes that have found each other. Found no process group. Call "
                "colossal.launch_from_torch() first."
            )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def no_sync(  # the arguments are those of an override
        self,
        model: nn.Module,  # noqa: ARG002
        optimizer: OptimizerWrapper | None = None,  # noqa: ARG002
    ) -> AbstractContextManager[Any]:
        """Open a context in which gradients accumulate without being reduced over ranks; here there is none.

        Args:
            model: The boosted model.
            optimizer: The boosted optimizer.

        Returns:
            The context, in a class that has one.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            f"no_sync needs a plugin that has it. Found {type(self).__name__}, which does not. Define the method, or "
            "reduce gradients in each pass."
        )


class PipelinePluginBase(OlderPlugin):
    """The base class of a plugin of your own that runs batches itself, for `Booster.execute_pipeline`.

    Example:
        >>> from colossal.legacy.booster import OlderPlugin, PipelinePluginBase
        >>> issubclass(PipelinePluginBase, OlderPlugin)
        True
    """

    @abstractmethod
    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: ModelWrapper,
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: OptimizerWrapper | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run a batch, forward and, with an optimizer, backward.

        Args:
            data_iter: Yields batches.
            model: The boosted model.
            criterion: Computes the loss from outputs and inputs.
            optimizer: The boosted optimizer; None to run forward passes only.
            return_loss: Whether the loss is asked for.
            return_outputs: Whether the outputs are.

        Returns:
            ``loss`` and ``outputs``.
        """
