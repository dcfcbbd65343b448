"""Text of tokens that come one by one, and where a stop string ends it."""

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "�"
"""What a tokenizer puts in place of bytes that are no character, or not yet."""


class TextStream:
    """The text of one output; tokens are decoded once, with those before them that decide how they are written."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []
        self._decoded = 0  # tokens that are in the text
        self._context = 0  # first token that is decoded again, for the spaces between tokens
        self._text = ""
        self.stopped = False

    def add(self, token: int) -> None:
        """Take another token; nothing after a stop string is of interest."""
        self._tokens.append(token)
        self._decode(is_last=False)

    def finish(self) -> str:
        """Return all of the text."""
        self._decode(is_last=True)
        return self._text

    @property
    def text(self) -> str:
        """What no stop string can take away any more."""
        if self.stopped:
            return self._text
        lengths = range(max(map(len, self._stop), default=1) - 1, 0, -1)
        ends = (length for length in lengths if any(stop.startswith(self._text[-length:]) for stop in self._stop))
        kept_back = min(next(ends, 0), len(self._text))
        return self._text[: len(self._text) - kept_back]

    def _decode(self, *, is_last: bool) -> None:
        if self.stopped or self._tokenizer is None:
            return
        before = self._decode_tokens(self._context, self._decoded)
        after = self._decode_tokens(self._context, len(self._tokens))
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and not is_last):
            return  # the next token may complete a character
        searched = max(len(self._text) - max(map(len, self._stop), default=1) + 1, 0)
        self._text += after[len(before) :]
        self._context, self._decoded = self._decoded, len(self._tokens)
        found = [index for stop in self._stop if (index := self._text.find(stop, searched)) >= 0]
        if found:
            self._text, self.stopped = self._text[: min(found)], True

    def _decode_tokens(self, start: int, stop: int) -> str:
        return self._tokenizer.decode(self._tokens[start:stop], skip_special_tokens=True)
