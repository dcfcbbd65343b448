"""The older plugin for mixtures of experts, which `HybridParallelPlugin` trains too."""

from typing import Any

from colossal._src.booster.plugin import HybridParallelPlugin
from colossal._src.legacy.notice import superseded
from colossal.errors import UnsupportedError


def MoeHybridParallelPlugin(  # noqa: N802 (the name of a class in the older documentation)
    tp_size: int,
    pp_size: int,
    ep_size: int,
    *args: Any,
    overlap_communication: bool = False,
    moe_dp_outside: bool = True,
    **kwargs: Any,
) -> HybridParallelPlugin:
    """Make a `HybridParallelPlugin` with `ep_size`, under the name that the older documentation has for it.

    Args:
        tp_size: Ranks over which a tensor is sharded.
        pp_size: Ranks over which the layers are split into stages.
        ep_size: Ranks over which the experts of a layer are sharded.
        *args: Those of `HybridParallelPlugin` after `pp_size`.
        overlap_communication: With ZeRO: reduce gradients while the backward pass goes on.
        moe_dp_outside: Only True: the ranks of an expert-parallel group have consecutive numbers.
        **kwargs: Those of `HybridParallelPlugin`.

    Returns:
        The plugin.

    Raises:
        UnsupportedError: `moe_dp_outside` is False.
        ConfigError: As of `HybridParallelPlugin`.

    Example:
        >>> from colossal.legacy.booster import MoeHybridParallelPlugin
        >>> from colossal.testing import fake_world
        >>> with fake_world(4):
        ...     plugin = MoeHybridParallelPlugin(tp_size=1, pp_size=1, ep_size=2, zero_stage=1)
        ...     print(plugin.ep_size, plugin.dp_size)
        2 4
    """
    if not moe_dp_outside:
        raise UnsupportedError(
            "Experts are sharded over consecutive ranks, so that their tokens stay within a host if they can. Found "
            "moe_dp_outside=False. Leave it out."
        )
    superseded("colossal.booster.plugin.MoeHybridParallelPlugin", "HybridParallelPlugin(..., ep_size=...)")
    return HybridParallelPlugin(
        tp_size, pp_size, *args, ep_size=ep_size, overlap_communication=overlap_communication, **kwargs
    )
