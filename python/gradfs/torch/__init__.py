"""Data-parallel training of torch modules over a gradfs job, under the names of `torch.distributed`.

    import gradfs.torch as dist
    from gradfs.torch import DistributedDataParallel as DDP

    dist.init_process_group()
    model = DDP(Net())
    opt = dist.remote(torch.optim.SGD(model.parameters(), lr=0.05), model)

The rest of a script stays as it is with torch's DDP.
"""

from gradfs.torch.optimizer import RemoteOptimizer, remote
from gradfs.torch.parallel import DistributedDataParallel
from gradfs.torch.patience import busy
from gradfs.torch.process import (
    destroy_process_group,
    get_rank,
    get_world_size,
    init_process_group,
    is_available,
    is_initialized,
)
from gradfs.torch.scalars import ReduceOp, all_reduce, any, barrier, broadcast, mean
from gradfs.torch.sharing import Share, share

__all__ = [
    "DistributedDataParallel",
    "ReduceOp",
    "RemoteOptimizer",
    "Share",
    "all_reduce",
    "any",
    "barrier",
    "broadcast",
    "busy",
    "destroy_process_group",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_available",
    "is_initialized",
    "mean",
    "remote",
    "share",
]
