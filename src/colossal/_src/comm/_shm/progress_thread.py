"""Moves messages for which no caller waits."""

import threading
import time
from collections import deque
from typing import Protocol, final

_LOOK_SECONDS, _IDLE_SECONDS = 0.002, 1.0


class Progressable(Protocol):
    """A message that the progress thread moves."""

    def make_progress(self) -> bool:
        """Make progress, and return whether more remains that no other thread will do."""
        ...


@final
class ProgressThread:
    """A thread that polls every few milliseconds while there are messages.

    A message that does not fit into its ring needs progress at both ends. Most messages are waited for at once, and
    waking a thread for each of those would slow them down. So nothing wakes this thread up, unless it has had nothing
    to do for a second.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._watched: deque[Progressable] = deque()
        self._mutex, self._wanted = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._is_stopped = self._is_asleep = False

    def watch(self, message: Progressable) -> None:
        """Look after a message until it is over, or somebody waits for it."""
        # Without a lock: a deque appends and pops atomically, and only the thread takes messages out.
        self._watched.append(message)
        if self._thread is None:
            self._start()
        if self._is_asleep:  # set before it looks for the last time whether there is something
            self._wanted.set()

    def _start(self) -> None:
        # Looked at again under the lock: two threads that send first would start two, and `stop` joins one.
        with self._mutex:
            if self._thread is None and not self._is_stopped:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        busy_until = 0.0
        while not self._is_stopped:
            time.sleep(_LOOK_SECONDS)
            # The length is taken once: what is put back or added meanwhile waits for the next pause.
            for _ in range(len(self._watched)):
                message = self._watched.popleft()
                if message.make_progress():
                    self._watched.append(message)
                busy_until = time.monotonic() + _IDLE_SECONDS
                # The variable would keep the last work, and its tensor, alive while the thread sleeps.
                del message
            if time.monotonic() > busy_until:
                self._sleep()

    def _sleep(self) -> None:
        # Cleared and marked asleep before the last look: a message added in between is seen by it, or sets the event.
        self._wanted.clear()
        self._is_asleep = True
        if not self._watched and not self._is_stopped:
            self._wanted.wait()
        self._is_asleep = False

    def stop(self, seconds: float) -> None:
        """End the thread."""
        with self._mutex:
            self._is_stopped = True
        self._wanted.set()
        # The last reference to a group may be released in this very thread, which cannot join itself.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)
