"""The one door to every check: ``nox`` runs what a landing runs, ``nox -s full`` all else, ``nox -s types`` one."""

import json
import os
import sys
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.2"
GATE = ["style", "types", "rules", "tests", "pages"]  # what `.ci/run` runs
nox.options.sessions = GATE

PROJECT = nox.project.load_toml("pyproject.toml")
CONSTRAINTS = ("-c", "constraints.txt")

# [Note: shared environments]
# Installing torch and all around it takes a minute, and so does compiling what is imported of it. So the checks of the
# code share one environment, and those of the documentation another. Each session adds what it needs: where `doctest`
# comes first, as here and in `.ci/run`, the tutorials run with the packages that their readers install, and no others.
TESTS, DOCS = "tests", "docs"


def prepare(session: nox.Session, environment: str, *groups: str) -> Path:
    """Install dependency groups, and the project with all extras, as tested; nothing for ``nox -R``.

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
def pin(session: nox.Session) -> None:
    """Write ``constraints.txt``, the tested version of every package; ``-- --upgrade`` takes the newest ones.

    Without it those stay that still fit. torch 2.13.0 without a suffix is the CPU build where the index has one.
    """
    groups = [word for group in PROJECT["dependency-groups"] if group != "minimums" for word in ("--group", group)]
    session.install(*CONSTRAINTS, "uv")
    options = ["--all-extras", *groups, "--python-version", "3.11", "--no-annotate", "--output-file", CONSTRAINTS[1]]
    session.run("uv", "pip", "compile", "pyproject.toml", *options, "--quiet", *session.posargs)


@nox.session(venv_backend="none")
def style(session: nox.Session) -> None:
    """Style and formatting of Python, and typing errors; `lint` does more."""
    programs = prepare(session, TESTS, "tests", "gate")
    session.run(programs / "ruff", "check", "--output-format", "concise", ".")
    session.run(programs / "ruff", "format", "--check", ".")
    session.run(programs / "typos", "--format", "brief")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Static types of the library; ``nox -s types -- tests`` those of a folder, ``-- --all`` of everything."""
    programs = prepare(session, TESTS, "tests", "gate")
    what = [] if session.posargs == ["--all"] else session.posargs or ["src"]
    session.run(programs / "pyright", "--pythonpath", programs / "python", *what)


@nox.session(venv_backend="none")
def rules(session: nox.Session) -> None:
    """All rules of the pages that need no run: links, hooks, translations, sidebar."""
    programs = prepare(session, TESTS, "tests", "gate")
    session.run(programs / "python", "docs_test.py", "--check")


# [Note: once more]
# A test that fails and then passes alone shows a busy machine, or a race: it is named, and refuses nobody. Many
# failures are no accident.
RUN_AGAIN = 12


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """What protects users from wrong results; ``-- -m slow`` runs the tests that take long, ``-- tests/comm`` some.

    Three files at a time, since many tests wait for other processes. What fails runs once more, alone.
    """
    programs = prepare(session, TESTS, "tests", "gate")
    pytest = (programs / "pytest", "--force-short-summary", "-rfEs", "--tb=short")
    many = ["-n", "3", "--dist", "loadfile", "--durations", "40"]
    if not session.posargs:
        chosen = ["-m", "not slow", *many]
    elif session.posargs[0] == "-m":
        chosen = [*session.posargs, *many]
    else:
        chosen = session.posargs
    try:
        session.run(*pytest, "--cache-clear", *chosen)
    except CommandFailed:
        failed = last_failed()
        if not 0 < len(failed) <= RUN_AGAIN:
            raise
        session.log("what failed runs once more, alone")
        session.run(*pytest, "--last-failed", *failed, env={"COLOSSAL_TIMEOUT_SCALE": "3"})
        session.warn(f"flaky, passed when run alone: {' '.join(failed)}")


def last_failed() -> list[str]:
    """The tests that failed in the last run, as pytest stores them."""
    stored = Path(".pytest_cache/v/cache/lastfailed")
    return sorted(json.loads(stored.read_text(encoding="utf-8"))) if stored.is_file() else []


@nox.session(venv_backend="none")
def pages(session: nox.Session) -> None:
    """Three tutorials that show most of the library, and those whose code has changed since they were recorded."""
    programs = prepare(session, TESTS, "tests", "gate")
    always = ["basics/booster_api", "features/cluster_utils", "features/1D_tensor_parallel"]
    options = ["--lang", "en", "--jobs", "2", "--timeout", "480", "--retry"]
    session.run(programs / "python", "docs_test.py", "--changed", *always, *options, *session.posargs)


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
def doctest(session: nox.Session) -> None:
    """All tutorials, in both languages; ``nox -s doctest -- booster_api`` runs one."""
    programs = prepare(session, DOCS)
    session.run(programs / "python", "docs_test.py", *(session.posargs or ["--all", "--retry"]))


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
LIBRARY = ["amp", "booster", "checkpoint_io", "cli/check", "cluster", "comm", "inference", "interface", "kernel"]
LIBRARY += ["lazy", "nn", "pipeline", "shardformer", "tensor", "testing", "zero"]
LIBRARY += ["test_accelerator.py", "test_logging.py"]


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
    matrix = [f"tests/booster/test_equality_{name}.py" for name in ("matrix", "transformers")]
    session.run(programs / "pytest", *matrix, "--device", "pretend", "-m", "two_ranks")
    session.run(programs / "python", "tests/gpu/run.py", "--device", "pretend")
    programs = prepare(session, DOCS)
    session.run(programs / "python", "docs_test.py", "--all", "--device", "pretend")


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
    """Every case of the tests that otherwise take some: see ``tests/helpers/chosen.py``."""
    programs = prepare(session, TESTS, "tests")
    selected = session.posargs or ["-n", "3", "--dist", "loadfile"]
    session.run(programs / "pytest", "-m", "chosen", *selected, env={"COLOSSAL_CASES": "all"})


# docs/decisions/0013-a-small-gate.md says what is looked at when, and why.
FULL = {
    "lint": [],
    "types": ["--all"],
    "tests": ["-m", "slow"],
    "doctest": [],
    "api": [],
    "notebooks": [],
    "site": [],
}
RELEASE = ["examples", "bench", "coverage", "minimums-3.11", "minimums-3.12", "wheels", "device", "peers"]
RELEASE += ["exhaustive", "mutants", "stress"]
IN_RELEASE = {
    "tests": ["-m", ""],
    "doctest": ["--record"],
    "api": ["--html"],
    "notebooks": ["--execute-all"],
    "site": ["--full"],
}


@nox.session(venv_backend="none")
def full(session: nox.Session) -> None:
    """All that the gate leaves out, by hand: ``-- site types`` some; all of it before an issue is closed.

    Each part is a session of its own, and can be repeated: ``nox -s tests -- -m slow``.
    """
    for name in session.posargs or FULL:
        session.notify(name, FULL[name])


@nox.session(venv_backend="none")
def release(session: nox.Session) -> None:
    """Gate and `full`, each page in the browser, each notebook executed, the Sphinx site in both languages.

    It leaves new records of all pages. And those that only a release needs: examples, benchmarks, coverage, oldest
    versions, sdist and wheel, planted mistakes, and everything once more where faults of the tests themselves show.
    """
    parts = FULL | IN_RELEASE
    for name in [*parts, *RELEASE]:
        session.notify(name, parts.get(name, []))
