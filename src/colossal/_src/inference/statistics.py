"""What an engine counts."""

from dataclasses import dataclass

from colossal._src.inference.scheduler import Scheduler


@dataclass(frozen=True)
class EngineStatistics:
    """What an engine holds, and has done since it was built.

    Args:
        num_waiting: Sequences that wait for room.
        num_running: Sequences that have pages.
        num_pages: Pages that there are.
        num_used_pages: Pages that sequences own.
        num_cached_pages: Pages that no sequence owns, and that hold the tokens of an earlier one.
        num_steps: Steps so far.
        num_prompt_tokens: Tokens of all sequences when they were admitted, after a preemption once more.
        num_hit_tokens: Of these, the tokens that were not computed because pages held them.
        num_generated_tokens: Tokens of all outputs.
        num_preempted: How often a sequence lost its pages to an earlier one, and was computed again.

    Example:
        >>> from colossal.inference import EngineStatistics
        >>> EngineStatistics(num_pages=8).num_used_pages
        0
    """

    num_waiting: int = 0
    num_running: int = 0
    num_pages: int = 0
    num_used_pages: int = 0
    num_cached_pages: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_generated_tokens: int = 0
    num_preempted: int = 0


def count(scheduler: Scheduler, *, num_steps: int, num_generated: int) -> EngineStatistics:
    """Count what a scheduler has, and its pool."""
    pool = scheduler.pool
    return EngineStatistics(
        num_waiting=len(scheduler.waiting),
        num_running=len(scheduler.running),
        num_pages=pool.num_pages,
        num_used_pages=pool.num_pages - pool.num_free,
        num_cached_pages=pool.num_cached,
        num_steps=num_steps,
        num_prompt_tokens=scheduler.num_admitted_tokens,
        num_hit_tokens=scheduler.num_hit_tokens,
        num_generated_tokens=num_generated,
        num_preempted=scheduler.num_preempted,
    )
