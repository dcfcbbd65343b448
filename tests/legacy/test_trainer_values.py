# pyright: reportMissingImports=false
"""What a trainer reports, and goes on with, is that of all samples, on every rank."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from colossal._src.cluster import set_current_config
from colossal.errors import ConfigError, UnsupportedError
from colossal.legacy import initialize
from colossal.legacy.amp import AMP_TYPE
from colossal.legacy.context import ParallelMode, global_context
from colossal.legacy.engine import Engine
from colossal.legacy.utils import clip_grad_norm_fp32, count_zeros_fp32, get_dataloader, load_checkpoint
from colossal.nn import Accuracy
from colossal.testing import run_processes
from colossal.trainer import Trainer, hooks

DATA, SEQUENCE = {"parallel": {"data": 2}}, {"parallel": {"tensor": {"size": 2, "mode": "sequence"}}}
PIPELINE = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}
SCALES: dict[AMP_TYPE, dict[str, float]] = {
    AMP_TYPE.TORCH: {"init_scale": 64.0},
    AMP_TYPE.NAIVE: {"initial_scale": 64.0},
}
CLASSES = 3


def samples(number: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(number, 4, generator=draws, dtype=torch.float64)
    return x, torch.randint(CLASSES, (number,), generator=draws)


def net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


class Scaled(nn.Module):
    """A model whose batches begin with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * scale


def token_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs.flatten(0, -2), labels.flatten())


def engine_of(config: dict[str, Any], model: nn.Module | None = None, criterion: Any = token_loss) -> Engine:
    global_context.load_config(dict(config))
    if dist.is_initialized():
        global_context.init_parallel_groups()
    model = model or net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return initialize(model, optimizer, criterion, verbose=False)[0]


def loader(*tensors: torch.Tensor, size: int = 4, shuffle: bool = False) -> Any:
    return get_dataloader(torch.utils.data.TensorDataset(*tensors), batch_size=size, shuffle=shuffle)


def evaluate(engine: Engine, batches: Any) -> list[float]:
    """Loss and accuracy of a test."""
    trainer = Trainer(engine)
    trainer.evaluate(batches, hooks=[hooks.LossHook(), hooks.AccuracyHook(Accuracy())])
    return [trainer.metrics("test")[name].get_accumulated_value() for name in ("Loss", "Accuracy")]


def expected(x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """The same of all samples at once, in one process."""
    with torch.no_grad():
        outputs = net()(x)
    return [token_loss(outputs, y).item(), (outputs.argmax(-1) == y)[y != -100].double().mean().item()]


def of_a_small_last_batch() -> list[float]:
    return evaluate(engine_of(DATA), loader(*samples()))


def of_several_labels_for_each_sample() -> list[float]:
    x, y = samples(24)
    return evaluate(engine_of(DATA), loader(x.view(8, 3, 4), y.view(8, 3)))


def of_labels_that_are_left_out() -> list[float]:
    x, y = samples(16)
    return evaluate(engine_of(DATA), loader(x, y.where(torch.arange(16) % 4 < 2, -100)))


def of_batches_that_begin_with_a_number() -> list[float]:
    engine, (x, y), rank = engine_of(DATA, Scaled()), samples(16), dist.get_rank()
    batch = {"scale": torch.ones((), dtype=torch.float64), "x": x.chunk(2)[rank], "label": y.chunk(2)[rank]}
    return evaluate(engine, [batch])


def of_sharded_sequences() -> list[float]:
    engine, (x, y), rank = engine_of(SEQUENCE), samples(16), dist.get_rank()
    return evaluate(engine, [(x.view(4, 4, 4).chunk(2, 1)[rank], y.view(4, 4).chunk(2, 1)[rank])])


def of_samples_in_all_of_these() -> dict[str, list[float]]:
    (x, y), (x16, y16), (x24, y24) = samples(), samples(16), samples(24)
    return {
        "small_last_batch": expected(x, y),
        "several_labels_for_each_sample": expected(x24, y24),
        "labels_that_are_left_out": expected(x16, y16.where(torch.arange(16) % 4 < 2, -100)),
        "batches_that_begin_with_a_number": expected(x16, y16),
        "sharded_sequences": expected(x16, y16),
    }


class Noted(torch.utils.data.Dataset[Any]):
    """Samples that note which of them are asked for."""

    def __init__(self) -> None:
        self.order, self.samples = list[int](), samples(8)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.order.append(index)
        return self.samples[0][index], self.samples[1][index]


def parameters_after(epochs: int, first: int = 0, folder: Path | None = None, *, peek: bool = False) -> list[float]:
    """Of training on shuffled samples; after going on from a file, or after one rank looked at a batch."""
    engine, train = engine_of(DATA), loader(*samples(16), shuffle=True)
    if peek and dist.get_rank() == 0:
        next(iter(train))
    trainer, used = Trainer(engine), list[Any]()
    if folder is not None and first:
        trainer.cur_epoch = 1 + load_checkpoint(folder / "epoch_1.pt", engine.model, engine.optimizer)
        assert trainer.cur_epoch == first
    elif folder is not None:
        used.append(hooks.SaveCheckpointHook(1, folder))
    trainer.fit(train, epochs, hooks=used)
    return nn.utils.parameters_to_vector(engine.model.parameters()).tolist()


def orders(folder: Path) -> dict[str, Any]:
    """Parameters of runs whose samples must come in one order, and the orders of two trainers, one after the other."""
    engine, noted = engine_of(DATA), Noted()
    train = get_dataloader(noted, shuffle=True, batch_size=4)
    for _ in range(2):
        Trainer(engine).fit(train, 1)
    whole = parameters_after(4, folder=folder)
    return {
        "resumed": (whole, parameters_after(4, 2, folder)),
        "peeked": parameters_after(2, peek=True),
        "two trainers": noted.order,
    }


def clipped_by_hand() -> dict[str, Any]:
    """The norm that is found under a loss scale, and what is said where the gradients are elsewhere."""
    (x, y), rank = samples(16), dist.get_rank()
    found: dict[str, Any] = {}
    for mode in (AMP_TYPE.TORCH, AMP_TYPE.NAIVE):
        engine = engine_of({**DATA, "fp16": {"mode": mode}}, net().float())
        engine.execute_schedule(iter([(x.float().chunk(2)[rank], y.chunk(2)[rank])]))
        if mode is AMP_TYPE.TORCH:
            found["norm"] = clip_grad_norm_fp32(engine.model.parameters(), 0.05)
            found["again"] = clip_grad_norm_fp32(engine.model.parameters(), 1.0)
            continue
        for function in (count_zeros_fp32, lambda own: clip_grad_norm_fp32(own, 1.0)):
            with pytest.raises(ConfigError, match="Found 4 parameters of the model"):
                function(engine.model.parameters())
    return found


def continued(mode: AMP_TYPE | None) -> list[float]:
    """Parameters after a backward pass from outputs whose gradient is known."""
    config: dict[str, Any] = DATA if mode is None else {**DATA, "fp16": {"mode": mode, **SCALES[mode]}}
    engine, (x, _), rank = engine_of(config, net().float()), samples(16), dist.get_rank()
    outputs = engine(x.float().chunk(2)[rank])
    engine.backward_by_grad(outputs, torch.full_like(outputs, 1 / outputs.numel()))
    engine.step()
    return torch.cat([each.detach().float().flatten() for each in engine.model.parameters()]).tolist()


def lengths_that_differ() -> list[int]:
    """What is refused on all ranks, and what is not."""
    engine, batch = engine_of(DATA), samples(4)
    with pytest.raises(ConfigError, match=r"Found \[3, 2\] in the train_dataloaders of ranks 0 to 1"):
        Trainer(engine).fit([batch] * (3 - dist.get_rank()), 1)
    with pytest.raises(ConfigError, match="Found none in the train_dataloader"):
        Trainer(engine).fit(get_dataloader(Noted(), batch_size=8, drop_last=True), 1)
    with pytest.raises(ConfigError, match="Found none in the test_dataloader"):
        Trainer(engine).fit([batch], 1, test_dataloader=[])
    Trainer(engine).evaluate([batch] * (3 - dist.get_rank()), hooks=[hooks.LossHook()])
    return [engine.num_steps]


def tensorboard(folder: Path) -> list[str]:
    """The names of what a rank of a pipeline writes."""
    written: list[str] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            assert folder

        def add_scalar(self, name: str, *_: Any) -> None:
            written.append(name)

        def flush(self) -> None:
            pass

    module: Any = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    global_context.load_config(dict(PIPELINE))
    global_context.init_parallel_groups()
    parts = list(net())
    model = nn.Sequential(*(parts[:1] if global_context.is_first_rank(ParallelMode.PIPELINE) else parts[1:]))
    used: list[Any] = [hooks.LossHook(), hooks.AccuracyHook(Accuracy())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", module)
        used.append(hooks.TensorboardHook(folder))
    trainer = Trainer(engine_of(PIPELINE, model))
    trainer.fit(loader(*samples(8)), 1, hooks=used)
    if global_context.is_first_rank(ParallelMode.PIPELINE):
        with pytest.raises(ConfigError, match="Found a read on stage 0 of 2"):
            used[1].metric.get_accumulated_value()
    return sorted({name for name in written if name.startswith("epoch/")})


def on_two_ranks(folder: Path) -> dict[str, Any]:
    """All of it in one launch."""
    cases: dict[str, Callable[[], Any]] = {
        "small_last_batch": of_a_small_last_batch,
        "several_labels_for_each_sample": of_several_labels_for_each_sample,
        "labels_that_are_left_out": of_labels_that_are_left_out,
        "batches_that_begin_with_a_number": of_batches_that_begin_with_a_number,
        "sharded_sequences": of_sharded_sequences,
        "orders": lambda: orders(folder),
        "clipped": clipped_by_hand,
        "continued": lambda: [continued(mode) for mode in (None, *SCALES)],
        "lengths": lengths_that_differ,
        "tensorboard": lambda: tensorboard(folder),
    }
    found = {}
    for name, case in cases.items():
        try:
            found[name] = case()
        finally:
            set_current_config(None)
    return found


@pytest.fixture(scope="module", name="ranks")
def run_on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_processes(on_two_ranks, 2, tmp_path_factory.mktemp("values"))


@pytest.mark.parametrize("name", of_samples_in_all_of_these())
def test_losses_and_accuracies_are_those_of_all_samples(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank[name] == pytest.approx(of_samples_in_all_of_these()[name], rel=1e-9)


def test_samples_come_in_one_order_also_after_a_checkpoint(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        whole, resumed = rank["orders"]["resumed"]
        assert resumed == pytest.approx(whole, rel=1e-12)
        order = rank["orders"]["two trainers"]
        assert order[:4] != order[4:]


def test_ranks_agree_on_the_order_after_one_of_them_looked_at_a_batch(ranks: list[dict[str, Any]]) -> None:
    x, y = samples(16)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for epoch in (1, 2):
        order = torch.randperm(16, generator=torch.Generator().manual_seed(1024 + epoch))
        for part in order.split(8):
            optimizer.zero_grad()
            cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    flat = nn.utils.parameters_to_vector(model.parameters()).tolist()
    for rank in ranks:
        assert rank["orders"]["peeked"] == pytest.approx(flat, rel=1e-9)


def test_gradients_under_a_loss_scale_are_clipped_by_their_own_norm(ranks: list[dict[str, Any]]) -> None:
    x, y = samples(16)
    model = net()
    cross_entropy(model(x), y).backward()
    norm = float(nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None]))
    for rank in ranks:
        assert rank["clipped"]["norm"] == pytest.approx(norm, rel=1e-2)
        assert rank["clipped"]["again"] == pytest.approx(0.05, rel=1e-2)


def test_a_known_gradient_is_scaled_as_a_loss_is(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        exact, *scaled = rank["continued"]
        assert torch.tensor(exact).sub(nn.utils.parameters_to_vector(net().parameters())).abs().max() > 0.05
        for each in scaled:
            assert each == pytest.approx(exact, abs=2e-3)


def test_loaders_that_would_train_nothing_or_let_ranks_wait_are_refused(ranks: list[dict[str, Any]]) -> None:
    assert [rank["lengths"] for rank in ranks] == [[0], [0]]


def test_tensorboard_gets_the_accuracy_of_the_last_stage(ranks: list[dict[str, Any]]) -> None:
    assert [rank["tensorboard"] for rank in ranks] == [[], ["epoch/Accuracy/train", "epoch/Loss/train"]]


@pytest.fixture(autouse=True)
def without_config() -> Iterator[None]:
    yield
    set_current_config(None)


def test_an_accuracy_above_one_is_refused() -> None:
    x, y = samples(6)
    hook = hooks.AccuracyHook(lambda outputs, labels: len(outputs) * labels.shape[1])
    Trainer(engine_of({})).evaluate([(x.view(2, 3, 4), y.view(2, 3))], hooks=[hook])
    with pytest.raises(ConfigError, match=r"Found 6 right of 2 samples.*colossal.nn.Accuracy\(\)"):
        hook.metric.get_accumulated_value()


def test_an_accuracy_of_several_outputs_is_refused() -> None:
    class Two(Scaled):
        def forward(self, *args: torch.Tensor) -> Any:
            return [super().forward(torch.ones((), dtype=torch.float64), *args)] * 2

    engine = engine_of({}, Two(), lambda outputs, _, labels: token_loss(outputs, labels))
    with pytest.raises(ConfigError, match=r"Found outputs of type list and labels of type Tensor.*outputs\[0\]"):
        evaluate(engine, [samples(4)])


def test_files_from_within_an_epoch_go_on_at_its_beginning(tmp_path: Path) -> None:
    train = [samples(4)] * 4
    trainer = Trainer(engine_of({}))
    trainer.fit(train, 2, max_steps=6, hooks=[hooks.SaveCheckpointHook(2, tmp_path, save_by_iter=True)])
    found = {path.stem: torch.load(path, weights_only=True)["epoch"] for path in tmp_path.iterdir()}
    assert found == {"step_2": -1, "step_4": 0, "step_6": 0}
    Trainer(engine_of({})).fit(train, 1, hooks=[hooks.SaveCheckpointHook(1, tmp_path / "lr0.1")])
    assert (tmp_path / "lr0.1" / "epoch_0.pt").is_file()


def test_what_a_run_leaves_out_is_said(tmp_path: Path, logged: Callable[[], list[str]]) -> None:
    trainer = Trainer(engine_of({"gradient_accumulation": 2}))
    trainer.fit([samples(4)] * 3, 2, hooks=[hooks.SaveCheckpointHook(1, tmp_path)])
    (waiting,) = [line for line in logged() if "saved after 1 of the 2 backward passes of an update" in line]
    assert "epoch_0.pt" in waiting
    trainer.fit([samples(4)] * 3, 2)
    assert "Found cur_epoch=2 and epochs=2. Pass epochs=4 for 2 more" in logged()[-1]


class Longer(list[Any]):
    """A loader that says a length that it does not have."""

    def __len__(self) -> int:
        return super().__len__() + 2


def test_passes_that_cannot_train_are_refused() -> None:
    engine, batch = engine_of({}), samples(4)
    for each in (lambda: Trainer(engine).fit(Longer([batch]), 1), lambda: Trainer(engine).evaluate(Longer([batch]))):
        with pytest.raises(ConfigError, match="Found one that has the length 3, and ended"):
            each()
    with torch.no_grad(), pytest.raises(ConfigError, match="Pass forward_only=True"):
        engine.execute_schedule(iter([batch]))
    with pytest.raises(ConfigError, match=r"Found a loss of shape \(4,\)"):
        engine_of({}, criterion=nn.CrossEntropyLoss(reduction="none")).execute_schedule(iter([batch]))
    model = net()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(model.parameters()))
    with pytest.raises(UnsupportedError, match=r"Found ReduceLROnPlateau.*in a hook of your own"):
        hooks.LRSchedulerHook(plateau, by_epoch=True)
    with pytest.raises(UnsupportedError, match=r"Found LBFGS.*optimizer.step\(closure\)"):
        Engine(model, torch.optim.LBFGS(model.parameters()), token_loss)
