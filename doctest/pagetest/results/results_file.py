"""The results file: what is known of every page, in every language and on every device, from one run or from many."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagetest.finding import shown
from pagetest.usage import UsageError

_KEY = ("page", "lang", "device")
_TEXTS = (*_KEY, "status")


class ResultsFileError(UsageError):
    """The file holds something else than results."""


@dataclass(frozen=True)
class ResultsFile:
    """A JSON file of the form `{"results": [entry, ...]}`, with one entry per page, language and device.

    Attributes:
        path: The file, which need not exist.
    """

    path: Path

    def read(self) -> list[dict[str, Any]]:
        """All entries, sorted; none where there is no file.

        Raises:
            ResultsFileError: The file cannot be read, or is none of ours.
        """
        try:
            content = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._fault(f"it cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise self._fault(f"it is no JSON ({error})") from None
        entries = content.get("results") if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(_is_entry(entry) for entry in entries):
            raise self._fault('it is not of the form {"results": [{"page", "lang", "device", "status", ...}, ...]}')
        return sorted(entries, key=_key)

    def enter(self, new: Sequence[Mapping[str, Any]]) -> None:
        """Adds entries in the place of older ones for the same page, language and device; all others stay.

        An entry without a device, of a page that is not run, holds for every device.

        Raises:
            ResultsFileError: The file is none of ours; it is left as it is.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            kept = [old for old in self.read() if not any(_replaces(entry, old) for entry in new)]
            content = {"results": sorted([*kept, *map(dict, new)], key=_key)}
            fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            fresh.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            fresh.replace(self.path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _fault(self, what: str) -> ResultsFileError:
        return ResultsFileError(
            f"{shown(self.path)} should hold results, but {what}: move it away or name another file"
        )


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(name), str) for name in _TEXTS)


def _key(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(entry[name] for name in _KEY)


def _replaces(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    same_page = (new["page"], new["lang"]) == (old["page"], old["lang"])
    return same_page and (new["device"] == old["device"] or not new["device"] or not old["device"])
