"""An import finder that gives modules of one name under another one."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_LEGACY = "legacy"
_FULLER = frozenset({"accelerator"})  # modules whose older names have more to them than those of today


def install(prefix: str, roots: Sequence[str]) -> None:
    """Let ``import prefix.x`` give the module ``root.x`` of the first root that has it.

    Args:
        prefix: The package whose modules are found this way.
        roots: Packages that have them.
    """
    if not any(isinstance(each, AliasFinder) and each.prefix == prefix for each in sys.meta_path):
        # first: the finder of files would look into the folders of the other packages, and load their modules anew
        sys.meta_path.insert(0, AliasFinder(prefix, roots))


class AliasFinder(MetaPathFinder):
    """Finds the modules of a package in other packages.

    A path below ``legacy`` is looked for there, and without it: later releases moved the older modules to that place.

    Args:
        prefix: The package whose modules are found this way.
        roots: Packages that have them.
    """

    def __init__(self, prefix: str, roots: Sequence[str]) -> None:
        self.prefix, self._roots = prefix, roots

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find a module.

        Args:
            fullname: Its absolute name.
            path: Not looked at.
            target: Not looked at.

        Returns:
            How to load it; None if it is not below the package, or no other package has it.

        Raises:
            ImportError: It was documented and has no counterpart; says what to use.
        """
        del path, target
        if not fullname.startswith(f"{self.prefix}."):
            return None
        modules: list[ModuleType] = []
        for name in self._candidates(fullname.removeprefix(f"{self.prefix}.")):
            try:
                modules.append(importlib.import_module(name))
            except ImportError as error:
                if not (modules or _is_absent(error, name)):
                    raise
        return ModuleSpec(fullname, _AliasLoader(modules), is_package=True) if modules else None

    def _candidates(self, rest: str) -> Iterator[str]:
        first, _, older = rest.partition(".")
        for root in self._roots:
            if rest in _FULLER:
                yield f"{root}.{_LEGACY}.{rest}"
            yield f"{root}.{rest}"
            if first == _LEGACY:
                yield f"{root}.{older}" if older else root


class _AliasLoader(Loader):
    """Puts a module of another name in the place of the new one; of several, their names one after the other."""

    def __init__(self, modules: Sequence[ModuleType]) -> None:
        self._modules = modules

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:  # noqa: ARG002 (what a loader takes)
        """Let a new module be made, which is replaced if there is one other."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the new module, or put the other one in its place."""
        if len(self._modules) == 1:
            sys.modules[module.__name__] = self._modules[0]
            return
        modules, name = self._modules, module.__name__

        def load(attribute: str) -> Any:
            if attribute == "__all__":
                return [each for each in listing() if not each.startswith("_")]
            for each in modules:
                try:
                    return getattr(each, attribute)
                except AttributeError:
                    continue
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}", name=attribute)

        def listing() -> list[str]:
            return sorted({each for one in modules for each in getattr(one, "__all__", dir(one))})

        module.__doc__ = modules[0].__doc__
        module.__dict__.update(__getattr__=load, __dir__=listing)


def _is_absent(error: ImportError, name: str) -> bool:
    """Whether an import failed because the module itself, or one above it, does not exist."""
    missing = error.name or ""
    return isinstance(error, ModuleNotFoundError) and (name == missing or name.startswith(f"{missing}."))
