"""Values of a scope, in all threads that work for it."""

import threading
from contextvars import ContextVar, Token
from typing import Generic, TypeVar, final

T = TypeVar("T")

# [Note: threads of a backward pass]
# On an accelerator autograd runs the backward pass in a thread of its own, which Python has not started and which has
# none of the context of the caller: hooks in it would find no mesh, and count nothing. The caller waits meanwhile, so
# what the main thread has set is what they are to see. Threads that are ranks have a value of their own.


@final
class InheritedContextVar(Generic[T]):
    """A context variable that threads without a value of their own read from the main thread."""

    def __init__(self, name: str, default: T) -> None:
        self._own: ContextVar[T] = ContextVar(name)
        self._of_main = default

    def get(self) -> T:
        """Return the value in this thread."""
        return self._own.get(self._of_main)

    def set(self, value: T) -> tuple[Token[T], T]:
        """Set a value; return what `reset` takes back."""
        token, before = self._own.set(value), self._of_main
        self._show(value)
        return token, before

    def reset(self, token: tuple[Token[T], T]) -> None:
        """Set the value that was there before."""
        own, before = token
        self._own.reset(own)
        self._show(before)

    def _show(self, value: T) -> None:
        # A thread that is a rank must not change what the threads of a backward pass see.
        if threading.current_thread() is threading.main_thread():
            self._of_main = value
