"""How much memory tensors take."""

import gc

import torch


def tensor_bytes() -> int:
    """Of all storages that tensors live in; packed ones hide theirs."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and each.layout == torch.strided and not each.is_mkldnn:
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
