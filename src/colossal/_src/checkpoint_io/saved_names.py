"""What the names in a model's state are in the files of a checkpoint."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, final

from colossal._src.interface import AdapterNames
from colossal._src.tensor import strip_compile_prefix

T = TypeVar("T")

# [Note: two models in one] A `peft.PeftModel` renames every parameter of the model that it wraps. A checkpoint
# under those names is only useful to the program that wrote it; next to a config.json it is even taken for the
# base model, whose own names are all missing then. So the base model is saved under its own names, and adapters under
# those of peft's files. A tensor that belongs to both, such as a bias that is trained, is saved under both names.


@final
class SavedNames:
    """The names of a state in files: those of the base model for its tensors, those of peft's files for adapters."""

    def __init__(self, adapters: AdapterNames | None = None) -> None:
        self.has_adapters = adapters is not None
        self._saved: dict[str, tuple[str, ...]] = {}
        if adapters is not None:
            for full, saved in (*adapters.base.items(), *((full, saved) for saved, full in adapters.adapters.items())):
                self._saved[full] = (*self._saved.get(full, ()), strip_compile_prefix(saved))
        self._base = set() if adapters is None else {strip_compile_prefix(name) for name in adapters.base.values()}
        self._full = {saved: full for full, names in self._saved.items() for saved in names}
        self._first = {strip_compile_prefix(full): names[0] for full, names in self._saved.items()}

    def __getitem__(self, name: str) -> tuple[str, ...]:
        """Return the names in files of a name in the state; adapters that are not trained keep theirs."""
        return self._saved.get(name, (strip_compile_prefix(name),))

    def split(self, items: Iterable[T], name_of: Callable[[T], str] = str) -> tuple[list[T], list[T]]:
        """Return what belongs to the base model, and what belongs to its adapters."""
        parts: tuple[list[T], list[T]] = ([], [])
        for item in items:
            parts[self.has_adapters and name_of(item) not in self._base].append(item)
        return parts

    def translated(self, items: Mapping[str, T], known: Mapping[str, object]) -> dict[str, T]:
        """Return entries of a checkpoint under the names of today: earlier ones held the names of the `PeftModel`."""
        return {name if name in known else self._first.get(name, name): item for name, item in items.items()}

    def in_state(self, saved: str) -> str:
        """Return the name in the state of a name in files."""
        return self._full.get(saved, saved)

    def metadata(self, metadata: Mapping[str, Any]) -> "OrderedDict[str, Any]":
        """Return what torch notes of each module under the names that modules have in files."""
        if not self.has_adapters:
            return OrderedDict(metadata)
        modules = {_module(saved): _module(full) for saved, full in self._full.items() if saved in self._base}
        return OrderedDict((saved, metadata[full]) for saved, full in modules.items() if full in metadata)


def _module(name: str) -> str:
    return name.rpartition(".")[0]
