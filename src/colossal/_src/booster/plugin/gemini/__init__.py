"""GeminiPlugin: all states sharded in chunks that move between device, host and disk."""

__all__ = []
