"""What `colossal.testing.spawn` runs: new processes import it by name, which they cannot do with a module of tests."""

import torch

import colossal


def sum_ranks(rank: int, world_size: int, port: int, offset: int) -> None:
    colossal.launch(rank=rank, world_size=world_size, host="localhost", port=port, backend="gloo")
    total = torch.tensor([rank + offset])
    torch.distributed.all_reduce(total)
    assert total.item() == sum(range(world_size)) + offset * world_size
    if offset > 1:
        raise ValueError("too much")
    torch.distributed.destroy_process_group()
