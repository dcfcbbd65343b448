"""Classes and functions that a config names."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

from colossal.errors import ConfigError

_T = TypeVar("_T", bound=Callable[..., Any])


class Registry:
    """A table from names to classes and functions.

    Args:
        name: What is registered, for errors.
        third_party_library: Modules, looked through in their order, for names that are not registered.

    Example:
        >>> import torch
        >>> from colossal.legacy.registry import Registry
        >>> models = Registry("models", third_party_library=[torch.nn])
        >>> @models.register_module
        ... class Net(torch.nn.Linear): ...
        >>> models.get_module("Net") is Net, models.get_module("ReLU") is torch.nn.ReLU, models.has("Nothing")
        (True, True, False)
    """

    def __init__(self, name: str, third_party_library: Sequence[ModuleType] | None = None) -> None:
        self._name = name
        self._registry: dict[str, Callable[..., Any]] = {}
        self._libraries = tuple(third_party_library or ())

    @property
    def name(self) -> str:
        """What is registered."""
        return self._name

    def register_module(self, module_class: _T) -> _T:
        """Register a class or a function under its name; a decorator.

        Args:
            module_class: What is registered.

        Returns:
            The same.

        Raises:
            ConfigError: Something else has this name already.
        """
        name = module_class.__name__
        found = self._registry.setdefault(name, module_class)
        if found is not module_class and (found.__module__, found.__qualname__) != (
            module_class.__module__,
            module_class.__qualname__,
        ):
            raise ConfigError(f"Names of {self._name} are unique. Found {name} of {found.__module__}. Rename one.")
        self._registry[name] = module_class
        return module_class

    def get_module(self, module_name: str) -> Any:
        """Find what has a name: registered, or in one of the libraries.

        Args:
            module_name: The name.

        Returns:
            The class or function.

        Raises:
            ConfigError: Nothing has.
        """
        if module_name in self._registry:
            return self._registry[module_name]
        for library in self._libraries:
            if hasattr(library, module_name):
                return getattr(library, module_name)
        there = ", ".join(sorted(self._registry)) or "nothing"
        raise ConfigError(
            f"A config names what is registered. Found {module_name!r} among {self._name}, which has {there}. "
            "Register it with @register_module, and import the module that does."
        )

    def has(self, module_name: str) -> bool:
        """Whether something has a name.

        Args:
            module_name: The name.

        Returns:
            True if it is registered, or in one of the libraries.
        """
        return module_name in self._registry or any(hasattr(library, module_name) for library in self._libraries)


def _libraries() -> dict[str, list[ModuleType]]:
    import torch.utils.data

    from colossal._src.nn import lr_scheduler, optimizer

    return {
        "layers": [torch.nn],
        "losses": [torch.nn],
        "optimizers": [torch.optim, optimizer],
        "lr_schedulers": [torch.optim.lr_scheduler, lr_scheduler],
        "data_samplers": [torch.utils.data],
    }


_LIBRARIES = _libraries()

LAYERS = Registry("layers", _LIBRARIES["layers"])
"""Layers; those of torch too."""
LOSSES = Registry("losses", _LIBRARIES["losses"])
"""Losses; those of torch too."""
MODELS = Registry("models")
"""Models."""
OPTIMIZERS = Registry("optimizers", _LIBRARIES["optimizers"])
"""Optimizers; those of torch too."""
DATASETS = Registry("datasets")
"""Datasets."""
DIST_GROUP_INITIALIZER = Registry("initializers of groups")
"""What forms the groups of a parallel mode of the program's own."""
GRADIENT_HANDLER = Registry("gradient handlers")
"""What changes gradients between backward and step."""
HOOKS = Registry("hooks of a trainer")
"""Hooks of `Trainer`."""
SCHEDULE = Registry("schedules")
"""How a batch goes through the model."""
DATA_SAMPLERS = Registry("data samplers", _LIBRARIES["data_samplers"])
"""Samplers; those of torch too."""
LR_SCHEDULERS = Registry("learning-rate schedules", _LIBRARIES["lr_schedulers"])
"""Schedules of the learning rate; those of torch too."""
TRANSFORMS = Registry("transforms")
"""Transforms of samples."""
OPHOOKS = Registry("hooks of operators")
"""Hooks of modules' forward and backward."""
