"""The import paths of the older documentation lead to what there is today, or say what to use."""

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from colossal._src.legacy.path_table import PATHS
from colossal._src.legacy.refused_paths import WITHOUT_COUNTERPART

HERE = Path(__file__).parent
DOCUMENTED = (HERE / "documented_paths.txt").read_text(encoding="utf-8").split()
NOT_YET = set((HERE / "not_yet.txt").read_text(encoding="utf-8").split())
REFUSED = set((HERE / "refused.txt").read_text(encoding="utf-8").split())


def resolve(path: str) -> object:
    """What ``from MODULE import NAME``, or ``import MODULE``, gives."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (AttributeError, ModuleNotFoundError):
        return importlib.import_module(path)


@pytest.mark.parametrize("path", sorted(set(DOCUMENTED) - NOT_YET - REFUSED))
def test_a_documented_path_resolves(path: str) -> None:
    assert resolve(path) is not None


@pytest.mark.parametrize("path", sorted(NOT_YET))
def test_a_path_that_does_not_resolve_is_not_here_yet(path: str) -> None:
    assert path in DOCUMENTED
    with pytest.raises((ImportError, AttributeError)):  # does not raise: take the path out of not_yet.txt
        resolve(path)


@pytest.mark.parametrize("path", sorted(REFUSED))
def test_a_path_without_a_counterpart_says_what_to_use(path: str) -> None:
    assert path in DOCUMENTED
    with pytest.raises(ImportError, match=r"colossal\.[\w.]+ has no counterpart here\. .*\b(colossal|torch)\."):
        resolve(path)


USED = [  # by public programs, of modules that no page of the older documentation names
    "colossal.trainer.hooks._metric_hook.LossHook",
    "colossal.nn.lr_scheduler.cosine.CosineAnnealingWarmupLR",
    "colossal.nn.optimizer.fused_adam.FusedAdam",
    "colossal.nn.optimizer.ColossalaiOptimizer",
    "colossal.booster.mixed_precision.fp16_torch.FP16TorchMixedPrecision",
    "colossal.checkpoint_io.general_checkpoint_io.GeneralCheckpointIO",
    "colossal.shardformer.shard.ModelSharder",
    "colossal.nn.layer.parallel_1d.layers.Linear1D_Col",
    "colossal.utils.model.lazy_init_context.LazyInitContext",
]


@pytest.mark.parametrize("path", USED)
def test_modules_of_programs_are_found(path: str) -> None:
    assert resolve(path) is getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2])


MOVED = {  # by a release, into colossal.legacy
    "colossal.legacy.core.global_context": "colossal.legacy.context.global_context",
    "colossal.legacy.context.parallel_mode.ParallelMode": "colossal.legacy.context.ParallelMode",
    "colossal.legacy.engine.gradient_handler.BaseGradientHandler": "colossal.legacy.engine.BaseGradientHandler",
    "colossal.legacy.nn.CrossEntropyLoss": "colossal.nn.CrossEntropyLoss",
    "colossal.legacy.nn.layer.parallel_1d.Linear1D_Col": "colossal.nn.Linear1D_Col",
    "colossal.legacy.nn.metric.Accuracy": "colossal.nn.Accuracy",
    "colossal.legacy.trainer.hooks.LossHook": "colossal.legacy.trainer.LossHook",
    "colossal.legacy.utils.memory": "colossal.utils.memory",
    "colossal.legacy.zero.gemini.GeminiDDP": "colossal.zero.gemini.GeminiDDP",
    "colossal.cluster.DeviceMesh": "colossal.legacy.device.DeviceMesh",
    "colossal.inference.core.engine.InferenceEngine": "colossal.inference.InferenceEngine",
}


@pytest.mark.parametrize(("path", "today"), MOVED.items())
def test_a_module_that_moved_into_legacy_has_its_names_at_both_places(path: str, today: str) -> None:
    found, expected = resolve(path), resolve(today)
    if isinstance(expected, ModuleType):
        assert isinstance(found, ModuleType)
        assert dir(found) == dir(expected)
    else:
        assert found is expected


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("colossal.legacy.utils.profiler", "torch.profiler.profile"),
        ("colossal.legacy.builder.build_model", "MODELS.get_module"),
        ("colossal.moe.set_moe_args", "colossal.nn.moe.MixtureOfExperts"),
        ("colossal.inference.config.GenerationConfig", "colossal.inference.SamplingParams"),
        ("colossal.inference.core.request_handler.RequestHandler", "colossal.inference.InferenceEngine"),
        ("colossal.auto_parallel.tensor_shard.initialize", "colossal.booster.plugin.plan_step"),
    ],
)
def test_a_name_without_counterpart_says_what_to_use_wherever_it_is_asked_for(path: str, advice: str) -> None:
    with pytest.raises(ImportError, match=f"has no counterpart here.*{re.escape(advice)}"):
        resolve(path)


def test_what_never_moved_is_not_found_in_legacy() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("colossal.legacy.nothing")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("colossal.legacy.comm")
    with pytest.raises(AttributeError, match=r"trainer\.hooks.* has no attribute 'Nothing'"):
        _ = importlib.import_module("colossal.legacy.trainer.hooks").Nothing


def test_advice_names_what_there_is() -> None:
    for path, advice in WITHOUT_COUNTERPART.items():
        has_modules = any(each.startswith(f"{path}.") for each in PATHS)  # the others of its modules are refused
        with pytest.raises(ImportError, match="has no counterpart here"):
            resolve(f"{path}.other" if has_modules else path)
        named = re.findall(r"\b(?:colossal|torch)(?:\.\w+)+", advice)
        assert named or "Booster" in advice or "CPUAdam" in advice, (path, advice)
        for name in named:
            assert pkgutil.resolve_name(name) is not None, (path, name)


def test_what_is_not_here_yet_is_of_two_kinds() -> None:
    kinds = r"auto_parallel|autochunk|\bfx\b|inference"
    assert [path for path in sorted(NOT_YET) if not re.search(kinds, path)] == []


def test_an_unknown_name_and_an_unknown_module_are_errors() -> None:
    with pytest.raises(AttributeError, match="module 'colossal.nn' has no attribute 'Nothing'"):
        _ = importlib.import_module("colossal.nn").Nothing
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("colossal.nothing")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("colossal.nn.nothing")


@pytest.mark.slow
def test_the_older_api_is_not_loaded_where_no_program_asks_for_it() -> None:
    program = (
        "import sys, colossal.booster, colossal.nn, colossal.cluster\n"
        "print(*(name for name in sys.modules if name.startswith('colossal') and 'legacy' in name))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
