"""Programs that import colossalai, run by colossal: every name is that of colossal under the same path.

Modules that colossal has today, and those of the older documentation, are imported when a program asks for them; so are
the paths ``colossalai.legacy.*`` of later releases.
"""

import importlib

import colossal
from colossalai import _alias, _original

__version__ = "0.5.0+colossal"
"""The release whose documented names this package has; `colossal.__version__` is that of the library."""

_original.refuse(__version__)
_alias.install("colossalai", ("colossal",))


def __getattr__(name: str) -> object:
    if name == "legacy":
        return importlib.import_module("colossalai.legacy")
    try:
        return getattr(colossal, name)
    except AttributeError as error:
        raise AttributeError(f"module 'colossalai' has no attribute {name!r}", name=name) from error


def __dir__() -> list[str]:
    return sorted({*dir(colossal), "__version__"})
