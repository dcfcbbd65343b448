"""The one door to every check: ``nox`` runs all, ``nox -s lint types`` some."""

import os
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
SESSIONS = ["lint", "types", "tests", "doctest", "api", "notebooks", "site"]
nox.options.sessions = SESSIONS

PROJECT = nox.project.load_toml("pyproject.toml")
CONSTRAINTS = ("-c", "constraints.txt")

# [Note: shared environments]
# Installing torch and all around it takes a minute, and so does compiling what is imported of it. So the checks of the
# code share one environment, and those of the documentation another. Each session adds what it needs: where `doctest`
# comes first, as here and in `.ci/run`, the tutorials run with the packages that their readers install, and no others.
TESTS, DOCS = "tests", "docs"


def prepare(session: nox.Session, environment: str, *groups: str) -> Path:
    """Install dependency groups, and the project with all extras, at the tested versions.

    See [Note: shared environments].

    Returns:
        The folder of the programs that were installed.
    """
    place = Path(".nox").absolute() / environment
    programs = place / "bin"
    if not (programs / "python").exists():
        session.run_install(sys.executable, "-m", "virtualenv", "--no-periodic-update", place, silent=True)
    session.env["PATH"] = os.pathsep.join([str(programs), os.environ["PATH"]])
    # What is imported is compiled then; compiling all of every package takes as long as installing it.
    session.env["PYTHONDONTWRITEBYTECODE"] = None
    packages = [package for group in groups for package in nox.project.dependency_groups(PROJECT, group)]
    pip = (programs / "python", "-m", "pip", "install", "--no-compile", *CONSTRAINTS)
    session.run_install(*pip, "-e", ".[all]", *packages, silent=True)
    return programs


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Every hook of ``.pre-commit-config.yaml`` on every file; ``-- --install`` runs them before each commit."""
    session.install(*CONSTRAINTS, *nox.project.dependency_groups(PROJECT, "lint"))
    if session.posargs == ["--install"]:
        session.run("pre-commit", "install")
    else:
        # The tools are installed here, not in the user's cache folder, which another account may own.
        session.env["PRE_COMMIT_HOME"] = str(Path(".nox").absolute() / "pre-commit")
        session.run("pre-commit", "run", *(session.posargs or ["--all-files", "--show-diff-on-failure"]))


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Static types."""
    programs = prepare(session, TESTS, "types")
    session.run(programs / "pyright", "--pythonpath", programs / "python", *session.posargs)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """All tests, three files at a time; ``nox -s tests -- tests/comm`` runs some, one after the other.

    Files that take longest come first: see ``tests/helpers/durations.py``. Many tests wait for other processes: three
    workers keep two cores busy.
    """
    programs = prepare(session, TESTS, "tests")
    session.run(programs / "pytest", *(session.posargs or ["-n", "3", "--dist", "loadfile", "--durations", "40"]))


@nox.session(venv_backend="none")
def quick(session: nox.Session) -> None:
    """Lint, the types of changed files and the tests nearest to them, in two minutes; ``-- main...`` since a branch.

    What it leaves out it names. ``nox -R -s quick`` installs nothing, and starts at once.
    """
    programs = prepare(session, TESTS, "lint", "types", "tests")
    session.run(programs / "ruff", "check", ".")
    session.run(programs / "ruff", "format", "--check", ".")
    session.run(programs / "python", "tests/quick.py", *session.posargs)


@nox.session(venv_backend="none")
def doctest(session: nox.Session) -> None:
    """All tutorials, in both languages; ``nox -s doctest -- booster_api`` runs one."""
    programs = prepare(session, DOCS)
    timeout = ["--timeout", "300"]  # of a page, on a machine of half the speed
    session.run(programs / "python", "docs_test.py", *timeout, *(session.posargs or ["--all"]))


def docs_build(session: nox.Session, programs: Path, *words: str) -> None:
    """Run one emitter; the others read what ``api`` writes, and that is quick where nothing has changed."""
    session.run(programs / "python", "docs_build.py", *words)


@nox.session(venv_backend="none")
def api(session: nox.Session) -> None:
    """The API reference, with no gap in it, and all that Sphinx warns of; ``-- --html`` writes the site as well."""
    programs = prepare(session, DOCS, "api")
    docs_build(session, programs, "api")
    docs_build(session, programs, "sphinx", "--check", *session.posargs)


@nox.session(venv_backend="none")
def notebooks(session: nox.Session) -> None:
    """All tutorials as notebooks, a few (``-- --execute-all``: all) of them executed; ``-- booster_api`` makes one."""
    programs = prepare(session, DOCS, "api", "notebooks")
    docs_build(session, programs, "api")
    docs_build(session, programs, "notebooks", *session.posargs)


@nox.session(venv_backend="none")
def site(session: nox.Session) -> None:
    """The website, built and tested, ``-- --full`` on each page; ``-- serve`` serves it, with ``--port 0`` anywhere."""
    programs = prepare(session, DOCS, "api")
    docs_build(session, programs, "api")
    if session.posargs[:1] == ["serve"]:
        docs_build(session, programs, "site", "--build")
        docs_build(session, programs, "site", "--serve", *session.posargs[1:])
    else:
        docs_build(session, programs, "site", "--build", "--test", *session.posargs)


# What the sessions leave out otherwise; docs/decisions/0001-what-checks-run-when.md says what catches the same faults.
IN_FULL = {"api": ["--html"], "notebooks": ["--execute-all"], "site": ["--full"]}


@nox.session(venv_backend="none")
def release(session: nox.Session) -> None:
    """Every session in full: each page in the browser, each notebook executed, the Sphinx site in both languages."""
    for name in SESSIONS:
        session.notify(name, IN_FULL.get(name, []))
