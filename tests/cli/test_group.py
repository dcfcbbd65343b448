import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import colossal
from colossal._src.cli.group import COMMANDS
from colossal._src.cli.group import colossal as group
from colossal._src.testing.limits import scaled
from colossal.cli import main

SOURCE = Path(colossal.__file__).parents[1]


def run(*words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``colossal <words>`` in a fresh interpreter that finds modules in ``path`` first."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [path, SOURCE] if path else [SOURCE]))}
    command = [sys.executable, "-m", "colossal.cli", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=scaled(600))


def test_the_help_names_every_command_with_what_it_does() -> None:
    done = run("--help")
    assert done.returncode == 0, done.stderr
    listed = dict(re.findall(r"^  (\w+) {2,}(\S.*)$", done.stdout.partition("Commands:")[2], re.MULTILINE))
    assert listed == {name: entry.help for name, entry in COMMANDS.items()}


def test_the_help_and_the_version_import_nothing_heavy() -> None:
    program = (
        "import sys\nfrom colossal.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    print(sorted({'torch', 'numpy', 'rich', 'fabric', 'transformers'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    for word in ("--help", "--version"):
        command = [sys.executable, "-c", program, word]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]"


def test_the_version_is_the_librarys() -> None:
    assert run("--version").stdout == f"colossal {colossal.__version__}\n"


@pytest.mark.parametrize("package", ["click", "fabric"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(package, tmp_path) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('no', name={package!r})", encoding="utf-8")
    (tmp_path / "sitecustomize.py").write_text(
        "import colossal._src.cli.group as group\n"
        "import types, sys\n"
        "class Module(types.ModuleType):\n"
        "    @property\n"
        "    def command(self):\n"
        "        import fabric\n"
        "sys.modules['colossal._src.cli.run'] = Module('run')\n"
        if package == "fabric"
        else "",
        encoding="utf-8",
    )
    done = run("run", "--help", path=tmp_path)
    assert done.returncode == 1
    assert f"Found no {package}. In the clone, run: pip install -e '.[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "prometheus_client"])
def test_serving_names_the_extra_that_brings_a_missing_package(package, tmp_path) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('no', name={package!r})", encoding="utf-8")
    done = run("serve", str(tmp_path), path=tmp_path)
    assert done.returncode == 1
    assert f"Found no {package}. In the clone, run: pip install -e '.[serve]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_missing_module_is_not_blamed_on_the_extra(tmp_path) -> None:
    (tmp_path / "click.py").write_text("import no_such_module", encoding="utf-8")
    done = run("--help", path=tmp_path)
    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stderr


def test_an_unknown_command_is_refused() -> None:
    done = run("chekc")
    assert done.returncode == 2
    assert "No such command 'chekc'" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_exists_and_helps(name) -> None:
    command = group.get_command(click.Context(group), name)
    assert isinstance(command, click.Command)
    shown = CliRunner().invoke(command, ["--help"])
    assert shown.exit_code == 0
    assert shown.output.startswith("Usage:")


def test_main_ends_with_the_code_of_the_command(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"colossal {colossal.__version__}\n"
