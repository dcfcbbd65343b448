"""The memory of all tensors of a process."""

import gc

import torch


def find_storages() -> dict[int, torch.UntypedStorage]:
    """Find the memory of all tensors of this process, gradients included.

    What is between uses elsewhere, such as parameters in chunks of `colossal.zero.gemini`, counts where it is.

    Returns:
        Storages that are not empty, by address; of DTensors those of the local shards.

    Example:
        >>> import torch
        >>> from colossal.testing import find_storages
        >>> tensor = torch.ones(1000, dtype=torch.float32, device="cpu")
        >>> view = tensor[10:]
        >>> find_storages()[tensor.data_ptr()].nbytes()
        4000
    """
    from colossal._src.interface import ClippedByOptimizer, WorkingParameter

    plain = (torch.Tensor, torch.nn.Parameter, ClippedByOptimizer, WorkingParameter)
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    tensors = [getattr(each, "_local_tensor", each) for each in tensors]
    dense = [each for each in tensors if type(each) in plain and each.layout is torch.strided and not each.is_meta]
    found = [each.untyped_storage() for each in dense]
    return {storage.data_ptr(): storage for storage in found if storage.nbytes()}
