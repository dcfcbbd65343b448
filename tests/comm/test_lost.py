# pyright: reportArgumentType=false
"""What torch raises of peers that are lost is a CommunicationError, in a collective and in what is waited for later."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from colossal._src.comm import PendingComm, gather_objects
from colossal._src.comm.lost_peers import LostPeerGuard
from colossal.cluster import ParallelMesh
from colossal.comm import Channel, all_reduce_over
from colossal.errors import CommunicationError
from colossal.testing import fake_world


def lose(*_: Any, **__: Any) -> None:
    raise dist.DistBackendError("NCCL error: remote process exited or there was a network error.\nLast error: ...")


@pytest.mark.parametrize(
    "call",
    [
        lambda: Channel("dp").all_reduce(torch.ones(2)),
        lambda: Channel("dp").broadcast([torch.ones(2)]),
        lambda: Channel("dp").all_to_all(torch.ones(2, 2), 0, 1),
        lambda: all_reduce_over(torch.ones(2), [dist.group.WORLD]),
        lambda: gather_objects(1),
        lambda: PendingComm([SimpleNamespace(wait=lose)]).wait(),
    ],
)
def test_a_lost_peer_is_named_with_what_to_do(call, monkeypatch) -> None:
    for name in ("all_reduce", "broadcast", "all_to_all_single", "all_gather_object"):
        monkeypatch.setattr(dist, name, lose)
    message = (
        r"come to its collectives in time\. Found on rank 1: NCCL error: remote process exited .*network error\. Look"
    )
    with fake_world(2, rank=1), ParallelMesh(), pytest.raises(CommunicationError, match=message) as raised:
        call()
    assert isinstance(raised.value.__cause__, dist.DistBackendError)


@pytest.mark.parametrize("error", [dist.DistNetworkError("x"), dist.DistStoreError("x")])
def test_every_error_of_communication_of_torch_is_one(error) -> None:
    with pytest.raises(CommunicationError, match="Found on rank 0: x"), LostPeerGuard():
        raise error


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(ValueError, match="shape"), LostPeerGuard():
        raise ValueError("shape")
