"""What an engine is made of: precisions, ZeRO, handlers of the program's own, hooks, errors."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_models import STEPS, WIDTH, blocks, make_engine, take_step, train, train_alone, wholes_of
from equality import assert_equal, assert_within_rounding
from torch import nn

from colossal._src.cluster import set_current_config
from colossal.errors import ConfigError, UnsupportedError
from colossal.legacy import initialize
from colossal.legacy.amp import AMP_TYPE
from colossal.legacy.context import ParallelMode, global_context
from colossal.legacy.engine import (
    BaseGradientHandler,
    BaseOpHook,
    Engine,
)
from colossal.legacy.pipeline import build_pipeline_model
from colossal.legacy.registry import GRADIENT_HANDLER
from colossal.legacy.zero import TensorShardStrategy
from colossal.testing import fake_world, run_processes

PIPELINE = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}
PRECISIONS: dict[str, dict[str, Any]] = {
    "torch": {"fp16": {"mode": AMP_TYPE.TORCH, "init_scale": 64.0}},
    "naive": {"fp16": {"mode": AMP_TYPE.NAIVE, "initial_scale": 64.0}},
    "zero": {
        "zero": {"model_config": {"shard_strategy": TensorShardStrategy()}, "optimizer_config": {"initial_scale": 64}}
    },
}
DATA, ONE_D, TWO_D = {"data": 2}, {"tensor": {"size": 2, "mode": "1d"}}, {"tensor": {"size": 4, "mode": "2d"}}
IN_PRECISIONS: list[tuple[str, int, dict[str, Any]]] = [
    *((name, 2, {"parallel": DATA}) for name in PRECISIONS),
    ("torch", 2, {"parallel": ONE_D}),
    ("torch", 4, {"parallel": TWO_D}),
    ("naive", 4, {"parallel": ONE_D}),
    ("naive", 4, PIPELINE),
    ("naive", 4, {"parallel": {"pipeline": 2, **ONE_D}, "NUM_MICRO_BATCHES": 2}),
    ("zero", 4, {"parallel": ONE_D}),
]


@pytest.fixture(autouse=True)
def without_config() -> Iterator[None]:
    yield
    set_current_config(None)


@GRADIENT_HANDLER.register_module
class SumHandler(BaseGradientHandler):
    """Sums gradients instead of averaging them, times a factor of the config."""

    def __init__(self, model: nn.Module, optimizer: Any, factor: float = 1.0) -> None:
        super().__init__(model, optimizer)
        self.factor = factor

    def handle_gradient(self) -> None:
        for parameter in self._model.parameters():
            torch.distributed.all_reduce(parameter.grad)
            assert parameter.grad is not None
            parameter.grad *= self.factor


class Calls(BaseOpHook):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def note(self, moment: str, module: nn.Module, shown: Any = "") -> None:
        assert isinstance(module, nn.Linear)
        self.calls.append(f"{moment} {shown}".strip())

    def pre_fwd_exec(self, module: nn.Module, *args: Any) -> None:
        self.note("forward of", module, len(args))

    def post_fwd_exec(self, module: nn.Module, *args: Any) -> None:
        assert len(args) == 1
        self.note("forward done", module)

    def pre_bwd_exec(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: A002 (the documented name)
        assert not output.requires_grad
        assert len(input) == 1
        self.note("backward", module, tuple(output.shape))

    def post_bwd_exec(self, module: nn.Module, input: Any) -> None:  # noqa: A002 (the documented name)
        self.note("backward done", module, tuple(input[0].shape))

    def post_iter(self) -> None:
        self.calls.append("step")


def outcome(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Losses, and after the steps the model's outputs, or of stages the whole parameters."""
    try:
        engine = make_engine(config)
        losses = torch.stack([take_step(engine, step) for step in range(STEPS)])
        if engine.uses_pipeline:
            return {"losses": losses, **wholes_of(engine.model)}
        engine.eval()
        dtype = losses.dtype if losses.dtype == torch.float64 else torch.float32
        with torch.no_grad():
            return {"losses": losses, "outputs": engine(torch.eye(WIDTH, dtype=dtype))}
    finally:
        set_current_config(None)


def outcome_alone(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What one process has, of both kinds."""
    try:
        engine = make_engine(config)
        losses = torch.stack([take_step(engine, step) for step in range(STEPS)])
        dtype = losses.dtype if losses.dtype == torch.float64 else torch.float32
        with torch.no_grad():
            outputs = engine(torch.eye(WIDTH, dtype=dtype))
        return {"losses": losses, "outputs": outputs, **({} if "zero" in config else wholes_of(engine.model))}
    finally:
        set_current_config(None)


@pytest.mark.parametrize(("name", "size", "options"), IN_PRECISIONS)
def test_a_precision_of_the_config_equals_one_process_within_rounding(
    name: str, size: int, options: dict[str, Any]
) -> None:
    ranks = run_processes(outcome, size, {**PRECISIONS[name], **options})
    (alone,), (exact,) = run_processes(outcome_alone, 1, PRECISIONS[name]), run_processes(outcome_alone, 1, {})
    mean = torch.stack([rank.pop("losses") for rank in ranks]).mean(0)
    assert_within_rounding(mean, alone["losses"], exact["losses"], torch.float16, "losses")
    assert {key for rank in ranks for key in rank} in ({"outputs"}, alone.keys() - {"outputs", "losses"})
    for rank in ranks:
        for key, value in rank.items():
            assert_within_rounding(value, alone[key], exact[key], torch.float16, key)


def test_a_handler_of_the_programs_own_replaces_the_reduction() -> None:
    config = {"parallel": {"data": 2}, "gradient_handler": [{"type": "SumHandler", "factor": 0.5}]}
    expected, ranks = train_alone(), run_processes(train, 2, config)
    for rank in ranks:
        for name, value in rank["parameters"].items():
            assert_equal(value, expected["parameters"][name], name)
    doubled = run_processes(train, 2, {**config, "gradient_handler": [{"type": "SumHandler"}]})
    for rank in doubled:
        for name, grad in rank["grads"].items():
            assert_equal(grad, 2 * expected["grads"][name], name)


def test_hooks_see_the_passes_of_modules_with_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    first, later = Calls(), Calls()
    engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), ophooks=[first], verbose=False)
    engine.backward(engine(torch.ones(4, 2)).sum())
    engine.step()
    forward = ["forward of 1", "forward done"] * 2
    backward = ["backward (4, 1)", "backward done (4, 3)", "backward (4, 3)", "backward done (4, 2)"]
    assert first.calls == [*forward, *backward, "step"]
    engine.add_hook(later)
    engine.remove_hook(first)
    with torch.no_grad():
        engine(torch.ones(4, 2))
    assert (later.calls, len(first.calls)) == (forward, 9)
    engine.remove_hook(later)
    engine(torch.ones(4, 2))
    assert later.calls == forward
    with pytest.raises(ConfigError, match="removed that the engine has"):
        engine.remove_hook(later)
    with pytest.raises(ConfigError, match="subclass of BaseOpHook. Found 'hook'"):
        engine.add_hook("hook")  # type: ignore[arg-type]


def test_a_mode_that_is_none_trains_in_the_precision_of_the_model() -> None:
    found = []
    for config in ({}, {"fp16": {"mode": None}}):
        global_context.load_config(config)
        engine, *_ = initialize(blocks(0, 3), lambda own: torch.optim.SGD(own, lr=1.0), nn.MSELoss(), verbose=False)
        x = torch.ones(4, 8, dtype=torch.float64)
        engine.backward(engine.criterion(engine(x), x))
        engine.step()
        found.append(wholes_of(engine.model))
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value)


@pytest.mark.parametrize("options", [{"clip_grad": 0.5}, {"clip_grad_norm": 0.5, "verbose": False}])
@pytest.mark.parametrize("beside", [{}, {"clip_grad_norm": 0.5}, PIPELINE])
def test_the_naive_mode_of_a_config_clips(options: dict[str, Any], beside: dict[str, Any]) -> None:
    with fake_world(2):
        engine = make_engine({"fp16": {"mode": AMP_TYPE.NAIVE, **options}, **beside})
        with pytest.raises(ConfigError, match=r"max_norm=2.0.* next to 0.5"):
            engine.optimizer.set_max_norm(2.0)


def test_a_schedule_counts_updates_and_a_model_may_be_a_function() -> None:
    global_context.load_config({"gradient_accumulation": 2, "cudnn_deterministic": True})
    before = torch.backends.cudnn.deterministic
    engine, *_ = initialize(lambda: blocks(0, 3), lambda own: torch.optim.SGD(own, lr=1.0), nn.MSELoss(), verbose=False)
    assert torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = before
    model = blocks(0, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine, _, _, scheduler = initialize(model, optimizer, nn.MSELoss(), lr_scheduler=rates, verbose=False)
    seen = []
    x = torch.ones(4, 8, dtype=torch.float64)
    for _ in range(4):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), x))
        engine.step()
        scheduler.step()
        seen.append(scheduler.get_last_lr()[0])
    assert (seen, engine.num_steps) == ([1.0, 0.5, 0.5, 0.25], 2)
    with pytest.raises(ConfigError, match="Found one that drives another"):
        initialize(blocks(0), lambda own: torch.optim.SGD(own, lr=1.0), lr_scheduler=rates, verbose=False)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"fp16": {"mode": AMP_TYPE.TORCH}, "zero": {}}, ConfigError, "both fp16 and zero"),
    ({**PIPELINE, "fp16": {"mode": AMP_TYPE.TORCH}}, ConfigError, "AMP_TYPE.NAIVE only"),
    ({"parallel": {"pipeline": 2}}, ConfigError, "no NUM_MICRO_BATCHES"),
    ({**PIPELINE, "zero": {}}, UnsupportedError, "zero and a pipeline"),
    (
        {**PIPELINE, "NUM_CHUNKS": 2, "NUM_MICRO_BATCHES": 3},
        ConfigError,
        "Interleaved stages take a number of micro-batches",
    ),
    ({"zero": {}, "gradient_handler": [{"type": "SumHandler"}]}, UnsupportedError, "SumHandler next to zero"),
    ({"gradient_handler": [{"type": "Nothing"}]}, ConfigError, "Found 'Nothing' among gradient handlers"),
    ({"gradient_handler": ["SumHandler"]}, ConfigError, "a list of dict"),
    (
        {"gradient_handler": [{"type": "SumHandler"}], "gradient_handlers": [{"type": "SumHandler"}]},
        ConfigError,
        "once",
    ),
    ({"gradient_accumulation": 0.5}, ConfigError, "gradient_accumulation=0.5"),
    ({"clip_grad_norm": -1.0}, ConfigError, "clip_grad_norm=-1.0"),
    ({"clip_grad_norm": 1.0, "fp16": {"mode": AMP_TYPE.NAIVE, "clip_grad": 2.0}}, ConfigError, r"Found \[1.0, 2.0\]"),
    ({"cudnn_benchmark": "yes"}, ConfigError, "cudnn_benchmark is True or False"),
    ({"torch_ddp": {"bucket": 1}, "parallel": {"data": 2}}, ConfigError, "Found bucket"),
    ({"zero": {"stage": 3}}, ConfigError, "Found stage"),
    ({"zero": True}, ConfigError, r"Found zero=True. Write zero=dict\(model_config"),
    ({"fp16": AMP_TYPE.TORCH}, ConfigError, r"Found fp16=.*Write fp16=dict\(mode=AMP_TYPE.TORCH\)"),
    ({"torch_ddp": True}, ConfigError, "torch_ddp of a config is a dict of options"),
    ({"gradient_accumulation": 0}, ConfigError, "Found gradient_accumulation=0"),
    ({"clip_grad_norm": "1.0"}, ConfigError, "Found clip_grad_norm='1.0'"),
    ({**PIPELINE, "NUM_MICRO_BATCHES": "2"}, ConfigError, "Found NUM_MICRO_BATCHES='2'"),
    ({**PIPELINE, "NUM_CHUNKS": 0}, ConfigError, "Found NUM_CHUNKS=0"),
    (
        {**PIPELINE, "parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "sequence"}}},
        UnsupportedError,
        "a pipeline of 2 stages next to sequences that are sharded over 2 ranks",
    ),
]


@pytest.mark.parametrize(("config", "error", "text"), WRONG)
def test_a_config_that_cannot_be_honored_is_rejected(config: dict[str, Any], error: type[Exception], text: str) -> None:
    with fake_world(4 if "tensor" in config.get("parallel", {}) else 2), pytest.raises(error, match=text):
        make_engine(config)


class Lines(logging.Handler):
    """Keeps the warnings of this rank while a function runs."""

    def of(self, function: Callable[[], Any]) -> list[str]:
        self.found: list[str] = []
        logging.getLogger("colossal").addHandler(self)
        try:
            function()
        finally:
            logging.getLogger("colossal").removeHandler(self)
        return self.found

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            self.found.append(record.getMessage())


def test_an_entry_that_is_nearly_written_like_one_is_named() -> None:
    own = {"BATCH_SIZE": 8, "LEARNING_RATE": 0.1, "model": {"type": "VanillaResNet"}, "clip": 1.0, "num_epochs": 2}
    with fake_world(1):
        assert Lines().of(lambda: make_engine(own)) == []
        (line,) = Lines().of(lambda: make_engine({**own, "gradient_accumulations": 4}))
        (short,) = Lines().of(lambda: make_engine({**own, "zro": {}}))
        (of_deepspeed,) = Lines().of(lambda: make_engine({**own, "gradient_clipping": 1.0}))
    assert "'gradient_accumulations', which training does not read; its entry is 'gradient_accumulation'" in line
    assert "'zro', which training does not read; its entry is 'zero'" in short
    assert "'gradient_clipping', which training does not read; its entry is 'clip_grad_norm'" in of_deepspeed


def call_and_boost_full_model() -> list[str]:
    """Call an engine that has stages, and give each rank of a pipeline the full model."""

    def build(model: nn.Module) -> Engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return initialize(model, optimizer, nn.MSELoss(), verbose=False)[0]

    global_context.load_config(PIPELINE)
    global_context.init_parallel_groups()
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pytest.raises(UnsupportedError, match=r"Call engine.execute_schedule\(data_iter\)"):
        build(layers[global_context.get_local_rank(ParallelMode.PIPELINE)])(torch.ones(2, 2))
    found = Lines().of(lambda: build(build_pipeline_model(nn.Sequential(*layers))))
    torch.manual_seed(0)
    return [*found, *Lines().of(lambda: build(nn.Sequential(nn.Linear(2, 2))))]


def test_stages_are_not_called_and_are_not_the_full_model() -> None:
    first, last = run_processes(call_and_boost_full_model, 2)
    (line,) = (text for text in first if "own stage" in text)
    assert "as if every rank passed the full model. Partition it, by build_pipeline_model(sequential)" in line
    assert not any("own stage" in text for text in last)  # said by one rank
