"""The import graph: which of the project's files a program can reach, found without importing any."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

from pagetest.graph.references import EVERYTHING, References

# [Note: what counts as reached]
# A file is reached if the code may execute it: every import counts, at the top of a file or inside a function, and so
# does the `__init__.py` of every package on the way. A package that loads its names when they are first used is not
# charged with all of them: `colossal.launch` leads only to the module of `launch`. Where the name cannot be known, all
# candidates count. The graph may therefore hold a file that a run does not touch, and never lacks one that it does,
# unless a name of a module is put together at run time. A public module that lacks a name may have it from a finder of
# its package, which nothing shows: what the package's own `__getattr__` may load counts then.


@dataclass(frozen=True)
class ImportGraph:
    """The modules of a project."""

    source: Path  # the folder that holds the top-level packages
    # Files that have been deleted; they count as empty ones, so that what refers to them still leads there.
    gone: frozenset[Path] = frozenset()
    _edges: dict[str, frozenset[str]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def files(self) -> Mapping[str, Path]:
        """The file of every module, by its dotted name."""
        found = {*self.source.rglob("*.py"), *(path for path in self.gone if path.is_relative_to(self.source))}
        return {self._module_name(path): path for path in sorted(found, key=lambda path: path.name == "__init__.py")}

    @cached_property
    def roots(self) -> frozenset[str]:
        """The names of the project's top-level packages and modules."""
        return frozenset(name.partition(".")[0] for name in self.files)

    def reached(self, code: References) -> frozenset[Path]:
        """The project's files that the code reaches; see [Note: what counts as reached]."""
        return frozenset(self.distances(code))

    def distances(self, code: References) -> Mapping[Path, int]:
        """The project's files that the code reaches, each with the number of files between it and the code."""
        nearest = set(self._modules_along({*code.names, *self._project_names(code.names_in_strings)}))
        found: dict[str, int] = {}
        while nearest:
            found |= dict.fromkeys(nearest, max(found.values(), default=-1) + 1)
            nearest = {module for each in nearest for module in self._imported_modules(each)} - found.keys()
        return {self.files[module]: distance for module, distance in found.items()}

    def external_imports(self, code: References) -> frozenset[str]:
        """What the code, and the project's files that it reaches, import of other packages."""
        files = [read_references(path, self._package(path)) for path in self.reached(code) if path.is_file()]
        names = {name for part in [code, *files] for name in part.imports}
        return frozenset(name for name in names if name.partition(".")[0] not in self.roots)

    def definition_files(self, name: str) -> frozenset[Path]:
        """The files that define a documented name: its module, for a member also the base class that has it."""
        return frozenset(self._find_definition(name, set()))

    def _module_name(self, path: Path) -> str:
        parts = path.relative_to(self.source).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _package(self, path: Path) -> str:
        """The package against which a file's relative imports are resolved."""
        return ".".join(path.relative_to(self.source).parts[:-1])

    def _read_module(self, module: str) -> References:
        path = self.files.get(module)
        if path is None or not path.is_file():
            return References(ast.Module([], []))
        return read_references(path, self._package(path))

    def _imported_modules(self, module: str) -> frozenset[str]:
        """The modules to which a module's own code leads."""
        if module not in self._edges:
            code = self._read_module(module)
            names = code.names | (frozenset(self._project_names(code.strings)) if code.is_dynamic else frozenset())
            self._edges[module] = frozenset(self._modules_along(names))
        return self._edges[module]

    def _project_names(self, texts: Iterable[str]) -> Iterator[str]:
        """Those texts that begin with one of the project's names."""
        return (text for text in texts if text.partition(".")[0] in self.roots and text.isascii() and " " not in text)

    def _modules_along(self, names: Iterable[str]) -> Iterator[str]:
        """The modules on the way along each dotted name."""
        waiting, seen = list(names), set()
        while waiting:
            name = waiting.pop()
            if name in seen or name.partition(".")[0] not in self.roots:
                continue
            seen.add(name)
            module, rest = self._split_module(name)
            parts = module.split(".")
            packages = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
            yield from (package for package in packages if package in self.files)
            if rest:
                waiting.extend(self._lazy_modules(module, rest))

    def _split_module(self, name: str) -> tuple[str, list[str]]:
        """The longest module at the head of a dotted name, and the attributes after it."""
        parts = name.split(".")
        heads = ((length, ".".join(parts[:length])) for length in range(len(parts), 0, -1))
        length, module = next(((length, head) for length, head in heads if head in self.files), (1, parts[0]))
        return module, parts[length:]

    def _lazy_modules(self, module: str, attributes: list[str]) -> Iterator[str]:
        """Where an attribute of a module leads if the module loads it when it is first used."""
        code = self._read_module(module)
        first, *rest = attributes
        if first in code.defined_names:
            return
        if code.lazy_names is None:
            if self._asks_the_root(module, first):
                yield from self._lazy_modules(module.partition(".")[0], ["?"])
            return
        if first in code.lazy_names:
            yield ".".join([_full_name(code, first, code.lazy_names[first]), *rest])
            return
        yield from (_full_name(code, name, location) for name, location in code.lazy_names.items())
        if first != EVERYTHING:
            yield from self._project_names(code.strings)

    def _asks_the_root(self, module: str, name: str) -> bool:
        """Whether a public module, which lacks a name, may have it from the package, which extends its modules."""
        public = not any(part.startswith("_") for part in [*module.split("."), name]) and name != EVERYTHING
        return public and module not in self.roots

    def _find_definition(self, name: str, seen: set[str]) -> Iterator[Path]:
        module, rest = self._split_module(name)
        path = self.files.get(module)
        if name in seen or path is None:
            return
        seen.add(name)
        code = self._read_module(module)
        first, *members = rest or [""]
        places = code.bindings.get(first, frozenset()) | frozenset(self._lazy_modules(module, rest) if rest else ())
        for place in places:
            yield from self._find_definition(".".join([place, *members]), seen)
        if not places:
            yield path
            for base in _bases(code.tree, first, members):
                known = code.bindings.get(base.partition(".")[0], frozenset({f"{module}.{base.partition('.')[0]}"}))
                for place in known:
                    yield from self._find_definition(".".join([place, *base.split(".")[1:], *members]), seen)


def _full_name(code: References, name: str, location: str) -> str:
    """The full name of an entry of a table: the location is a module, or `module:name`, and may be relative."""
    plain = location.lstrip(".").replace(":", ".")
    return f"{code.absolute(plain, len(location) - len(location.lstrip('.')))}.{name}"


def _bases(tree: ast.Module, name: str, members: list[str]) -> Iterator[str]:
    """The bases of a class that lacks the member which is asked for."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name and members and members[0] not in set(_members(node)):
            yield from (ast.unparse(base) for base in node.bases if isinstance(base, ast.Name | ast.Attribute))


def _members(node: ast.ClassDef) -> Iterator[str]:
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield part.name
        elif isinstance(part, ast.AnnAssign | ast.Assign):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def read_references(path: Path, package: str) -> References:
    """Parses a file; once for each state of it that this process meets."""
    facts = path.stat()
    return _read_references(path, package, facts.st_mtime_ns, facts.st_size)


@lru_cache(maxsize=4096)
def _read_references(path: Path, package: str, _changed_ns: int, _size: int) -> References:
    try:
        return References(ast.parse(path.read_bytes()), package)
    except (SyntaxError, ValueError):
        return References(ast.Module([], []), package)  # whoever imports it fails, and names it
