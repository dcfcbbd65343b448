"""Cross-entropy and accuracy on every mesh equal those of one process, whatever is ignored, smoothed or reduced."""

import itertools
from typing import Any

import pytest
import torch
from parallel_layers import GRIDS, draw, on_grid
from torch.nn import functional

from colossal import comm
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError, ShapeError
from colossal.nn import Accuracy, CrossEntropyLoss, VocabParallelCrossEntropyLoss, gather_output, split_input
from colossal.testing import assert_close, run_threads

CASES = ((8, 12), (5, 7), (1, 3))


def cut_classes(logits: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    """The logits that a vocabulary-parallel classifier would make."""
    if mesh.tp_mode == "1d":
        return comm.scatter(logits, "tp", -1, mesh, uneven=True)
    return split_input(logits)


def check(name: str) -> None:
    with on_grid(name) as mesh:
        for (tokens, classes), reduction, smoothing in itertools.product(CASES, ("mean", "sum", "none"), (0.0, 0.2)):
            logits = 3 * draw(tokens, 2, classes, seed=tokens)
            targets = torch.randint(classes, (tokens, 2), generator=torch.Generator().manual_seed(1))
            targets[-1, 0] = -100
            options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
            whole = logits.clone().requires_grad_()
            expected = functional.cross_entropy(whole.flatten(0, 1), targets.flatten(), **options)
            expected.sum().backward()
            for is_cut in (False, True):
                given = logits.clone().requires_grad_()
                own = cut_classes(given, mesh) if is_cut else split_input(given, features=False)
                kind = VocabParallelCrossEntropyLoss if is_cut else CrossEntropyLoss
                result = kind(**options)(own, split_input(targets))
                if reduction == "none":
                    result = gather_output(result, features=False).flatten()
                assert_close(result.detach(), expected.detach(), f"{kind.__name__} {options} on {name}")
                result.sum().backward()
                assert given.grad is not None
                assert whole.grad is not None
                assert_close(given.grad, whole.grad, f"{kind.__name__} {options} on {name}: gradient")


@pytest.mark.parametrize("name", GRIDS)
def test_losses_and_gradients(name) -> None:
    run_threads(check, GRIDS[name]["tp"], name)


def check_ignored(name: str) -> None:
    """Of the first targets none counts, so that some ranks of a grid have none; and then of all."""
    with on_grid(name) as mesh:
        for number in (5, 8):
            logits, targets = 3 * draw(8, 12), torch.arange(8)
            targets[:number] = -100
            whole = logits.clone().requires_grad_()
            expected = functional.cross_entropy(whole, targets)
            expected.backward()
            assert whole.grad is not None
            assert whole.grad.isfinite().all()
            for is_cut in (False, True):
                given = logits.clone().requires_grad_()
                own = cut_classes(given, mesh) if is_cut else split_input(given, features=False)
                loss = (VocabParallelCrossEntropyLoss() if is_cut else CrossEntropyLoss())(own, split_input(targets))
                torch.testing.assert_close(loss.detach(), expected.detach(), equal_nan=True)
                loss.backward()
                assert given.grad is not None
                assert_close(given.grad, whole.grad, f"{number} of 8 ignored on {name}, cut: {is_cut}")


@pytest.mark.parametrize("name", GRIDS)
def test_targets_that_do_not_count_have_no_gradient(name) -> None:
    run_threads(check_ignored, GRIDS[name]["tp"], name)


def check_weights(name: str) -> None:
    with on_grid(name):
        logits, weight = draw(6, 4), torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
        targets = torch.tensor([0, 1, 2, 3, -100, 1])
        result = CrossEntropyLoss(weight)(split_input(logits, features=False), split_input(targets))
        assert_close(result, functional.cross_entropy(logits, targets, weight))


@pytest.mark.parametrize("name", GRIDS)
def test_weights_of_classes(name) -> None:
    run_threads(check_weights, GRIDS[name]["tp"], name)


def check_accuracy(name: str) -> None:
    with on_grid(name) as mesh:
        for tokens, classes in CASES:
            logits = draw(tokens, 2, classes).round()  # with ties
            targets = torch.randint(classes, (tokens, 2), generator=torch.Generator().manual_seed(1))
            targets[-1, 0] = -100  # never right
            expected = (logits.argmax(-1) == targets).sum()
            own = Accuracy()(split_input(logits, features=False), split_input(targets))
            assert torch.equal(own, expected)
            number = Accuracy().count_targets(split_input(logits, features=False), split_input(targets))
            assert number == (targets != -100).sum()
            cut = Accuracy(vocab_parallel=True)(cut_classes(logits, mesh), split_input(targets))
            assert torch.equal(cut, expected)


@pytest.mark.parametrize("name", GRIDS)
def test_accuracy(name) -> None:
    run_threads(check_accuracy, GRIDS[name]["tp"], name)


def check_large(name: str) -> None:
    with on_grid(name) as mesh:
        logits = torch.full((2, 12), 1e4).requires_grad_()
        targets = split_input(torch.tensor([0, 11]))
        loss = VocabParallelCrossEntropyLoss(num_classes=12)(cut_classes(logits, mesh), targets)
        assert loss.item() == pytest.approx(2.4849066, rel=1e-6)


@pytest.mark.parametrize("name", GRIDS)
def test_large_logits(name) -> None:
    run_threads(check_large, GRIDS[name]["tp"], name)


def check_wrong_target(name: str) -> None:
    """Only the first token is wrong, and some ranks have it not: all of them say so, and none waits."""
    with on_grid(name) as mesh:
        logits, targets = torch.zeros(8, 12), torch.arange(8)
        for wrong in (12, -1):
            targets[0] = wrong
            for is_cut in (False, True):
                own = cut_classes(logits, mesh) if is_cut else split_input(logits, features=False)
                loss = VocabParallelCrossEntropyLoss() if is_cut else CrossEntropyLoss()
                with pytest.raises(IndexError, match="from 0 to 11, or -100 .* count. Found 1 others. Check"):
                    loss(own, split_input(targets))


@pytest.mark.parametrize("name", GRIDS)
def test_a_target_that_is_no_class_is_an_error_on_all_ranks(name) -> None:
    run_threads(check_wrong_target, GRIDS[name]["tp"], name)


def check_bfloat16(name: str) -> None:
    with on_grid(name) as mesh:
        logits = draw(600, 12, dtype=torch.bfloat16)
        targets = torch.randint(12, (600,), generator=torch.Generator().manual_seed(1))
        expected = functional.cross_entropy(logits.float(), targets)
        for loss, own in (
            (CrossEntropyLoss(), split_input(logits, features=False)),
            (VocabParallelCrossEntropyLoss(), cut_classes(logits, mesh)),
        ):
            assert_close(loss(own, split_input(targets)), expected)


@pytest.mark.parametrize("name", GRIDS)
def test_bfloat16_logits_lose_nothing_more(name) -> None:
    """A count of 600 or a sum of as many losses does not fit into 8 bits of mantissa."""
    run_threads(check_bfloat16, GRIDS[name]["tp"], name)


def test_a_reduction_may_be_true_or_false() -> None:
    logits, targets = torch.randn(3, 4), torch.tensor([0, 3, 1])
    kinds: tuple[Any, ...] = (CrossEntropyLoss, VocabParallelCrossEntropyLoss)
    for kind in kinds:
        for word, flag in (("mean", True), ("none", False)):
            assert torch.equal(kind(reduction=flag)(logits, targets), kind(reduction=word)(logits, targets))
    with pytest.raises(ConfigError, match="by its name: reduction=True"):
        CrossEntropyLoss(True)  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused() -> None:
    for kind in (CrossEntropyLoss, VocabParallelCrossEntropyLoss):
        with pytest.raises(ConfigError, match="mean, sum or none. Found 'average'"):
            kind(reduction="average")  # type: ignore[arg-type]
        with pytest.raises(ShapeError, match=r"Found \(2, 3\) and \(3,\)"):
            kind()(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"Found \(2, 3\) and \(3,\)"):
        Accuracy()(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
