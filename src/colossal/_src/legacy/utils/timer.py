"""Timers that wait for the device before they read the clock."""

import time
from collections.abc import Iterator
from typing import final

from colossal._src.legacy.utils.basics import synchronize
from colossal.errors import ConfigError


@final
class Timer:
    """Measures the time between a start and a stop.

    Example:
        >>> from colossal.legacy.utils import Timer
        >>> timer = Timer()
        >>> timer.start()
        >>> elapsed = timer.stop(keep_in_history=True)
        >>> timer.get_elapsed_time() == elapsed == timer.get_history_sum()
        True
    """

    def __init__(self) -> None:
        self._started_at: float | None = None
        self._elapsed = 0.0
        self._history: list[float] = []

    @property
    def has_history(self) -> bool:
        """Whether a measurement has been kept."""
        return bool(self._history)

    @property
    def current_time(self) -> float:
        """The clock in seconds, after everything that was started on the device has finished."""
        synchronize()
        return time.perf_counter()

    def start(self) -> None:
        """Begin a measurement."""
        self._started_at = self.current_time

    def lap(self) -> float:
        """Return the seconds since the start, and go on.

        Returns:
            Seconds.

        Raises:
            ConfigError: The timer has not been started.
        """
        if self._started_at is None:
            raise ConfigError("A timer measures from its start. Found one that was not started. Call start() first.")
        return self.current_time - self._started_at

    def stop(self, keep_in_history: bool = False) -> float:
        """End a measurement.

        Args:
            keep_in_history: Keep it for the mean and the sum.

        Returns:
            Seconds since the start.

        Raises:
            ConfigError: The timer has not been started.
        """
        self._elapsed = self.lap()
        self._started_at = None
        if keep_in_history:
            self._history.append(self._elapsed)
        return self._elapsed

    def get_elapsed_time(self) -> float:
        """Return the last measurement.

        Returns:
            Seconds; 0 before the first one.

        Raises:
            ConfigError: A measurement is running.
        """
        if self._started_at is not None:
            raise ConfigError("The elapsed time is that of a stopped timer. Found a running one. Call stop() first.")
        return self._elapsed

    def get_history_mean(self) -> float:
        """Return the mean of the measurements that were kept.

        Returns:
            Seconds; 0 without any.
        """
        return self.get_history_sum() / len(self._history) if self._history else 0.0

    def get_history_sum(self) -> float:
        """Return the sum of the measurements that were kept.

        Returns:
            Seconds.
        """
        return sum(self._history)

    def reset(self) -> None:
        """Forget all measurements, a running one included."""
        self._history.clear()
        self._started_at, self._elapsed = None, 0.0


@final
class MultiTimer:
    """Several timers by name, which can all be switched off.

    Args:
        on: Whether they measure.

    Example:
        >>> from colossal.legacy.utils import MultiTimer
        >>> timers = MultiTimer()
        >>> timers.start("forward")
        >>> timers.stop("forward", keep_in_history=True) > 0
        True
        >>> [name for name, _ in timers], MultiTimer(on=False).stop("forward")
        (['forward'], None)
    """

    def __init__(self, on: bool = True) -> None:
        self._on = on
        self._timers: dict[str, Timer] = {}

    def start(self, name: str) -> None:
        """Begin a measurement.

        Args:
            name: Of the timer; it is made at its first use.
        """
        if self._on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool = False) -> float | None:
        """End a measurement.

        Args:
            name: Of the timer.
            keep_in_history: Keep it for the mean and the sum.

        Returns:
            Seconds since the start; None while the timers are off.

        Raises:
            ConfigError: There is no such timer, or it has not been started.
        """
        return self.get_timer(name).stop(keep_in_history) if self._on else None

    def get_timer(self, name: str) -> Timer:
        """Find a timer.

        Args:
            name: Of the timer.

        Returns:
            The timer.

        Raises:
            ConfigError: There is none.
        """
        if name not in self._timers:
            known = ", ".join(self._timers) or "none"
            raise ConfigError(f"A timer exists from its first start on. Found {name!r}, and there is {known}.")
        return self._timers[name]

    def reset(self, name: str | None = None) -> None:
        """Forget all measurements.

        Args:
            name: Of one timer; of all by default.

        Raises:
            ConfigError: There is no such timer.
        """
        for timer in self._timers.values() if name is None else (self.get_timer(name),):
            timer.reset()

    def is_on(self) -> bool:
        """Return whether the timers measure.

        Returns:
            Whether they do.
        """
        return self._on

    def set_status(self, mode: bool) -> None:
        """Switch all timers on or off.

        Args:
            mode: Whether they measure from here on.
        """
        self._on = mode

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        """Go through the timers, with their names."""
        return iter(self._timers.items())
