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
    """Install dependency groups, and the project with all extras, at the tested versions; nothing for ``nox -R``.

    See [Note: shared environments].

    Returns:
        The folder of the programs that were installed.
    """
    place = Path(".nox").absolute() / environment
    programs = place / "bin"
    session.env["PATH"] = os.pathsep.join([str(programs), os.environ["PATH"]])
    # What is imported is compiled then; compiling all of every package takes as long as installing it.
    session.env["PYTHONDONTWRITEBYTECODE"] = None
    if {"-R", "--no-install"} & set(sys.argv):  # nox itself knows this of its own environments only
        return programs
    if not (programs / "python").exists():
        session.run_install(sys.executable, "-m", "virtualenv", "--no-periodic-update", place, silent=True)
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


@nox.session(venv_backend="none")
def examples(session: nox.Session) -> None:
    """Every program of ``examples/`` at smoke size on two ranks; each must learn."""
    programs = prepare(session, TESTS, "tests")
    session.run(programs / "pytest", "tests/examples", "--durations", "0", *session.posargs)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """All benchmarks at a size that takes a minute: that they run, and that what they compare agrees."""
    programs = prepare(session, TESTS, "tests")
    session.run(programs / "python", "benchmarks/smoke.py", *session.posargs)


@nox.session(venv_backend="none")
def coverage(session: nox.Session) -> None:
    """How many lines of each package the tests run, ranks and subprocesses included; ``-- tests/amp`` runs some."""
    programs = prepare(session, TESTS, "tests", "coverage")
    selected = session.posargs or ["-n", "3", "--dist", "loadfile"]
    Path("build/coverage").mkdir(parents=True, exist_ok=True)
    session.run(programs / "coverage", "erase")
    # Tests of how long imports take, and of what processes leave behind, may fail here; the session `tests` runs them.
    session.run(programs / "coverage", "run", "-m", "pytest", *selected, success_codes=[0, 1])
    session.run(programs / "coverage", "combine", "--quiet")
    session.run(programs / "coverage", "json", "--quiet", "-o", "build/coverage/lines.json")
    session.run(programs / "python", "tests/covered.py", "build/coverage/lines.json")


# Without the documentation and its tools, whose versions constraints.txt names.
LIBRARY = ["amp", "booster", "checkpoint_io", "cli/check", "cluster", "comm", "interface", "kernel", "lazy", "nn"]
LIBRARY += ["pipeline", "shardformer", "tensor", "testing", "zero", "test_accelerator.py", "test_logging.py"]


@nox.session(python=["3.11", "3.12"], venv_backend="virtualenv", reuse_venv=True)
def minimums(session: nox.Session) -> None:
    """The tests of the library with the oldest versions that it claims; ``-- tests/amp`` runs some.

    torch 2.11 comes as the build for CUDA: 5 GB. A Python that is not installed is left out.
    """
    groups = nox.project.dependency_groups(PROJECT, "minimums")
    session.install("uv", env={"PIP_CONSTRAINT": "constraints.txt"})
    oldest = ("--resolution", "lowest-direct", "--system-certs", "--python", session.virtualenv.location)
    session.run("uv", "pip", "install", "--quiet", *oldest, "-e", ".[all]", *groups)
    session.run("python", "-c", "import colossal, torch; print(colossal.__version__, torch.__version__)")
    # What scikit-learn sets when it is first imported, which a test must not be the first to do.
    session.env.update({"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE"})
    session.run(
        "pytest", *(session.posargs or ["-n", "3", "--dist", "loadfile", *(f"tests/{name}" for name in LIBRARY)])
    )


@nox.session(venv_backend="none")
def wheels(session: nox.Session) -> None:
    """Sdist and wheel of the commit, in ``dist``, trained with in clean environments; ``-- --nightly`` dates them.

    With a compiler, without one, and by the steps of the Dockerfile; those take ``TORCH_INDEX`` from the environment.
    """
    programs = prepare(session, TESTS, "packaging")
    session.run(programs / "python", "tests/packaging/wheels.py", *session.posargs)
    session.run(programs / "python", "tests/packaging/dockerfile.py")


@nox.session(venv_backend="none")
def mutants(session: nox.Session) -> None:
    """Plant mistakes in a copy of the code, which tests must find; ``-- amp. --jobs 1`` plants those of one package.

    What was found is kept until the code or the tests change. ``-- --list`` says what is planted.
    """
    programs = prepare(session, TESTS, "tests")
    session.run(programs / "python", "tests/mutants/run.py", *(session.posargs or ["--jobs", "2"]))


@nox.session(venv_backend="none")
def stress(session: nox.Session) -> None:
    """All tests in random order, and all tutorials, with each vector width, beside busy loops; two hours."""
    programs = prepare(session, TESTS, "tests")
    session.run(programs / "python", "tests/stress.py", *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """On 1 to 8 GPUs, with the packages that `python` has: kernels, equality, speed beside peers, tutorials.

    It goes on where it was; ``-- --minutes 9`` ends early, ``-- speed`` runs a part, ``-- --device cpu`` tries it out.
    """
    session.run("python", "tests/gpu/run.py", *session.posargs, external=True)


@nox.session(venv_backend="none")
def device(session: nox.Session) -> None:
    """On the pretend accelerator of ``tests/device``: equality at two ranks, the program for GPUs, tutorials."""
    programs = prepare(session, TESTS, "tests")
    session.run(programs / "pytest", "tests/booster/test_equality_matrix.py", "--device", "pretend", "-m", "two_ranks")
    session.run(programs / "python", "tests/gpu/run.py", "--device", "pretend")
    programs = prepare(session, DOCS)
    session.run(programs / "python", "docs_test.py", "--all", "--device", "pretend", "--timeout", "600")


PEERS = ["accelerate", "deepspeed", "fsdp2", "lightning", "trainer"]  # of PyTorch and transformers: in all


@nox.session(venv_backend="none")
def peers(session: nox.Session) -> None:
    """Pairs of programs of ``examples/coming_from``, each beside its library; ``-- lightning`` runs one.

    Each library has an environment of its own. All of them together write ``docs/measured/peers.md``.
    """
    session.env["DS_BUILD_OPS"] = "0"  # DeepSpeed compiles what it needs when it needs it
    for peer in session.posargs or PEERS:
        programs = prepare(session, f"peers-{peer}", f"peer-{peer}")
        session.run(programs / "python", "tests/peers/run.py", peer)
    if not session.posargs:
        session.run(sys.executable, "tests/peers/run.py", "--table", external=True)


@nox.session(venv_backend="none")
def exhaustive(session: nox.Session) -> None:
    """Every case of the tests that otherwise take some, which the commit chooses: see ``tests/helpers/chosen.py``."""
    programs = prepare(session, TESTS, "tests")
    selected = session.posargs or ["-n", "3", "--dist", "loadfile"]
    session.run(programs / "pytest", "-m", "chosen", *selected, env={"COLOSSAL_CASES": "all"})


# What the sessions leave out otherwise; docs/decisions/0001-what-checks-run-when.md says what catches the same faults.
ONLY_BEFORE_RELEASES = [
    "examples",
    "bench",
    "coverage",
    "minimums-3.11",
    "minimums-3.12",
    "wheels",
    "device",
    "peers",
    "exhaustive",
    "mutants",
    "stress",
]
IN_FULL = {"api": ["--html"], "notebooks": ["--execute-all"], "site": ["--full"]}


@nox.session(venv_backend="none")
def release(session: nox.Session) -> None:
    """Every session in full: each page in the browser, each notebook executed, the Sphinx site in both languages.

    And those that only a release needs: examples, benchmarks, coverage, oldest versions, sdist and wheel, planted
    mistakes, and everything once more where faults of the tests themselves show.
    """
    for name in [*SESSIONS, *ONLY_BEFORE_RELEASES]:
        session.notify(name, IN_FULL.get(name, []))
