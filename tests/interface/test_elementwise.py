"""An optimizer is tried on small tensors before it is given shards, or some of the parameters of a model."""

from typing import Any

import pytest
import torch
from torch import nn

from colossal._src.interface import check_optimizer
from colossal.errors import UnsupportedError
from colossal.nn import optimizer as own

ELEMENTWISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
SEES_MORE = ["Adafactor", "LBFGS", "Muon", "SparseAdam"]
OURS: list[Any] = [own.Lamb, own.Lars, own.Adafactor, own.GaLoreAdamW, own.HybridAdam, own.CPUAdam, own.CAME]


def build(kind: Any, **options: Any) -> Any:
    rate = {"lr": 0.1} if kind is own.CAME else {}
    return kind([nn.Parameter(torch.ones(3, 2))], **rate, **options)


def test_every_optimizer_of_torch_is_tried_here() -> None:
    kinds = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)} - {"Optimizer"}
    assert kinds == {*ELEMENTWISE, *SEES_MORE}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_updates_are_right_on_shards_and_subsets(name: str) -> None:
    check_optimizer(build(getattr(torch.optim, name)), shards=True, subsets=True)


@pytest.mark.parametrize("name", SEES_MORE)
def test_updates_that_see_more_are_refused(name: str) -> None:
    optimizer = build(getattr(torch.optim, name))
    with pytest.raises(UnsupportedError, match=rf"has shards of .*Found {name}, wh.*updates_shards = True"):
        check_optimizer(optimizer, shards=True)
    check_optimizer(optimizer, shards=False)


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_ours_know_of_shards_and_of_stages(kind: Any) -> None:
    check_optimizer(build(kind), shards=True, subsets=True)


def test_one_that_takes_only_matrices_is_right_on_stages() -> None:
    check_optimizer(build(torch.optim.Muon), shards=False, subsets=True)


def test_a_norm_of_all_parameters_is_refused_where_a_rank_has_some() -> None:
    optimizer = build(own.FusedLAMB)
    check_optimizer(optimizer, shards=True)
    with pytest.raises(UnsupportedError, match="has only some .* Found FusedLAMB.*differed by less than 1%"):
        check_optimizer(optimizer, shards=False, subsets=True)
    check_optimizer(build(own.FusedLAMB, max_grad_norm=0.0), shards=False, subsets=True)


class Normalized(torch.optim.Optimizer):
    """Moves by the gradient over its norm, which depends on all elements."""

    def __init__(self, params: Any, lr: float = 0.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad / param.grad.norm() * group["lr"])


def test_an_optimizer_of_somebody_else_is_tried_also_where_its_rate_begins_at_zero() -> None:
    with pytest.raises(UnsupportedError, match=r"Found Normalized, whose update.*differed by \d+%"):
        check_optimizer(build(Normalized), shards=True)
    check_optimizer(build(Normalized), shards=False, subsets=True)


def test_an_optimizer_may_say_that_it_knows_of_shards() -> None:
    check_optimizer(build(type("Mine", (Normalized,), {"updates_shards": True})), shards=True)


def test_kernels_do_not_matter() -> None:
    check_optimizer(build(torch.optim.Adam, fused=True, amsgrad=True, betas=[0.8, 0.9]), shards=True)
    check_optimizer(build(torch.optim.SGD, foreach=True, momentum=0.9, nesterov=True), shards=True)


def test_each_group_is_tried_with_its_own_hyperparameters() -> None:
    class Sometimes(torch.optim.SGD):
        """As a group says, by element or not."""

        def __init__(self, params: Any, lr: float = 0.1, by_norm: bool = False) -> None:
            super().__init__(params, lr)
            self.defaults["by_norm"] = by_norm
            for group in self.param_groups:
                group.setdefault("by_norm", by_norm)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # noqa: ARG002
            for group in self.param_groups:
                for param in group["params"]:
                    param.sub_(param.grad / (param.grad.norm() if group["by_norm"] else 1) * group["lr"])

    groups = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(2))], "by_norm": True}]
    check_optimizer(Sometimes(groups[:1]), shards=True)
    with pytest.raises(UnsupportedError, match="Found Sometimes"):
        check_optimizer(Sometimes(groups), shards=True)
