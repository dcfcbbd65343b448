# pyright: reportMissingImports=false, reportCallIssue=false, reportReturnType=false
"""A trainer runs epochs as a loop over the engine does, and its hooks know what they are told."""

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colossal._src.cluster import set_current_config
from colossal.errors import ConfigError, UnsupportedError
from colossal.legacy import initialize
from colossal.legacy.context import ParallelMode, global_context
from colossal.legacy.engine import Engine, NonPipelineSchedule
from colossal.legacy.utils import MultiTimer, get_dataloader, load_checkpoint
from colossal.nn import Accuracy
from colossal.testing import run_processes
from colossal.trainer import Trainer, hooks

SAMPLES, CLASSES, EPOCHS, BATCH = 16, 3, 3, 8
Names = list[str]


class Log:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: Names = []

    def info(self, text: str, ranks: Any = None) -> None:  # noqa: ARG002 (as of a logger)
        self.lines.append(text)


def dataset() -> torch.utils.data.TensorDataset:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 4, generator=draws, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, torch.randint(CLASSES, (SAMPLES,), generator=draws))


def layers() -> list[nn.Module]:
    torch.manual_seed(2)
    return [nn.Linear(4, 6).double(), nn.Tanh(), nn.Linear(6, CLASSES).double()]


def make(config: dict[str, Any]) -> tuple[Engine, Any, Any, Any]:
    """An engine, loaders and a schedule under a config."""
    global_context.load_config(config)
    replicas = 1
    if torch.distributed.is_initialized():
        global_context.init_parallel_groups()
        replicas = global_context.data_parallel_size
    parts = layers()
    if "NUM_MICRO_BATCHES" in config:
        parts = parts[:2] if global_context.is_first_rank(ParallelMode.PIPELINE) else parts[2:]
    model = nn.Sequential(*parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    size = BATCH // replicas // config.get("gradient_accumulation", 1)
    loaders = [get_dataloader(dataset(), batch_size=size) for _ in range(2)]
    return initialize(model, optimizer, nn.CrossEntropyLoss(), *loaders, schedule, verbose=False)


def fit(config: dict[str, Any]) -> dict[str, Any]:
    try:
        engine, train, test, schedule = make(config)
        trainer, log = Trainer(engine), Log()
        trainer.fit(
            train,
            EPOCHS,
            test_dataloader=test,
            hooks=[
                hooks.LogMetricByEpochHook(log),
                hooks.LRSchedulerHook(schedule, by_epoch=False),
                hooks.AccuracyHook(Accuracy()),
                hooks.LossHook(),
            ],
        )
        return {
            "lines": log.lines,
            "loss": trainer.metrics("test")["Loss"].get_accumulated_value(),
            "lr": schedule.get_last_lr()[0],
            "state": {name: each.detach().clone() for name, each in engine.model.named_parameters()},
        }
    finally:
        set_current_config(None)


def fit_alone() -> tuple[list[tuple[float, float, float, float]], dict[str, torch.Tensor], float]:
    """Losses and accuracies of training and test in each epoch, by nothing but torch; and the parameters."""
    model, criterion = nn.Sequential(*layers()), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    x, y = dataset().tensors
    rows = []
    for _ in range(EPOCHS):
        losses, right = [], 0
        for part, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
            optimizer.zero_grad()
            output = model(part)
            loss = criterion(output, labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            right += int((output.argmax(-1) == labels).sum())
        with torch.no_grad():
            output = model(x)
        tested = criterion(output, y).item(), (output.argmax(-1) == y).double().mean().item()
        rows.append((sum(losses) / len(losses), right / SAMPLES, *tested))
    return rows, {name: each.detach() for name, each in model.named_parameters()}, schedule.get_last_lr()[0]


CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "data": (2, {"parallel": {"data": 2}}),
    "accumulation": (2, {"parallel": {"data": 2}, "gradient_accumulation": 2}),
    "pipeline": (2, {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_trainer_equals_a_loop_in_one_process(name: str) -> None:
    size, config = CONFIGS[name]
    (rows, parameters, rate), ranks = fit_alone(), run_processes(fit, size, config)
    logging = ranks[-1]["lines"] if name == "pipeline" else ranks[0]["lines"]
    found = [[float(text.split(" = ")[1]) for text in line.split("]: ")[1].split(", ")] for line in logging]
    assert sum(len(rank["lines"]) for rank in ranks) == 2 * EPOCHS
    for epoch, (loss, accuracy, test_loss, test_accuracy) in enumerate(rows):
        assert logging[2 * epoch].startswith(f"[Epoch {epoch} / Train]: ")
        trained, tested = found[2 * epoch], found[2 * epoch + 1]
        assert trained[:2] == pytest.approx([accuracy, loss], rel=1e-4)
        assert tested == pytest.approx([test_accuracy, test_loss], rel=1e-4)
    values = {key: value for rank in ranks for key, value in rank["state"].items()}
    assert len(values) == len(parameters)
    for value, expected in zip(values.values(), parameters.values(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
    assert [rank["lr"] for rank in ranks] == [rate] * size


class Order(hooks.BaseHook):
    def __init__(self, name: str, priority: int, calls: Names) -> None:
        super().__init__(priority)
        self.name, self.calls = name, calls

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("before_", "after_")):
            self.calls.append(f"{self.name} {name}")
        return super().__getattribute__(name)


def test_hooks_run_by_priority_at_each_point_of_the_life_cycle() -> None:
    engine, train, test, _ = make({})
    calls: Names = []
    trainer = Trainer(engine)
    trainer.fit(
        train, 1, max_steps=1, test_dataloader=test, hooks=[Order("second", 5, calls), Order("first", 1, calls)]
    )
    points = ["after_hook_is_attached", "before_train", "before_train_epoch", "before_train_iter", "after_train_iter"]
    points += ["after_train_epoch", "before_test", "before_test_epoch"]
    points += ["before_test_iter", "after_test_iter"] * 2
    points += ["after_test_epoch", "after_test", "after_train"]
    assert calls == [f"{name} {point}" for point in points for name in ("first", "second")]
    assert (trainer.cur_epoch, trainer.cur_step, trainer.steps_per_epoch) == (1, 1, 2)


def test_a_hook_of_the_programs_own_needs_no_constructor_of_the_base() -> None:
    class LogMessageHook(hooks.BaseHook):
        def __init__(self) -> None:
            self.seen: Names = []

        def before_train(self, trainer: Trainer) -> None:
            self.init_runner_states(trainer, "mine", 1)
            self.init_runner_states(trainer, "mine", 2)
            self.seen.append("training starts")

    engine, train, _, _ = make({})
    hook, trainer = LogMessageHook(), Trainer(engine)
    trainer.fit(train, 1, hooks=[hook])
    assert (hook.priority, hook.seen, trainer.states) == (10, ["training starts"], {"mine": 1})


def test_times_rates_and_memory_are_logged() -> None:
    engine, train, test, _ = make({})
    timer, log, shown = MultiTimer(), Log(), list[str]()
    trainer = Trainer(engine, timer, log)

    class Show(hooks.BaseHook):
        def before_train_iter(self, trainer: Trainer) -> None:
            if "step_metrics" in trainer.states:
                shown.append(trainer.states["step_metrics"]["throughput"])

        def after_train_epoch(self, trainer: Trainer) -> None:
            shown.append(trainer.states["step_metrics"]["throughput"])

    listed = [
        hooks.LossHook(),
        hooks.ThroughputHook(ignored_steps=1, tflop_per_step=0.5),
        hooks.LogMetricByStepHook(),
        hooks.LogTimingByEpochHook(timer, log, ignore_num_train_steps=1),
        hooks.LogMemoryByEpochHook(log, report_cpu=True),
        Show(priority=11),
    ]
    trainer.fit(train, 2, test_dataloader=test, hooks=listed, display_progress=True, test_interval=2)
    assert len(shown) == 2 * 2 + 1  # before all iterations but the first, and after both epochs
    assert all("sample_per_sec" in each and "Tflops" in each for each in shown)
    rate = trainer.metrics("train")["Throughput"].get_accumulated_value()
    assert math.isfinite(rate)
    assert rate > 0
    times = [line for line in log.lines if "Train-step: mean" in line]
    assert len(times) == 2
    assert len([line for line in log.lines if "Test-step: mean" in line]) == 1
    assert len([line for line in log.lines if "Before train" in line]) == 1
    assert not timer.get_timer("Train-epoch").has_history


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    engine, train, _, schedule = make({})
    saving = [hooks.LRSchedulerHook(schedule, by_epoch=True), hooks.SaveCheckpointHook(1, tmp_path)]
    Trainer(engine).fit(train, 3, hooks=saving)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch_0.pt", "epoch_1.pt", "epoch_2.pt"]
    other, train, _, schedule = make({})
    trainer = Trainer(other)
    trainer.cur_epoch = 1 + load_checkpoint(tmp_path / "epoch_1.pt", other.model, other.optimizer, schedule)
    trainer.fit(train, 3, hooks=[hooks.LRSchedulerHook(schedule, by_epoch=True)])
    assert (trainer.cur_epoch, trainer.cur_step) == (3, 6)
    for found, expected in zip(other.model.parameters(), engine.model.parameters(), strict=True):
        assert torch.equal(found, expected)
    one_file = tmp_path / "last.pt"
    Trainer(engine).fit(train, 1, hooks=[hooks.SaveCheckpointHook(2, one_file, save_by_iter=True)])
    assert torch.load(one_file, weights_only=True)["epoch"] == 0


def predict() -> list[float]:
    try:
        engine, *_ = make({"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2})
        output = Trainer(engine).predict(dataset().tensors[0])
        return [] if output is None else output.flatten().tolist()
    finally:
        set_current_config(None)


def test_it_predicts_and_evaluates() -> None:
    engine, _, test, _ = make({})
    trainer, loss = Trainer(engine, schedule=NonPipelineSchedule()), hooks.LossHook()
    trainer.evaluate(test, hooks=[loss], display_progress=True)
    x, y = dataset().tensors
    expected = nn.Sequential(*layers())(x)
    assert loss.test_loss.get_accumulated_value() == pytest.approx(nn.functional.cross_entropy(expected, y).item())
    torch.testing.assert_close(trainer.predict(x), expected)
    assert not engine.training
    assert run_processes(predict, 2) == [[], pytest.approx(expected.flatten().tolist())]


def test_metrics_are_written_for_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, int]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path)

        def add_scalar(self, name: str, value: float, index: int) -> None:
            assert math.isfinite(value)
            written.append((name, index))

        def flush(self) -> None:
            written.append(("flush", -1))

    engine, train, test, _ = make({})
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(UnsupportedError, match="pip install tensorboard"):
            hooks.TensorboardHook(tmp_path)
    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    Trainer(engine).fit(train, 1, test_dataloader=test, hooks=[hooks.LossHook(), hooks.TensorboardHook(tmp_path, [0])])
    expected = [("Loss/train", 0), ("Loss/train", 1), ("epoch/Loss/train", 0), ("epoch/Loss/test", 0), ("flush", -1)]
    assert written == expected


def test_what_does_not_fit_is_rejected() -> None:
    engine, train, *_ = make({})
    trainer = Trainer(engine)
    with pytest.raises(ConfigError, match="Found epochs=0"):
        trainer.fit(train, 0)
    with pytest.raises(ConfigError, match="a subclass of BaseHook. Found 'hook'"):
        trainer.fit(train, 1, hooks=["hook"])
    with pytest.raises(ConfigError, match="loaders that have a length. Found a generator"):
        trainer.fit((batch for batch in train), 1)
    with pytest.raises(ConfigError, match="Leave return_output_label=False out"):
        trainer.fit(train, 1, hooks=[hooks.AccuracyHook(Accuracy())], return_output_label=False)
    with pytest.raises(ConfigError, match="checkpoint_dir=None"):
        hooks.SaveCheckpointHook()
    with pytest.raises(ConfigError, match="Found interval=0"):
        hooks.LogMetricByEpochHook(interval=0)
    with pytest.raises(ConfigError, match="Found Linear"):
        Trainer(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="counted from 0"):
        trainer.cur_epoch = -1


def test_a_progress_bar_without_tqdm_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    engine, train, *_ = make({})
    with pytest.raises(UnsupportedError, match="pip install tqdm"):
        Trainer(engine).fit(train, 1, display_progress=True)
