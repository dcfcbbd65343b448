"""What the reference documents, and under which name each object is described once."""

import difflib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from pagebuild.api.names import DocumentedNames
from pagebuild.api.target import Resolver, Target, UnknownNameError

# [Note: main names]
# `colossal.Booster`, `colossal.booster.Booster` and `colossal._src.booster.booster.Booster` are one class. It is
# described under the public name whose module is nearest to its definition, private packages not counted:
# `colossal.booster.Booster`. Every other name is an alias: it has an entry of its own, which says the same and points
# to the main one.


@dataclass(frozen=True)
class Inventory:
    """The documented objects of a library."""

    resolver: Resolver
    hook_names: tuple[str, ...] = ()  # names that pages ask for in addition to the public ones

    @cached_property
    def main(self) -> Mapping[str, Target]:
        """Every public object under its main name, and the public members of classes, see [Note: main names]."""
        groups: dict[str, list[Target]] = defaultdict(list)
        for target in self.resolver.public_names:
            groups[target.canonical].append(target)
        found = [max(group, key=_name_rank) for group in groups.values()]
        found += [member for target in found for member in self.resolver.members(target)]
        return {target.name: target for target in sorted(found, key=lambda target: target.name)}

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """Every other full name, the canonical ones included, mapped to the main name."""
        found: dict[str, str] = {}
        for name, target in sorted(self.main.items(), key=lambda item: _is_inherited(item[1])):
            found.setdefault(target.canonical, name)
            if target.owner is None:
                others = [one for one in self.resolver.public_names if one.canonical == target.canonical]
                for other in [*(one.name for one in others), target.canonical]:
                    found[other] = name
                    for member in self.resolver.members(target):
                        found[f"{other}.{member.name.rpartition('.')[2]}"] = member.name
        return {name: main for name, main in found.items() if name not in self.main}

    @cached_property
    def names(self) -> DocumentedNames:
        """The names that docstrings may refer to."""
        return DocumentedNames(self.main, self.aliases)

    @cached_property
    def entries(self) -> Mapping[str, Target]:
        """Everything that gets an entry: the main names, the public aliases, and what pages ask for."""
        found = dict(self.main)
        for target in [*self.resolver.public_names, *map(self.resolver.resolve, self.hook_names)]:
            found.setdefault(target.name, target)
        return dict(sorted(found.items()))

    def why_unknown(self, name: str) -> str | None:
        """Why a page cannot ask for a name; None if it can."""
        try:
            self.resolver.resolve(name)
        except UnknownNameError as error:
            return f"`{name}` is not in the API reference: {error}{self._suggest_name(name)}"
        if self.names.main(name) is None:
            return f"`{name}` is not public: offer it in the `__all__` of a public module{self._suggest_name(name)}"
        return None

    def _suggest_name(self, name: str) -> str:
        close = difflib.get_close_matches(name, self.main, n=3, cutoff=0.6)
        last = name.rpartition(".")[2]
        close += [one for one in self.main if one.rpartition(".")[2] == last]
        return f"; the nearest: {', '.join(list(dict.fromkeys(close))[:3])}" if close else ""


def _name_rank(target: Target) -> tuple[bool, int, str]:
    """How well a name fits the place of the definition; the longest shared path wins, and its own spelling."""
    module, _, spelling = target.name.rpartition(".")
    place = [part for part in target.module.split(".") if not part.startswith("_")]
    shared = _num_common_parts(module.split("."), place)
    return spelling == target.qualname, shared, target.name


def _is_inherited(target: Target) -> bool:
    return target.owner is not None and target.qualname.rpartition(".")[0] != target.owner.__qualname__


def _num_common_parts(one: Iterable[str], other: Iterable[str]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
