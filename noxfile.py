"""The one door to every check: ``nox`` runs all, ``nox -s lint types`` some."""

import nox

nox.needs_version = ">=2025.2"
nox.options.sessions = ["lint", "types", "tests", "doctest", "api", "notebooks", "site"]

PROJECT = nox.project.load_toml("pyproject.toml")


def install(session: nox.Session, *groups: str) -> None:
    """Install dependency groups, and the project with all extras, at the tested versions."""
    packages = [package for group in groups for package in nox.project.dependency_groups(PROJECT, group)]
    # What is imported is compiled then; compiling all of every package takes as long as installing it.
    session.install("--no-compile", "-c", "constraints.txt", "-e", ".[all]", *packages)


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Style and formatting of the code, and the rules of the pages."""
    session.install("-c", "constraints.txt", *nox.project.dependency_groups(PROJECT, "lint"), "markdown-it-py")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "docs_test.py", "--check")


@nox.session(reuse_venv=True)
def types(session: nox.Session) -> None:
    """Static types."""
    install(session, "types")
    session.run("pyright", "--pythonpath", f"{session.bin}/python", *session.posargs)


@nox.session(reuse_venv=True)
def tests(session: nox.Session) -> None:
    """All tests, two files at a time; ``nox -s tests -- tests/comm`` runs some, one after the other."""
    install(session, "tests")
    session.run("pytest", *(session.posargs or ["-n", "2", "--dist", "loadfile", "--durations", "40"]))


@nox.session(reuse_venv=True)
def doctest(session: nox.Session) -> None:
    """All tutorials, in both languages; ``nox -s doctest -- booster_api`` runs one."""
    install(session)
    options = ["--json", "build/docs/results.json", "--timeout", "300"]  # of a page, on a machine of half the speed
    session.run("python", "docs_test.py", *options, *(session.posargs or ["--all"]))


@nox.session(reuse_venv=True)
def api(session: nox.Session) -> None:
    """The API reference as data, with no gap in it, and the Sphinx site in both languages, with no warning."""
    install(session, "api")
    session.run("python", "docs_build.py", "api")
    session.run("python", "docs_build.py", "sphinx")


@nox.session(reuse_venv=True)
def notebooks(session: nox.Session) -> None:
    """All tutorials as notebooks, executed; ``nox -s notebooks -- booster_api`` makes one."""
    install(session, "api", "notebooks")
    session.run("python", "docs_build.py", "api")
    session.run("python", "docs_build.py", "notebooks", *session.posargs)


@nox.session(reuse_venv=True)
def site(session: nox.Session) -> None:
    """The website, built and tested; ``nox -s site -- serve`` builds and serves it, with ``--port 0`` anywhere free."""
    install(session, "api")
    session.run("python", "docs_build.py", "api")
    if session.posargs[:1] == ["serve"]:
        session.run("python", "docs_build.py", "site", "--build")
        session.run("python", "docs_build.py", "site", "--serve", *session.posargs[1:])
    else:
        session.run("python", "docs_build.py", "site", "--build", "--test", *session.posargs)
