"""Programs that were written for config files learn that there are none."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import ParamSpec, TypeVar, cast

from colossal.errors import ConfigError

_P = ParamSpec("_P")
_T = TypeVar("_T")


def refuse_config(launch: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a function raise a ConfigError where its first argument, or a keyword, is a config.

    It looks before Python matches arguments to parameters, because a config that comes first shifts all others.
    """
    names = list(inspect.signature(launch).parameters)

    @functools.wraps(launch)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            if name == "config" or _is_config(name, value):
                raise ConfigError(
                    f"{launch.__name__}() takes no config: config files and dicts are not supported yet. Found "
                    f"{_describe(value)}. Leave it out: pass the sizes of the parallel axes to a plugin, such as "
                    "HybridParallelPlugin(tp_size=2, pp_size=2), or to ParallelMesh(tp=2, pp=2), and precision and "
                    "clipping to Booster and its plugin."
                )
        return launch(*args, **kwargs)

    return checked


def _is_config(name: str, value: object) -> bool:
    if isinstance(value, str) and value.endswith(".py"):
        return name != "host" or os.sep in value or Path(value).is_file()  # hosts of Paraguay end in .py as well
    return isinstance(value, Mapping | os.PathLike | ModuleType)


def _describe(value: object) -> str:
    if isinstance(value, Mapping):
        keys = ", ".join(repr(key) for key in cast("Mapping[object, object]", value))
        return f"a dict with {keys}" if keys else "an empty dict"
    return repr(value)
