"""A logger that knows its rank."""

import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, final

from torch import distributed as dist

from colossal.errors import ConfigError

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR"]

_FORMAT = "%(asctime)s %(name)s %(levelname)s: %(message)s"


class _StandardError(logging.StreamHandler[Any]):
    """Writes to what is standard error when a message comes, not to what was when the logger was made."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        """The standard error of now."""
        return sys.stderr


@final
class DistributedLogger:
    """Logs with the rank in front, on all ranks or on chosen ones.

    Loggers of one name have the same level and files, as in the standard library. Use `get_dist_logger`.

    Args:
        name: Name of the underlying `logging.Logger`.

    Example:
        >>> import tempfile
        >>> from colossal.logging import DistributedLogger
        >>> logger = DistributedLogger("my_training")
        >>> path = logger.log_to_file(tempfile.mkdtemp())
        >>> logger.warning("said by rank 0 only, whatever the number of processes", ranks=[0])
        >>> logger.warning("said by rank 1 only, which is not here", ranks=[1])
        >>> logger.close()
        >>> path.name, path.read_text().rpartition("WARNING: ")[2].strip()
        ('rank_0.log', '[rank 0] said by rank 0 only, whatever the number of processes')
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        if not self._logger.handlers:
            handler = _StandardError()
            handler.setFormatter(logging.Formatter(_FORMAT))
            self._logger.addHandler(handler)
            self._logger.setLevel(logging.INFO)
            self._logger.propagate = False

    @property
    def name(self) -> str:
        """Name of the underlying logger."""
        return self._logger.name

    def set_level(self, level: Level) -> None:
        """Drop messages below `level`.

        Args:
            level: ``"DEBUG"``, ``"INFO"``, ``"WARNING"`` or ``"ERROR"``.

        Raises:
            ConfigError: The level has another name.
        """
        self._logger.setLevel(_check_level(level))

    def log_to_file(self, path: str | Path, mode: str = "a", level: Level = "INFO", suffix: str | None = None) -> Path:
        """Write messages to a file of this rank as well.

        Args:
            path: Folder of the log file; created if it does not exist.
            mode: ``"a"`` to append, ``"w"`` to start anew.
            level: Least level that goes to the file.
            suffix: Added to the file's name.

        Returns:
            The file: ``rank_<rank>[_<suffix>].log`` in the folder.

        Raises:
            ConfigError: The mode or the level has another name, or the path is a file.
        """
        folder = Path(path)
        if mode not in ("a", "w"):
            raise ConfigError(
                f"log_to_file takes mode 'a' (append) or 'w' (start anew). Found {mode!r}. Pass one of them."
            )
        if folder.is_file():
            raise ConfigError(f"log_to_file writes into a folder. Found the file {folder}. Pass its folder instead.")
        _check_level(level)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank_{_rank()}" + (f"_{suffix}" if suffix else "")
        handler = logging.FileHandler(folder / f"{name}.log", mode=mode, encoding="utf-8")
        handler.setLevel(level)
        handler.setFormatter(logging.Formatter(_FORMAT))
        self._logger.addHandler(handler)
        return folder / f"{name}.log"

    def debug(self, message: object, ranks: Sequence[int] | None = None) -> None:
        """Log at level DEBUG.

        Args:
            message: Converted to text.
            ranks: Ranks that log; all by default.
        """
        self._log(logging.DEBUG, message, ranks)

    def info(self, message: object, ranks: Sequence[int] | None = None) -> None:
        """Log at level INFO.

        Args:
            message: Converted to text.
            ranks: Ranks that log; all by default.
        """
        self._log(logging.INFO, message, ranks)

    def warning(self, message: object, ranks: Sequence[int] | None = None) -> None:
        """Log at level WARNING.

        Args:
            message: Converted to text.
            ranks: Ranks that log; all by default.
        """
        self._log(logging.WARNING, message, ranks)

    def error(self, message: object, ranks: Sequence[int] | None = None) -> None:
        """Log at level ERROR.

        Args:
            message: Converted to text.
            ranks: Ranks that log; all by default.
        """
        self._log(logging.ERROR, message, ranks)

    def close(self) -> None:
        """Close the files that `log_to_file` opened."""
        for handler in [h for h in self._logger.handlers if isinstance(h, logging.FileHandler)]:
            self._logger.removeHandler(handler)
            handler.close()

    def _log(self, level: int, message: object, ranks: Sequence[int] | None) -> None:
        rank = _rank()
        if ranks is None or rank in ranks:
            self._logger.log(level, "[rank %d] %s", rank, message)


def get_dist_logger(name: str = "colossal") -> DistributedLogger:
    """Find the logger of a name.

    Args:
        name: Loggers of one name have the same level and files.

    Returns:
        The logger; made if there is none yet.

    Example:
        >>> from colossal.logging import get_dist_logger
        >>> logger = get_dist_logger("my_training")
        >>> logger.set_level("WARNING")
        >>> logger.info("not shown", ranks=[0])
        >>> logger.name
        'my_training'
    """
    return DistributedLogger(name)


def disable_existing_loggers(include: Iterable[str] | None = None, exclude: Iterable[str] = ("colossal",)) -> None:
    """Set the level of other libraries' loggers to WARNING.

    Args:
        include: Names of the loggers to quieten; every logger that exists by default.
        exclude: Names that stay as they are, with their children.

    Example:
        >>> import logging
        >>> from colossal.logging import disable_existing_loggers
        >>> logging.getLogger("chatty").setLevel(logging.DEBUG)
        >>> disable_existing_loggers(include=["chatty"])
        >>> logging.getLogger("chatty").isEnabledFor(logging.INFO)
        False
    """
    kept = tuple(exclude)
    for name in list(logging.root.manager.loggerDict) if include is None else include:
        if not any(name == other or name.startswith(f"{other}.") for other in kept):
            logging.getLogger(name).setLevel(logging.WARNING)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _check_level(level: Any) -> str:
    if level not in Level.__args__:
        raise ConfigError(f"A log level is one of {', '.join(Level.__args__)}. Found {level!r}. Pass one of them.")
    return level
