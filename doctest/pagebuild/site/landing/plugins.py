"""The plugins in the order in which the chooser tries them, and which of them exist today."""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from pagebuild.site.edition import BrokenInputError
from pagetest.checks.plugin_tables import FILE, PluginTables
from pagetest.finding import Finding
from pagetest.model.tree import LANGUAGES

PACKAGE = "colossal.booster.plugin"
WORKS, PLANNED = "works", "planned"
DEVICES = ("cpu", "cuda")
"""What a plugin is shown with that takes any device."""

QUESTIONS = {
    "workers": ("one", "many"),
    "fits": ("all", "states", "none"),
    "goal": ("simple", "speed", "memory"),
}


@dataclass(frozen=True)
class PluginChoice:
    """When to take a plugin."""

    key: str
    name: str  # the class; empty for a Booster without a plugin
    page: str  # the page that teaches it; empty as long as it is not built
    workers: tuple[str, ...]  # answers to: one process, or many?
    # Answers to: what fits on one device? All of the training, only the model without its `states`, or none.
    fits: tuple[str, ...]
    goal: tuple[str, ...]  # answers to: what matters most?
    arguments: str = ""
    # The keywords without which there is none, for one process.
    smallest_arguments: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, str] = field(default_factory=dict)  # what speaks for it, by language

    @property
    def plugin(self) -> type | None:
        """The class; None where it is not built, or where there is none."""
        return getattr(importlib.import_module(PACKAGE), self.name, None) if self.name else None

    def make_plugin(self, **others: Any) -> Any:
        """Makes one for one process; None where there is none."""
        return None if self.plugin is None else self.plugin(**self.smallest_arguments, **others)

    @property
    def state(self) -> str:
        """Whether it works today: the library decides."""
        return WORKS if not self.name or self.plugin is not None else PLANNED

    @property
    def code(self) -> str:
        """The lines that make a Booster with it, and what they import."""
        imported = "from colossal.booster import Booster\n"
        if not self.name:
            return f"{imported}\nbooster = Booster()"
        made = f"plugin = {self.name}({self.arguments})\nbooster = Booster(plugin=plugin)"
        return f"{imported}from {PACKAGE} import {self.name}\n\n{made}"

    def row(self) -> dict[str, Any]:
        """What the website shows."""
        from colossal._src.booster.plugin.single_process import SingleProcessPlugin

        found: Any = self.plugin if self.name else SingleProcessPlugin
        return {
            "key": self.key,
            "name": self.name or "Booster",
            "code": self.code,
            "state": self.state,
            "object": f"{PACKAGE}.{self.name}" if self.plugin else None,
            "page": self.page if self.state == WORKS else None,
            "devices": [] if self.state == PLANNED else list(getattr(found, "supported_devices", ()) or DEVICES),
            "precisions": list(getattr(found, "supported_precisions", ())),
            "text": self.text,
            "when": {"workers": list(self.workers), "fits": list(self.fits), "goal": list(self.goal)},
        }


def read_choices(path: Path) -> tuple[PluginChoice, ...]:
    """The plugins in the order of the file from which the tables on pages are made too."""
    fields = ("key", "name", "page", "workers", "fits", "goal", "arguments", "smallest_arguments")
    found = []
    for plugin in PluginTables(path).plugins.values():
        values = {name: plugin[name] for name in fields if name in plugin}
        values |= {name: tuple(values[name]) for name in QUESTIONS}
        found.append(PluginChoice(**values, text={language: plugin[language]["advice"] for language in LANGUAGES}))
    return tuple(found)


CHOICES = read_choices(Path(__file__).parents[4] / "docs" / FILE)


def check_choices(offered: tuple[str, ...], choices: tuple[PluginChoice, ...] = CHOICES) -> None:
    """Every plugin of the library can be chosen, and every combination of answers leads to one."""
    known = {choice.name for choice in choices}
    faults = [f"the library has the plugin {name}: say when to choose it" for name in offered if name not in known]
    faults += [
        f"no plugin for {' and '.join(answers)}: add the answers to one" for answers in _uncovered_answers(choices)
    ]
    faults += [
        f"{choice.name} works, and no page teaches it: name the page"
        for choice in choices
        if choice.state == WORKS and not choice.page
    ]
    if faults:
        raise BrokenInputError(*(Finding(Path(__file__), 1, fault) for fault in faults))


def offered_plugins() -> tuple[str, ...]:
    """The concrete plugins that the library offers."""
    package = importlib.import_module(PACKAGE)
    names = (name for name in package.__all__ if isinstance(getattr(package, name), type))
    return tuple(name for name in names if issubclass(getattr(package, name), package.Plugin) and name != "Plugin")


def _uncovered_answers(choices: tuple[PluginChoice, ...]) -> Iterator[tuple[str, ...]]:
    for answers in product(*QUESTIONS.values()):
        held = (
            all(answer in getattr(choice, question) for question, answer in zip(QUESTIONS, answers, strict=True))
            for choice in choices
        )
        if not any(held):
            yield answers
