"""Which option makes a step fit that does not: the first of some that are tried."""

from collections.abc import Iterator
from dataclasses import replace

from colossal._src.cli.estimate.model import ModelSource
from colossal._src.cli.estimate.plans import RankEstimate, estimate
from colossal._src.cli.estimate.settings import StepSettings
from colossal.errors import ColossalError

_LADDER = ("ddp", "zero1", "zero2", "fsdp", "gemini")  # each holds less than the one before


def find_fit(settings: StepSettings, source: ModelSource, limit: float) -> str:
    """Try options that hold less, and say which is the first that fits into so many bytes."""
    tried: list[tuple[int, str]] = []
    for words, changed in _candidates(settings, source):
        try:
            most = largest(estimate(changed, source))
        except ColossalError:
            continue  # the model does not take this option
        if most <= limit:
            return f"It fits with {words}: {most / 1e9:.2f} GB."
        tried.append((most, words))
    least = min(tried, default=None)
    best = "" if least is None else f" The least is {least[0] / 1e9:.2f} GB, with {least[1]}."
    sharded = "--plugin hybrid --tp 2" if settings.tp == 1 else f"--tp {2 * settings.tp}"
    return f"No other option fits on {settings.ranks} ranks.{best} Pass more --ranks, or {sharded}."


def largest(ranks: list[RankEstimate]) -> int:
    """Return what the fullest rank holds on its device."""
    return max(each.device_bytes for each in ranks)


def _candidates(settings: StepSettings, source: ModelSource) -> Iterator[tuple[str, StepSettings]]:
    """Go through what differs, the cheapest in time first; finally all of it together, in host memory."""
    plain = [("", settings)]
    if settings.plugin in _LADDER[:-1]:
        further = _LADDER[_LADDER.index(settings.plugin) + 1 :]
        plain += [(f"--plugin {plugin}", replace(settings, plugin=plugin)) for plugin in further]
    elif settings.plugin == "hybrid" and settings.zero_stage == 0:
        plain.append(("--zero-stage 1", replace(settings, zero_stage=1)))
    for words, each in plain:
        if words:
            yield words, each
        if source.has_layers and not settings.recompute:
            yield f"{words} --checkpoint-layers".strip(), replace(each, recompute=True)
    words, each = plain[-1]
    if each.can_offload and not each.offload:
        yield f"{words} --offload".strip(), replace(each, offload=True)
        if source.has_layers and not settings.recompute:
            yield f"{words} --checkpoint-layers --offload".strip(), replace(each, recompute=True, offload=True)
