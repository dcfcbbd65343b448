"""Which documented object a word in a docstring stands for."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from pagebuild.api.target import Target

_DOTTED = re.compile(r"~?([A-Za-z_]\w*(?:\.\w+)*)(?:\(.*\))?", re.DOTALL)


@dataclass(frozen=True)
class DocstringContext:
    """The docstring that a word is in."""

    target: Target
    # The parameters of that object: a word that names one of them stands for it, and for nothing else.
    parameters: frozenset[str] = frozenset()


@dataclass(frozen=True)
class DocumentedNames:
    """The names under which a library's objects are documented."""

    targets: Mapping[str, Target]
    aliases: Mapping[str, str]

    def find(self, text: str, place: DocstringContext) -> str | None:
        """The main name of an object, given a full name, a member of this class, or a unique short name."""
        match = _DOTTED.fullmatch(text.strip())
        if not match:
            return None
        name = match.group(1)
        head, _, rest = name.partition(".")
        if head in place.parameters:
            return None
        full = self.main(name) or self._resolve_member(name, place)
        return full or self._resolve_short_name(head, rest, place)

    def main(self, name: str) -> str | None:
        """The main name of an object that is given by any of its full names."""
        return name if name in self.targets else self.aliases.get(name)

    def _resolve_member(self, name: str, place: DocstringContext) -> str | None:
        owner = place.target.name if place.target.is_class else place.target.name.rpartition(".")[0]
        return self.main(f"{owner}.{name}")

    def _resolve_short_name(self, head: str, rest: str, place: DocstringContext) -> str | None:
        fitting = self._by_short_name.get(head, frozenset())
        near = {name for name in fitting if self.targets[name].module == place.target.module}
        only = near or fitting
        if len(only) != 1:
            return None
        (name,) = only
        return self.main(f"{name}.{rest}") if rest else name

    @cached_property
    def _by_short_name(self) -> Mapping[str, frozenset[str]]:
        found = defaultdict(set)
        for name, target in self.targets.items():
            if target.owner is None and target.kind != "module":
                found[target.qualname].add(name)
        return {short: frozenset(names) for short, names in found.items()}
