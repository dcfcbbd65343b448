"""The distribution `colossalai`: built, installed into a folder without network, and imported from there."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built distribution."""
    folder = tmp_path_factory.mktemp("dist")
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*PIP, "wheel", *options, str(ROOT / "compat")], check=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which it is installed."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([*PIP, "install", "--no-index", "--no-deps", "--target", str(folder), str(wheel)], check=True)
    return folder


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Run:
    """Run a program that finds the installed distribution, and whatever other folders it is given after that."""

    def start(program: str, *others: Path) -> subprocess.CompletedProcess[str]:
        folders = os.pathsep.join(map(str, (installed, ROOT / "src", *others)))
        environment = {**os.environ, "PYTHONPATH": folders, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    return start


def test_the_wheel_holds_the_names_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info" not in name]
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        (entries,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        text = archive.read(metadata).decode()
        assert "colossalai = colossal.cli:main" in archive.read(entries).decode()
    assert {name.partition("/")[0] for name in names} == {"colossalai", "model_zoo"}
    assert "Name: colossalai\n" in text
    # an index accepts no such version: this package must not take the place of the original there
    assert "Version: 0.5.0+colossal\n" in text
    assert "Requires-Dist: colossal\n" in text


NAMES = """
import sys
import colossal, colossalai
assert "torch" not in sys.modules  # as cheap as colossal itself

import colossalai.booster.plugin
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.amp.naive_amp import DynamicGradScaler
from colossalai.amp import AMP_TYPE
from colossalai.legacy.amp import AMP_TYPE as same, convert_to_amp
assert same is AMP_TYPE
from colossalai.legacy.zero import LowLevelZeroOptimizer
import colossalai.legacy.utils as utils
import colossalai.nn as col_nn

import colossal.amp.naive_amp, colossal.booster.plugin, colossal.legacy.amp, colossal.legacy.utils, colossal.legacy.zero
assert Booster is colossal.booster.Booster is colossalai.Booster
assert TorchDDPPlugin is colossal.booster.plugin.TorchDDPPlugin
assert DynamicGradScaler is colossal.amp.naive_amp.DynamicGradScaler
assert AMP_TYPE is colossal.legacy.amp.AMP_TYPE
assert LowLevelZeroOptimizer is colossal.legacy.zero.LowLevelZeroOptimizer
assert utils.save_checkpoint is colossal.legacy.utils.save_checkpoint
assert col_nn is colossal.nn and colossalai.nn is colossal.nn
assert sys.modules["colossalai.booster.plugin"] is colossal.booster.plugin
assert colossal.booster.plugin.__spec__.name == "colossal.booster.plugin"
# a path of later releases, of what colossal has without `legacy`
from colossalai.legacy.nn import Linear
from colossalai.legacy.nn.lr_scheduler import CosineAnnealingWarmupLR
assert Linear is colossal.nn.Linear
assert colossalai.legacy.nn.lr_scheduler.CosineAnnealingWarmupLR is CosineAnnealingWarmupLR
assert colossalai.launch is colossal.launch
# devices have more verbs there
import colossal.accelerator, colossal.legacy.accelerator
from colossalai.accelerator import auto_set_accelerator, get_accelerator, get_current_device
from colossalai.accelerator.base_accelerator import BaseAccelerator
assert get_accelerator is colossal.legacy.accelerator.get_accelerator
assert isinstance(get_accelerator(), BaseAccelerator)
assert get_current_device is colossal.accelerator.get_current_device
assert auto_set_accelerator is colossal.accelerator.auto_set_accelerator
from packaging import version
assert version.parse(colossalai.__version__) > version.parse("0.2.8")
for missing in ("import colossalai.nothing", "from colossalai.nn import nothing", "import colossalai.legacy.nothing"):
    try:
        exec(missing)
    except ImportError as error:
        assert "nothing" in str(error), error
    else:
        raise AssertionError(missing)
assert not hasattr(colossalai, "nothing")
assert "Booster" in dir(colossalai)
print("all names are those of colossal")
"""


def test_names_are_those_of_colossal(run: Run) -> None:
    result = run(NAMES)
    assert result.stdout == "all names are those of colossal\n", result.stderr


DOCUMENTED = """
import importlib, sys

def load(path):
    for length in range(len(path.split(".")), 0, -1):
        parts = path.split(".")
        try:
            found = importlib.import_module(".".join(parts[:length]))
            for part in parts[length:]:
                found = getattr(found, part)
            return found
        except (ImportError, AttributeError):
            continue
    return None

resolved = 0
for path in open(sys.argv[1], encoding="utf-8").read().split():
    found = load(path)
    if found is None:
        continue
    other = load(path.replace("colossal.", "colossalai.", 1))
    same = other is found or path in ("colossal.__version__", "colossal.legacy")
    if path.startswith("colossal.accelerator."):  # whose devices have more verbs in the older API
        same = same or other is load(path.replace("accelerator", "legacy.accelerator", 1))
    assert same, f"{path}: {found} and {other}"
    resolved += 1
print(resolved)
"""


def test_documented_paths_are_those_of_colossal(run: Run) -> None:
    listed = Path(__file__).with_name("documented_paths.txt")
    program = DOCUMENTED.replace("sys.argv[1]", repr(str(listed)))
    result = run(program)
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout.splitlines()[-1]) >= 140


TRAINING = """
import torch
import colossalai
from colossalai.amp import AMP_TYPE

model = torch.nn.Linear(2, 1)
criterion = torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, criterion = colossalai.amp.convert_to_amp(model, optimizer, criterion, AMP_TYPE.TORCH)
before = model.unwrap().weight.clone()
for _ in range(20):  # of which the first may be skipped, as the loss scale falls
    optimizer.zero_grad()
    optimizer.backward(criterion(model(torch.ones(3, 2)), torch.ones(3, 1)))
    optimizer.step()
assert not torch.equal(model.unwrap().weight, before)
print("trained")
"""


def test_a_program_trains(run: Run) -> None:
    result = run(TRAINING)
    assert result.stdout == "trained\n", result.stderr[-2000:]


def test_the_command_is_that_of_colossal(installed: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(ROOT / "src")])}
    command = [sys.executable, str(installed / "bin" / "colossalai"), "--help"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "check" in result.stdout, result.stderr
    assert "run" in result.stdout


# ------------------------------------------------------------------------------------------ the original


def refused(result: subprocess.CompletedProcess[str], where: Path) -> bool:
    text = result.stderr
    return result.returncode == 1 and "Only one package named colossalai" in text and str(where) in text


def test_refuses_another_package_of_the_name(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "site"
    (other / "colossalai").mkdir(parents=True)
    (other / "colossalai" / "__init__.py").write_text("", encoding="utf-8")
    assert refused(run("import colossalai", other), other / "colossalai")


def test_refuses_what_another_package_left_in_its_folder(run: Run, installed: Path) -> None:
    left = installed / "colossalai" / "zero"
    left.mkdir()
    try:
        assert refused(run("import colossalai"), left)
    finally:
        left.rmdir()
    assert run("import colossalai").returncode == 0


def test_refuses_another_distribution_of_the_name(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "editable"
    (other / "colossalai-0.2.8.dist-info").mkdir(parents=True)
    text = "Metadata-Version: 2.1\nName: colossalai\nVersion: 0.2.8\n"
    (other / "colossalai-0.2.8.dist-info" / "METADATA").write_text(text, encoding="utf-8")
    result = run("import colossalai", other)
    assert refused(result, other)
    assert "version 0.2.8" in result.stderr


def test_this_environment_has_neither() -> None:
    assert not Path(sysconfig.get_path("purelib"), "colossalai").exists()
