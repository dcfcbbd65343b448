"""A call of the harness that cannot be served; the message says what to do."""


class UsageError(Exception):
    """What was asked for does not exist here, or is asked in the wrong way."""
