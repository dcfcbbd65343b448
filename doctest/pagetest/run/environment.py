"""The environment of a page: the caller's, without what would change how the page runs."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

PROBE = Path(__file__).parent / "probe"

_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHERS = ("TORCHELASTIC_", "GROUP_", "ROLE_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "COLOSSAL_PAGE_")
_PYTHON_KEPT = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONHASHSEED")
_FIXED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONUTF8": "1",
    "PYTHONUNBUFFERED": "1",
    "MPLBACKEND": "Agg",
    "HF_HUB_OFFLINE": "1",
}


def clean_environment(outer: Mapping[str, str], root: Path) -> dict[str, str]:
    """Makes an environment in which a page's code sees what it would see anywhere."""
    # A page must not find the project's root on its path.
    kept = {name: value for name, value in outer.items() if not _is_removed(name)}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    imports = os.pathsep.join(_import_path(kept.pop("PYTHONPATH", ""), root))
    return kept | _FIXED | {"PATH": path} | ({"PYTHONPATH": imports} if imports else {})


def page_environment(outer: Mapping[str, str], root: Path, script: Path, run: Path) -> dict[str, str]:
    """Makes the environment in which a page's command runs."""
    clean = clean_environment(outer, root)
    probed = os.pathsep.join([str(PROBE), *filter(None, [clean.get("PYTHONPATH")])])
    return clean | {"PYTHONPATH": probed, "COLOSSAL_PAGE_SCRIPT": str(script), "COLOSSAL_PAGE_RUN": str(run)}


def _is_removed(name: str) -> bool:
    if name.startswith("PYTHON"):
        return name not in _PYTHON_KEPT
    return name in _RANKS or name.startswith(_LAUNCHERS)


def _import_path(value: str, root: Path) -> list[str]:
    """The caller's entries, made absolute, without the root and the harness's own folder."""
    entries = [Path(entry).resolve() for entry in value.split(os.pathsep) if entry]
    return [str(entry) for entry in entries if entry not in {root, root / "doctest"}]
