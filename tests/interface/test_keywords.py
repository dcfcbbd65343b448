# pyright: reportArgumentType=false, reportCallIssue=false
"""The one table of keywords: none is lost between a signature and the options, and what is refused names a way."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from colossal._src.amp import ScalerConfig
from colossal._src.booster.plugin.ddp.torch_ddp import DDPConfig
from colossal._src.booster.plugin.hybrid.hybrid_options import HybridOptions
from colossal._src.booster.plugin.zero_options import ZeroOptions
from colossal._src.interface.keywords import FIELDS, REFUSED, Clipping, Keywords, check_known, keywords_for
from colossal._src.zero import ZeroConfig
from colossal._src.zero.gemini import GeminiConfig
from colossal.booster import Booster
from colossal.booster.mixed_precision import FP16NaiveMixedPrecision
from colossal.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossal.errors import ConfigError, UnsupportedError
from colossal.legacy.booster import MoeHybridParallelPlugin
from colossal.shardformer import ShardConfig
from colossal.testing import fake_world
from colossal.zero import zero_optim_wrapper
from colossal.zero.gemini import GeminiAdamOptimizer, GeminiDDP, GeminiOptimizer

CONCERNS = (ScalerConfig, Clipping, ZeroConfig, ZeroOptions, DDPConfig, ShardConfig)
CONCERNS += (GeminiConfig, HybridOptions)
FIELD_NAMES = {field.name for concern in CONCERNS for field in fields(concern)}

OF_THE_MODEL = {"module", "chunk_init_device", "device", "memstats", "force_outputs_fp32", "scatter_after_inference"}
OF_THE_MODEL |= {"mixed_precision", "zero_group", "extra_dp_group"}
ALWAYS = {"enable_gradient_accumulation"}
OF_HYBRID = {"custom_policy", "num_microbatches", "microbatch_size", "pp_style", "num_model_chunks"}
OF_HYBRID |= {"enable_metadata_cache", "scheduler_nodes"}
FRONTS: dict[Any, set[str]] = {
    LowLevelZeroPlugin: set(),
    GeminiPlugin: OF_THE_MODEL | ALWAYS,
    GeminiDDP: OF_THE_MODEL | ALWAYS,
    HybridParallelPlugin: OF_HYBRID,
    TorchDDPPlugin: set(),
}
"""What a constructor reads by itself."""


@pytest.mark.parametrize("front", FRONTS)
def test_every_keyword_is_a_field_of_a_concern_or_refused(front: Any) -> None:
    names = set(inspect.signature(front).parameters)
    assert len(names) >= 7
    meant = {FIELDS[name].name if name in FIELDS else name for name in names - REFUSED.keys() - FRONTS[front]}
    assert meant <= FIELD_NAMES


LOSS_SCALE = {"initial_scale", *(field.name for field in fields(ScalerConfig))} - {"init_scale"}

OTHER_VALUES: dict[str, Any] = {
    "use_fp8": True,
    "gpu_margin_mem_ratio": 0.5,
    "param_init_fn": print,
    "make_vocab_size_divisible_by": 128,
    "overlap_p2p": False,
}


def build(owner: str, **options: Any) -> Any:
    if owner == "GeminiDDP":
        return GeminiDDP(nn.Linear(2, 2), **options)
    if owner == "GeminiOptimizer":
        model = GeminiDDP(nn.Linear(2, 2), placement_policy="static", offload_optim_frac=1.0)
        return GeminiOptimizer(torch.optim.SGD(model.parameters()), model, **options)
    if owner == "HybridParallelPlugin":
        return HybridParallelPlugin(tp_size=1, pp_size=1, **options)
    if owner == "GeminiPlugin":
        options |= {"placement_policy": "auto"}
    kinds = (TorchDDPPlugin, TorchFSDPPlugin, LowLevelZeroPlugin, GeminiPlugin)
    return {kind.__name__: kind for kind in kinds}[owner](**options)


@pytest.mark.parametrize(("name", "owner"), [(name, owner) for name, each in REFUSED.items() for owner in each.instead])
def test_what_is_refused_names_who_was_asked_and_what_to_use(name: str, owner: str) -> None:
    with fake_world(1):
        build(owner)
        build(owner, **{name: REFUSED[name].accepted[0]})
        with pytest.raises(UnsupportedError) as error:
            build(owner, **{name: OTHER_VALUES[name]})
    value = "print" if name == "param_init_fn" else repr(OTHER_VALUES[name])
    assert f"Found {name}={value} of {owner}" in str(error.value)
    assert REFUSED[name].instead[owner] in str(error.value)


def test_units_and_other_names() -> None:
    given = {"reduce_bucket_size_in_m": 0.5, "initial_scale": 4.0, "search_range_mb": 3, "min_chunk_size_mb": None}
    given |= {"min_chunk_size_m": 7, "search_range_m": 32, "enable_async_reduce": False}
    keywords = Keywords("a test", given)
    assert keywords.read(ZeroConfig, stage=2) == ZeroConfig(2, 1 << 19, overlap_communication=False)
    assert keywords.read(ScalerConfig).init_scale == 4.0
    config = keywords.read(GeminiConfig)
    assert (config.search_range_m, config.min_chunk_size_m) == (3, 7)


def test_keywords_that_are_passed_on_are_read_again() -> None:
    given = {"initial_scale": 8.0, "hysteresis": 3, "max_norm": 2.0, "max_prefetch": 2, "search_range_mb": 3}
    passed = keywords_for(GeminiOptimizer, given), keywords_for(GeminiDDP, given)
    assert passed[0] == {"initial_scale": 8.0, "hysteresis": 3, "max_norm": 2.0}
    assert passed[1] == {"max_prefetch": 2, "search_range_mb": 3}
    for options, keywords in zip(
        (ScalerConfig(8.0, hysteresis=3), Clipping(max_norm=2.0), GeminiConfig(max_prefetch=2, search_range_m=3)),
        (passed[0], passed[0], passed[1]),
        strict=True,
    ):
        assert Keywords("a test", keywords).read(type(options)) == options
    with fake_world(1):
        optimizer = GeminiAdamOptimizer(GeminiDDP(nn.Linear(2, 2)), initial_scale=8.0, min_scale=1.0)
    assert optimizer.scaler.scale_value == 8.0


def test_one_loss_scale_by_default() -> None:
    fronts = (LowLevelZeroPlugin, GeminiPlugin, HybridParallelPlugin, GeminiOptimizer, zero_optim_wrapper)
    fronts += (FP16NaiveMixedPrecision,)
    defaults = [
        {name: each.default for name, each in inspect.signature(front).parameters.items() if name in LOSS_SCALE}
        for front in fronts
    ]
    assert set(defaults[0]) == LOSS_SCALE
    assert defaults.count(defaults[0]) == len(fronts)


def test_unknown_keywords_of_a_dictionary() -> None:
    with pytest.raises(ConfigError, match=r"optim_config accepts a, b. Found c. Remove or correct it"):
        check_known("optim_config", {"a": 1, "c": 2}, ("a", "b"))


@pytest.mark.parametrize("options", [{"max_norm": -1.0}, {"norm_type": 0.0}])
def test_norms_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}={next(iter(options.values()))}"):
        Clipping(**options)


CONSTRUCTED: dict[str, tuple[Callable[[], Any], str]] = {
    "Gemini": (GeminiPlugin, "max_norm"),
    "ZeRO": (LowLevelZeroPlugin, "max_norm"),
    "pipeline": (partial(HybridParallelPlugin, 1, 2, num_microbatches=2), "num_microbatches"),
    "size of micro-batches": (partial(HybridParallelPlugin, 1, 2, num_microbatches=2), "microbatch_size"),
    "size of an axis": (partial(HybridParallelPlugin, 2, 1), "tp_size"),
    "DDP": (TorchDDPPlugin, "find_unused_parameters"),
    "FSDP": (TorchFSDPPlugin, "sharding_strategy"),
    "mixture of experts": (partial(MoeHybridParallelPlugin, 1, 1, 2), "microbatch_size"),
    "Booster": (partial(Booster, device="cpu"), "max_norm"),
}


@pytest.mark.parametrize("case", CONSTRUCTED)
def test_options_cannot_be_set_where_nothing_would_look(case: str) -> None:
    construct, name = CONSTRUCTED[case]
    made = construct()
    before = dict(vars(made))
    with pytest.raises(ConfigError, match=rf"{name}=4 set afterwards.*Pass {type(made).__name__}\({name}=\.\.\.\)"):
        setattr(made, name, 4)
    assert vars(made) == before


class OwnPlugin(HybridParallelPlugin):
    def __init__(self, layers: int, num_microbatches: int) -> None:
        super().__init__(1, 2, num_microbatches=num_microbatches)
        self.layers = layers


def test_a_plugin_of_a_program_keeps_its_own_options() -> None:
    plugin = OwnPlugin(3, 2)
    plugin.layers += 1
    plugin.note = "of the program"  # pyright: ignore[reportAttributeAccessIssue]
    assert plugin.layers == 4
    with pytest.raises(ConfigError, match=r"Pass OwnPlugin\(num_microbatches=\.\.\.\)"):
        plugin.num_microbatches = 4  # pyright: ignore[reportAttributeAccessIssue]
