"""Memory of the host for tensors that lie elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from torch_support import torch

from gradfs.torch.staging import Host


def _round(host: Host, tensor: Any) -> Any:
    """Fetches a tensor, doubles it in the host's memory, and brings it back. Returns that memory."""
    before = tensor.detach().clone()
    ((offset, held),) = host.fetch([(64, tensor)])
    assert offset == 64 and held.is_contiguous() and torch.equal(held, before.cpu())
    held.mul_(2)
    host.bring([(64, tensor)])
    assert torch.equal(tensor.detach(), before * 2)
    return held


def test_plain_tensors_are_their_own_memory() -> None:
    tensor = torch.nn.Parameter(torch.randn(3, 4))
    assert _round(Host(), tensor).data_ptr() == tensor.data_ptr()


def test_memory_of_other_tensors_is_kept() -> None:
    host, tensor = Host(), torch.nn.Parameter(torch.randn(3, 4).t())
    held = [_round(host, tensor) for _ in range(3)]
    assert {one.data_ptr() for one in held} == {held[0].data_ptr()} != {tensor.data_ptr()}
    assert _round(host, torch.randn(2, 5).t()).shape == (5, 2), "another tensor in this place"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_memory_of_tensors_on_a_gpu_is_pinned_and_kept() -> None:
    host, tensor = Host(), torch.nn.Parameter(torch.randn(3, 4, device="cuda"))
    held = [_round(host, tensor) for _ in range(3)]
    assert held[0].is_pinned() and len({one.data_ptr() for one in held}) == 1
