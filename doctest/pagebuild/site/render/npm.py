"""The programs of the website's project: npm, Docusaurus, and the browser for the tests."""

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

STAMP = ".lock-hash"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

_QUIET = {
    "NO_UPDATE_NOTIFIER": "1",
    "npm_config_update_notifier": "false",
    "npm_config_audit": "false",
    "npm_config_fund": "false",
    "PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD": "1",
}
_LOCKS = ("package.json", "package-lock.json")


class MissingToolError(Exception):
    """A program that this machine lacks; the message says how to get it."""


@dataclass(frozen=True)
class Npm:
    """npm in the website's folder."""

    website: Path
    environment: Mapping[str, str]

    @property
    def is_current(self) -> bool:
        """Whether the packages that are installed are those of the lock file."""
        stamp = self.website / "node_modules" / STAMP
        return stamp.is_file() and stamp.read_text() == self._lock_hash

    def command(self, program: str, *words: str) -> list[str]:
        """The command line of a call of `npm` or `node`."""
        found = shutil.which(program, path=self.environment.get("PATH"))
        if found is None:
            raise MissingToolError(
                f"The website is built by Node.js, version 20 or newer, with npm. Found no {program} on the path. "
                "Install both; on Debian: apt-get install nodejs npm"
            )
        return [found, *words]

    def write_lock_hash(self) -> None:
        """Remembers which lock file the packages belong to."""
        (self.website / "node_modules" / STAMP).write_text(self._lock_hash)

    @property
    def _lock_hash(self) -> str:
        return hashlib.sha256(b"\0".join((self.website / name).read_bytes() for name in _LOCKS)).hexdigest()


def quiet_environment(outer: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment, in which nothing phones home."""
    return dict(outer) | _QUIET


def find_browser(environment: Mapping[str, str]) -> str | None:
    """The browser for the tests: the one that `CHROMIUM` names, else a Chromium on the path."""
    if named := environment.get("CHROMIUM"):
        return named if os.access(named, os.X_OK) else None
    found = (shutil.which(name, path=environment.get("PATH")) for name in BROWSERS)
    return next((browser for browser in found if browser), None)
