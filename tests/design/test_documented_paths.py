"""The import paths that users find in the documentation stay importable.

A row is added with the feature that brings it, and never taken away.
"""

import importlib

import pytest

DOCUMENTED = {
    "colossal": (
        "Booster",
        "get_default_parser",
        "launch",
        "launch_from_openmpi",
        "launch_from_slurm",
        "launch_from_torch",
    ),
    "colossal.accelerator": ("get_accelerator",),
    "colossal.amp.naive_amp": ("ConstantGradScaler", "DynamicGradScaler"),
    "colossal.booster": ("Booster",),
    "colossal.booster.mixed_precision": (
        "BF16MixedPrecision",
        "FP8MixedPrecision",
        "FP16ApexMixedPrecision",
        "FP16NaiveMixedPrecision",
        "FP16TorchMixedPrecision",
        "MixedPrecision",
        "mixed_precision_factory",
    ),
    "colossal.booster.plugin": ("Plugin", "TorchDDPPlugin", "TorchFSDPPlugin"),
    "colossal.checkpoint_io": ("CheckpointIO", "CheckpointIndexFile", "GeneralCheckpointIO"),
    "colossal.cluster": ("DistCoordinator",),
    "colossal.interface": ("ModelWrapper", "OptimizerWrapper"),
    "colossal.logging": ("DistributedLogger", "disable_existing_loggers", "get_dist_logger"),
    "colossal.nn.lr_scheduler": (
        "CosineAnnealingLR",
        "CosineAnnealingWarmupLR",
        "ExponentialLR",
        "FlatAnnealingLR",
        "FlatAnnealingWarmupLR",
        "LambdaLR",
        "LinearWarmupLR",
        "MultiStepLR",
        "MultiStepWarmupLR",
        "MultiplicativeLR",
        "OneCycleLR",
        "PolynomialLR",
        "PolynomialWarmupLR",
        "StepLR",
    ),
    "colossal.nn.optimizer": (
        "CAME",
        "Adafactor",
        "CPUAdam",
        "DistGaloreAwamW",
        "DistributedAdaFactor",
        "DistributedCAME",
        "DistributedLamb",
        "FusedAdam",
        "FusedLAMB",
        "FusedSGD",
        "GaLoreAdamW8bit",
        "GaLoreAdafactor",
        "HybridAdam",
        "Lamb",
        "Lars",
        "cast_to_distributed",
        "get_galore_param_groups",
    ),
}
PATHS = [(module, name) for module, names in DOCUMENTED.items() for name in names]


def load(module: str, name: str) -> object:
    """What ``from module import name`` gives."""
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("module", "name"), PATHS)
def test_a_documented_path_is_importable_and_callable(module: str, name: str) -> None:
    assert callable(load(module, name))


@pytest.mark.parametrize(("module", "name"), PATHS)
def test_a_documented_path_is_public(module: str, name: str) -> None:
    declared = getattr(importlib.import_module(module), "__all__", None)
    assert declared is None or name in declared


@pytest.mark.parametrize(("module", "name"), [("colossal", "NoSuchName"), ("colossal.no_such_module", "Booster")])
def test_finds_a_path_that_is_gone(module: str, name: str) -> None:
    with pytest.raises((AttributeError, ImportError)):
        load(module, name)
