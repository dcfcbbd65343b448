"""The configuration file of the documented OPT service: a Python file whose variables are its keys."""

import os
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from colossal._src.inference.online import launch_engine
from colossal._src.inference.server.opt import OPT_SIZES, load_opt
from colossal._src.inference.server.settings import LOG_LEVELS, ServerSettings
from colossal._src.interface import is_integer
from colossal.errors import ConfigError

_DEFAULTS: dict[str, Any] = {
    "model_class": None,
    "model_type": "opt",
    "checkpoint": None,
    "half": False,
    "tokenizer_path": None,
    "tp_init_size": 1,
    "pp_init_size": 1,
    "engine_server": launch_engine,
    "server_host": "0.0.0.0",  # noqa: S104 (documented: a service in a container)
    "server_port": 8020,
    "log_level": "info",
    "allow_cors": True,
    "executor_max_batch_size": 16,
    "cache_size": 0,
    "cache_list_size": 1,
    # Where ranks meet, and through what; a single one meets no others.
    "host": "localhost",
    "port": 29401,
    "rpc_port": 29402,
    "backend": None,
}
_COUNTS = ("tp_init_size", "pp_init_size", "server_port", "executor_max_batch_size", "cache_list_size")
_PLAIN = (str, int, float, bool, list, dict, tuple, type(None))


def read_config_file(path: str | Path) -> ServerSettings:
    """Run a configuration file, and read its keys.

    The names of the documented classes, such as `opt_125M`, are there without an import. `checkpoint` may begin with
    the variable `CHECKPOINT_DIR`, which the documented image sets.

    Raises:
        ConfigError: A key is unknown, or has a value that it cannot have.
    """
    names = {name: name for name in OPT_SIZES} | {"launch_engine": launch_engine}
    variables = runpy.run_path(os.fspath(path), init_globals=names)
    given = {name: value for name, value in variables.items() if name not in names and not name.startswith("_")}
    if unknown := [name for name, value in given.items() if name not in _DEFAULTS and isinstance(value, _PLAIN)]:
        raise ConfigError(
            f"A configuration file has the keys {', '.join(sorted(_DEFAULTS))}. Found {unknown[0]} in {path}. Remove "
            "it, or let its name begin with an underscore."
        )
    keys = _DEFAULTS | {name: value for name, value in given.items() if name in _DEFAULTS}
    _check(keys)
    return ServerSettings(
        model=load_opt(keys["model_class"], _expand(keys["checkpoint"]), half=keys["half"]),
        tokenizer=_expand(keys["tokenizer_path"]),
        model_name=_name_of(keys),
        dtype=torch.float16 if keys["half"] else None,
        tp_size=keys["tp_init_size"],
        pp_size=keys["pp_init_size"],
        host=keys["server_host"],
        port=keys["server_port"],
        log_level=keys["log_level"],
        allow_cors=keys["allow_cors"],
        max_batch_size=keys["executor_max_batch_size"],
        cache_size=keys["cache_size"],
        cache_list_size=keys["cache_list_size"],
    )


def _check(keys: Mapping[str, Any]) -> None:
    requirements = {name: ("an integer of at least 1", is_integer(keys[name], 1)) for name in _COUNTS}
    requirements |= {
        "cache_size": ("an integer of at least 0", is_integer(keys["cache_size"], 0)),
        "model_type": ("'opt'", keys["model_type"] == "opt"),
        "engine_server": ("launch_engine", keys["engine_server"] in {launch_engine, "launch_engine"}),
        "log_level": (f"one of {', '.join(LOG_LEVELS)}", keys["log_level"] in LOG_LEVELS),
        "half": ("True or False", isinstance(keys["half"], bool)),
        "allow_cors": ("True or False", isinstance(keys["allow_cors"], bool)),
        "server_host": ("a string", isinstance(keys["server_host"], str)),
    }
    for name, (required, is_right) in requirements.items():
        if not is_right:
            raise ConfigError(f"{name} of a configuration file is {required}. Found {keys[name]!r}. Change it.")


def _expand(path: Any) -> Path | None:
    return None if path is None else Path(os.path.expandvars(os.fspath(path)))


def _name_of(keys: Mapping[str, Any]) -> str:
    """What clients call the model: its class, or the folder of its files."""
    model_class = keys["model_class"]
    if model_class is None:
        return Path(keys["checkpoint"]).name
    return model_class if isinstance(model_class, str) else getattr(model_class, "__name__", "model")
