"""The files around the code say what the noxfile, pyproject.toml, constraints.txt and the README say."""

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
HOSTED = [".devcontainer/devcontainer.json", "CITATION.cff", "SECURITY.md", ".github/pull_request_template.md"]
HOSTED += [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / ".github").rglob("*.yml"))]


def read_yaml(name: str | Path) -> Any:
    # `on` is true in YAML 1.1, which PyYAML reads, and a word for GitHub.
    text = re.sub(r"^on:", '"on":', (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return yaml.safe_load(text)


def sessions() -> set[str]:
    """The names of all sessions."""
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if any("nox.session" in ast.unparse(d) for d in node.decorator_list)}


# ------------------------------------------------------------------------------------------------------- hooks


def test_hooks_use_the_tested_versions_in_one_environment() -> None:
    hooks = [hook for repo in read_yaml(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    tools = hooks[0]["additional_dependencies"]
    assert all(hook["additional_dependencies"] == tools for hook in hooks)
    tested = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [tool for tool in tools if tool not in tested] == []


def test_hooks_come_from_the_registry_alone() -> None:
    repos = read_yaml(".pre-commit-config.yaml")["repos"]
    assert {repo["repo"] for repo in repos} == {"local"}
    assert {hook["language"] for repo in repos for hook in repo["hooks"]} == {"python"}


# --------------------------------------------------------------------------------------------------- workflows


def sessions_called(workflow: dict[str, Any]) -> list[str]:
    """The sessions that the jobs of a workflow hand to the workflow of one session."""
    called = []
    for job in workflow["jobs"].values():
        if job.get("uses") == "./.github/workflows/session.yml":
            matrix = job.get("strategy", {}).get("matrix", {})
            given = job["with"]["session"]
            called += matrix["session"] if given == "${{ matrix.session }}" else [given]
    return called


def test_workflows_call_sessions_that_exist() -> None:
    called = [name for path in WORKFLOWS for name in sessions_called(read_yaml(path))]
    assert called
    assert {name.partition(" ")[0] for name in called} <= sessions()


def test_the_release_session_runs_every_week() -> None:
    workflow = read_yaml(".github/workflows/release.yml")
    (schedule,) = workflow["on"]["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* [0-6]", schedule["cron"])
    assert sessions_called(workflow) == ["release"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_write_nothing_and_call_what_exists(path) -> None:
    workflow = read_yaml(path)
    assert workflow["permissions"] == {"contents": "read"}
    local = [job["uses"] for job in workflow["jobs"].values() if "uses" in job]
    assert [name for name in local if not (ROOT / name).is_file()] == []


def test_a_session_runs_on_the_tested_interpreters() -> None:
    steps = read_yaml(".github/workflows/session.yml")["jobs"]["run"]["steps"]
    given = {step["uses"].partition("@")[0]: step.get("with", {}) for step in steps if "uses" in step}
    python, node = given["actions/setup-python"], given["actions/setup-node"]
    assert f">={python['python-version']}" == PROJECT["requires-python"]
    caches = [*python["cache-dependency-path"].split(), node["cache-dependency-path"]]
    assert [name for name in caches if not (ROOT / name).is_file()] == []
    assert "nox -s ${{ inputs.session }}" in [step.get("run") for step in steps]


# ------------------------------------------------------------------------------------------ what a stranger meets


def test_a_new_container_is_set_up_as_the_readme_says() -> None:
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    assert f">={container['image'].partition(':')[2]}" == PROJECT["requires-python"]
    blocks = re.findall(r"```shell\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("python3 -m venv .venv && ")]
    try_it, test_it = commands
    _, install, run = test_it.split(" && ")
    assert container["postCreateCommand"] == f"{try_it} && {install}"
    assert run.startswith(".venv/bin/nox")


def test_the_citation_says_what_the_package_says() -> None:
    citation = read_yaml("CITATION.cff")
    assert citation["title"] == PROJECT["name"]
    assert citation["abstract"] == PROJECT["description"]
    assert citation["license"] == PROJECT["license"]
    assert citation["keywords"] == PROJECT["keywords"]
    assert citation["authors"] == PROJECT["authors"]


@pytest.mark.parametrize("name", HOSTED)
def test_no_address_of_this_repository_is_made_up(name) -> None:
    assert re.findall(r"(?:https?://|git@)\S+", (ROOT / name).read_text(encoding="utf-8")) == []


# ------------------------------------------------------------------------------------------------ contributing


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "README.md", ".github/pull_request_template.md"])
def test_the_sessions_that_are_named_exist(name) -> None:
    calls = re.findall(r"nox (?:-R )?-s ([a-z]+(?: [a-z]+)*)", (ROOT / name).read_text(encoding="utf-8"))
    named = {session for call in calls for session in call.split()}
    assert named
    assert named <= sessions()


def test_the_files_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"\]\(([^)#:]+)\)|`((?:tests|docs|\.ci|benchmarks|src|csrc)/[\w./-]*)`", text)
    paths = [link or path for link, path in named]
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []
