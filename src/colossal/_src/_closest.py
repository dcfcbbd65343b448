"""The name that a misspelled one was meant to be."""

from collections.abc import Iterable

__all__ = ["closest_name"]

_SUGGESTION = 0.6  # likeness of what may be meant where a name is wrong anyway: the default of difflib
_TYPING_ERROR = 0.85  # of a name with a letter too many, too few or in another place, also of four


def closest_name(name: str, known: Iterable[str], *, typing_errors_only: bool = False) -> str | None:
    """Return the known name that is most like another one, None if none is like it.

    Args:
        name: Which is not known.
        known: To choose from.
        typing_errors_only: The name may be of the program itself, which is usually further away.
    """
    from difflib import get_close_matches  # needed by errors only

    likeness = _TYPING_ERROR if typing_errors_only else _SUGGESTION
    return next(iter(get_close_matches(name, known, 1, likeness)), None)
