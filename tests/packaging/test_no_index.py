"""Nothing of this project is on a public index: what is installed by its name alone is a stranger's."""

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).resolve()
_END = r"""(?:-nightly)?(?=\[|[='"<>~!\s`.,;]|$)"""
BY_NAME = re.compile(
    rf"""`[^`\n]*pip3?\s+install\b[^`]*?[\s'"]colossal{_END}"""  # in `single backticks`, which may go on below
    rf"""|pip3? +(?:install|download)\b[^\n`;&|]*?[ '"]colossal{_END}"""  # on a line
)
TEXTS = {".md", ".mdx", ".py", ".json", ".toml", ".txt", ".yml", ".yaml", ".sh", ".ts", ".tsx", ".mjs", ""}


def found_in(text: str) -> list[str]:
    return [match.group() for match in BY_NAME.finditer(text)]


def test_no_file_installs_the_project_from_an_index() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a clone: the files to look at are those of git")
    files = [ROOT / name for name in listed.stdout.splitlines() if Path(name).suffix in TEXTS]
    assert len(files) > 500
    texts = {str(file): file.read_text(encoding="utf-8") for file in files if file.is_file() and file != HERE}
    assert not {name: found for name, text in texts.items() if (found := found_in(text))}, (
        "Pages and messages name the clone: pip install -e '.[hf]'"
    )


@pytest.mark.parametrize(
    "text",
    [
        "run `pip install 'colossal[hf]'`.",
        "run `pip install\n'colossal[hf]' psutil`.",
        "pip install colossal",
        "python -m pip install -U colossal==0.1.0",
        'pip install "colossal[lora,hf]" psutil',
        "CUDA_EXT=1 pip install colossal\n",
        "pip3 install colossal-nightly",
        "安装：`pip install colossal`。",
    ],
)
def test_installing_by_name_is_seen(text) -> None:
    assert found_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install -e '.[hf]'",
        "cd colossal\npip install -e .\ncolossal check\n",
        "pip install dist/colossal-0.1.0-py3-none-any.whl",
        "pip install -c constraints.txt nox && colossal check",
        "`pip install -e .` in the folder colossal, `colossal check` afterwards",
        "docker build -t colossal -f docker/Dockerfile .",
    ],
)
def test_installing_from_the_clone_is_fine(text) -> None:
    assert not found_in(text)
