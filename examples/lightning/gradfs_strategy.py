"""A strategy for Lightning's Trainer: the job takes the optimizer's steps, and ranks come from the launcher."""

import contextlib
import pickle

import gradfs.torch as dist
import torch
from gradfs.torch import process
from lightning.pytorch.strategies import ParallelStrategy, Strategy


class GradfsStrategy(ParallelStrategy):
    """Options are those of `gradfs.torch.remote`. The Trainer's `gradient_clip_val` clips the mean gradient."""

    is_distributed = True  # so that the Trainer shares data by a DistributedSampler

    def __init__(self, **options):
        super().__init__()
        self.options = options

    global_rank = property(lambda self: dist.get_rank())
    world_size = property(lambda self: dist.get_world_size())
    root_device = property(lambda self: torch.device("cpu"))
    distributed_sampler_kwargs = property(lambda self: {"num_replicas": self.world_size, "rank": self.global_rank})

    def setup_environment(self):
        dist.init_process_group()
        super().setup_environment()

    def model_to_device(self):
        self.model.to(self.root_device)

    def setup_optimizers(self, trainer):
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ValueError(f"the job has one optimizer, and configure_optimizers returns {len(self.optimizers)}")
        options = dict(self.options)
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm in (None, "norm"):
            # Lightning would clip the gradients of each rank alone.
            options["clip_norm"], trainer.gradient_clip_val = float(trainer.gradient_clip_val), None
        self.wrapper = dist.DistributedDataParallel(self.lightning_module)
        self.optimizers = [dist.remote(self.optimizers[0], self.lightning_module, **options)]

    @contextlib.contextmanager
    def block_backward_sync(self):
        with self.wrapper.no_sync():  # the backward of accumulate_grad_batches
            yield

    # What the Trainer shares: numbers, flags and paths. Before the job begins, each rank has its own.

    def reduce(self, tensor, group=None, reduce_op="mean"):
        if not isinstance(tensor, torch.Tensor) or process.attached() is None:
            return tensor
        tensor = tensor.detach().clone()
        dist.all_reduce(tensor, reduce_op or "mean")
        return tensor

    def barrier(self, name=None):
        dist.barrier()

    def broadcast(self, obj, src=0):
        if process.attached() is None:
            return obj
        data = pickle.dumps(obj) if self.global_rank == src else b""
        size = int(self.reduce(torch.tensor(float(len(data))), reduce_op="sum"))
        data = data.ljust(size, b"\0")
        pieces = [torch.tensor(list(data[at : at + 64]), dtype=torch.uint8) for at in range(0, size, 64)]
        for piece in pieces:
            dist.broadcast(piece, src)
        return pickle.loads(b"".join(bytes(piece.tolist()) for piece in pieces))

    def all_gather(self, tensor, group=None, sync_grads=False):
        gathered = torch.zeros(self.world_size, *tensor.shape, dtype=tensor.dtype)
        gathered[self.global_rank] = tensor
        return self.reduce(gathered, reduce_op="sum")

    def teardown(self):
        Strategy.teardown(self)
        dist.destroy_process_group()
