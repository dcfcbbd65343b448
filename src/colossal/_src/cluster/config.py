"""What a program is configured by, in one dict: features under reserved names, and its own hyper-parameters."""

import functools
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping
from inspect import isclass, ismodule, signature
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, Self, TypeVar, cast

from colossal._src.cluster.context_var import InheritedContextVar
from colossal.errors import ConfigError

_P = ParamSpec("_P")
_T = TypeVar("_T")

_CURRENT: InheritedContextVar["Config | None"] = InheritedContextVar("colossal_config", None)


class Config(dict[str, Any]):
    """A dict whose entries are attributes too; dicts in it are configs.

    Args:
        *args: A mapping or pairs, as for a dict.
        **kwargs: Further entries.

    Raises:
        ConfigError: A name is no string.

    Example:
        >>> from colossal.cluster import Config
        >>> config = Config(parallel=dict(pipeline=2, tensor=dict(size=2, mode="1d")), BATCH_SIZE=32)
        >>> config.parallel.tensor.mode, config.BATCH_SIZE, getattr(config, "gradient_accumulation", 1)
        ('1d', 32, 1)
    """

    def __init__(self, *args: Mapping[str, Any] | Iterable[tuple[str, Any]], **kwargs: Any) -> None:
        super().__init__()
        self.update(*args, **kwargs)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take over all entries of another config or dict, which replace those of the same name.

        Args:
            *args: A mapping or pairs, as for a dict.
            **kwargs: Further entries.

        Raises:
            ConfigError: A name is no string.
        """
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"The names of a config are strings. Found {name!r}. Write it as a string.")
        wraps = isinstance(value, dict) and not isinstance(value, Config)
        super().__setitem__(name, Config(cast("dict[str, Any]", value)) if wraps else value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Return an entry, which is set first if there was none.

        Args:
            name: Its name.
            default: What it is set to.

        Returns:
            The entry.
        """
        if name not in self:
            self[name] = default
        return self[name]

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"{name}; the config has {', '.join(self) or 'no entries'}")

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(
            f"The config has no {name!r}; it has {', '.join(self) or 'no entries'}", name=name, obj=self
        )

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]

    @classmethod
    def from_file(cls, filename: str | os.PathLike[str]) -> Self:
        """Run a Python file, and take its variables.

        Args:
            filename: The path of a ``.py`` file. It may import files next to it.

        Returns:
            Its variables but for modules, classes, and names that begin with two underscores.

        Raises:
            ConfigError: There is no such file, or it is none of Python.
        """
        path = Path(filename).expanduser().absolute()
        if path.suffix != ".py" or not path.is_file():
            found = "no such file" if not path.is_file() else f"a file of the kind {path.suffix or 'without suffix'}"
            raise ConfigError(f"A config file is a Python file, *.py. Found {found} at {path}. Pass the path of one.")
        sys.path.insert(0, str(path.parent))
        try:
            variables = runpy.run_path(str(path))
        finally:
            sys.path.remove(str(path.parent))
        return cls({name: value for name, value in variables.items() if _is_entry(name, value)})


ConfigSource = str | os.PathLike[str] | Mapping[str, Any]
"""The path of a config file, or what it holds."""


def read_config(config: ConfigSource) -> Config:
    """The config that a program passes as a path, a dict or a config."""
    if isinstance(config, Config):
        return config
    if isinstance(config, Mapping):
        return Config(config)
    if not isinstance(config, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"A config is the path of a Python file, a dict or a Config. Found {config!r} of the type "
            f"{type(config).__name__}. Pass one of these."
        )
    return Config.from_file(config)


def current_config() -> Config | None:
    """The config that the program was launched with, None without one."""
    return _CURRENT.get()


def set_current_config(config: Config | None) -> None:
    """Make a config that of the program."""
    _CURRENT.set(config)


def config_may_come_first(launch: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a function with a keyword ``config`` take it as its first argument too.

    It looks before Python matches arguments to parameters, because a config that comes first shifts all others.
    """
    names = list(signature(launch).parameters)

    @functools.wraps(launch)
    def with_config(*args: Any, **kwargs: Any) -> _T:
        if args and _is_config(names[0], args[0]):
            if "config" in kwargs:
                raise ConfigError(f"{launch.__name__}() takes one config. Found two. Pass one of them.")
            args, kwargs = args[1:], {**kwargs, "config": args[0]}
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            if name != "config" and _is_config(name, value):
                raise ConfigError(
                    f"{launch.__name__}() takes a config first, or by its name. Found one as {name}: {value!r}. "
                    f"Call {launch.__name__}(config=...)."
                )
        return launch(*args, **kwargs)

    return with_config


def _is_config(name: str, value: object) -> bool:
    if isinstance(value, str) and value.endswith(".py"):
        return name != "host" or os.sep in value or Path(value).is_file()  # hosts of Paraguay end in .py as well
    return isinstance(value, Mapping | os.PathLike | ModuleType)


def _is_entry(name: str, value: object) -> bool:
    return not (name.startswith("__") or ismodule(value) or isclass(value))
