"""The website as it stands: built, tested, served."""

import resource
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagebuild.site.render.build_errors import BuildErrorLocator
from pagebuild.site.render.npm import MissingToolError, Npm, find_browser
from pagetest.finding import with_count
from pagetest.limits import scaled
from pagetest.run.command import CommandOutcome
from pagetest.run.session import Session

LIMIT_SECONDS = 1800.0


@dataclass(frozen=True)
class Website:
    """The website's project, ready to be built."""

    root: Path
    website: Path
    environment: Mapping[str, str]

    def build(self) -> bool:
        """Installs the packages if they are not those of the lock file, and builds all languages."""
        npm = Npm(self.website, self.environment)
        if not npm.is_current:
            if self._run(npm.command("npm", "ci"), "npm-ci.log").returncode:
                _print_lines("npm ci failed: see above")
                return False
            npm.write_lock_hash()
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        outcome = self._run(npm.command("npm", "run", "build"), "site.log")
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        log = (self._logs / "site.log").read_text(encoding="utf-8", errors="replace")
        findings = BuildErrorLocator(self.root, self.website).findings(log)
        _print_lines(*findings)
        if outcome.returncode or outcome.timed_out or findings:
            _print_lines(
                f"the site was not built: {with_count(len(findings), 'finding')}, exit code {outcome.returncode}"
            )
            return False
        cpu = f"{used.ru_utime - before:.0f} s of user CPU"
        _print_lines(
            f"site built: {outcome.seconds:.0f} s, {cpu}, largest process {used.ru_maxrss * 1024 / 1e9:.2f} GB"
        )
        return True

    def test(self, touched: Path | None = None) -> bool:
        """Runs the website's own tests, in a browser where there is one; without one it fails in CI only."""
        # Without the file `touched`, which names pages, the browser opens all of them, and each check is
        # shown to fail on a fault.
        npm = Npm(self.website, self.environment)
        browser = find_browser(self.environment)
        if browser:
            runs = [("test", "--", "--touched", str(touched))] if touched else [("test",), ("run", "test:checks")]
            commands = [npm.command("npm", *words) for words in runs]
            return not any(self._run(words, "site-tests.log", {"CHROMIUM": browser}).returncode for words in commands)
        _print_lines(
            "THE BROWSER TESTS DID NOT RUN: they need Chromium, and there is none on the path or in CHROMIUM. "
            "Install it; on Debian: apt-get install chromium"
        )
        passed = not self._run(npm.command("node", "--test", "tests/unit/"), "site-tests.log").returncode
        return passed and not self.environment.get("CI")

    def serve(self, port: int) -> int:
        """Serves the built site until it is stopped."""
        # Port 0 stands for any that is free.
        if not (self.root / "build" / "site" / "index.html").is_file():
            raise MissingToolError("There is no site to serve in build/site. Build it: nox -s site")
        serve = ("npm", "run", "serve", "--", "--port", str(port or _free_port()))
        words = Npm(self.website, self.environment).command(*serve)
        try:
            return subprocess.run(words, cwd=self.website, env=dict(self.environment), check=False).returncode
        except KeyboardInterrupt:
            return 0

    @property
    def _logs(self) -> Path:
        return self.root / "build" / "logs"

    def _run(self, words: Sequence[str], log: str, more: Mapping[str, str] | None = None) -> CommandOutcome:
        self._logs.mkdir(parents=True, exist_ok=True)
        environment = dict(self.environment) | dict(more or {})
        limit = scaled(LIMIT_SECONDS)
        session = Session(words, self.website, environment, self._logs / log, limit, lambda: None, echo=True)
        return session.run()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _print_lines(*lines: object) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()
