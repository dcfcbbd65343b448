"""The records: what is known of every page, in every language and on every device, a file for each."""

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagetest.finding import Finding, UsageError

FOLDER_NAME = "verified"
"""The name of the folder, next to the one where pages are run."""

_KEY = ("device", "lang", "page")
_TEXTS = (*_KEY, "status")


class BrokenRecordError(UsageError):
    """A file holds something else than the record of its page; `finding` says which and why."""

    def __init__(self, path: Path, what: str) -> None:
        self.finding = Finding(path, 1, f"this should hold the record of a run, but {what}: remove it, run the page")
        super().__init__(str(self.finding))


@dataclass(frozen=True)
class Records:
    """A folder with `cpu/en/basics/booster_api.json`, and the figures of that run in `cpu/en/basics/booster_api`."""

    folder: Path  # the folder, which need not exist

    def read(self) -> list[dict[str, Any]]:
        """All records, sorted by device, language and page."""
        return [self._read(file) for file in sorted(self.folder.glob("*/*/**/*.json"))]

    def find(self, device: str, language: str, page: str) -> dict[str, Any] | None:
        """The record of a page; None where there is none."""
        file = self._file(device, language, page)
        return self._read(file) if file.is_file() else None

    def figure(self, record: Mapping[str, Any], name: str) -> Path:
        """The file of a figure that the page drew."""
        return self._file(*(record[key] for key in _KEY)).with_suffix("") / name

    def write(self, record: Mapping[str, Any], figures: Mapping[str, bytes] | None = None) -> None:
        """Writes a record in the place of the one that its page has for the device; all others stay."""
        file = self._file(*(record[key] for key in _KEY))
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(file.with_suffix(""), ignore_errors=True)
        for name, content in (figures or {}).items():
            path = self.figure(record, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        fresh = file.with_name(f".{file.name}.{os.getpid()}")
        fresh.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        fresh.replace(file)

    def remove(self, language: str, page: str) -> None:
        """Removes what is known of a page that has nothing to run any more."""
        for folder in [each for each in self.folder.glob("*") if each.is_dir()]:
            file = self._file(folder.name, language, page)
            file.unlink(missing_ok=True)
            shutil.rmtree(file.with_suffix(""), ignore_errors=True)

    def remove_others(self, pages: Collection[str]) -> None:
        """Removes what is known of all other pages, which do not exist any more."""
        for record in self.read():
            if record["page"] not in pages:
                self.remove(record["lang"], record["page"])

    def _file(self, device: str, language: str, page: str) -> Path:
        return self.folder / device / language / f"{page}.json"

    def _read(self, file: Path) -> dict[str, Any]:
        try:
            record = json.loads(file.read_bytes())
        except OSError as error:
            raise BrokenRecordError(file, f"it cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise BrokenRecordError(file, f"it is no JSON ({error})") from None
        if faults := list(self._faults(record, file)):
            raise BrokenRecordError(file, faults[0])
        return record

    def _faults(self, record: object, file: Path) -> Iterator[str]:
        if not isinstance(record, dict) or not all(isinstance(record.get(name), str) for name in _TEXTS):
            yield f"it has not all of {', '.join(_TEXTS)}"
        elif self._file(*(record[key] for key in _KEY)) != file:
            yield f"it is about {' '.join(record[key] for key in _KEY)}"
