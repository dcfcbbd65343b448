"""An engine in a thread of its own, and the documented names around it: a service without its protocol."""

from colossal._src.inference.online.batch_manager import BatchManagerForGeneration, SubmitEntry, TaskEntry
from colossal._src.inference.online.engine_thread import EngineThread
from colossal._src.inference.online.launch import LaunchedEngine, launch_engine
from colossal._src.inference.online.list_cache import ListCache, MissCacheError
from colossal._src.inference.online.refusals import QueueFullError

__all__ = [
    "BatchManagerForGeneration",
    "EngineThread",
    "LaunchedEngine",
    "ListCache",
    "MissCacheError",
    "QueueFullError",
    "SubmitEntry",
    "TaskEntry",
    "launch_engine",
]
