"""gradfs under the Trainer of transformers: the job takes the optimizer's steps, and each rank has its own batches."""

import math
import os

import gradfs.torch as dist
from accelerate.data_loader import prepare_data_loader
from transformers import Trainer, TrainerCallback

_OF_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join(optimizer, model, **options):
    """Joins the job, and returns what `Trainer(optimizers=…)` takes. To be called before `TrainingArguments`.

    accelerate would make a process group of what the launcher has set, and wrap the model in torch's DDP. So that is
    taken out of the environment, and the Trainer knows of one process.
    """
    dist.init_process_group()
    optimizer = dist.remote(optimizer, model, **options)
    for name in _OF_LAUNCHER:
        os.environ.pop(name, None)
    return optimizer, None


class GradfsTrainer(Trainer):
    """A Trainer with the batches of one of several processes. `max_grad_norm` clips the mean gradient of all ranks."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        remote = self.optimizer

        def clip(parameters, max_norm, norm_type=2):
            # Without a limit, the Trainer asks for the norm by an infinite one.
            return remote.clip_grad_norm_(max_norm if math.isfinite(max_norm) else 0.0)

        self.accelerator.clip_grad_norm_ = clip

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        return prepare_data_loader(loader, num_processes=dist.get_world_size(), process_index=dist.get_rank())


class GradfsCallback(TrainerCallback):
    """The loss in logs is the mean of all ranks, and rank 0 alone saves."""

    def on_train_begin(self, args, state, control, **kwargs):
        if args.parallel_mode.value == "distributed":
            raise ValueError("accelerate has made a process group: call join() before TrainingArguments")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            logs["loss"] = state.log_history[-1]["loss"] = dist.mean(float(logs["loss"]))

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = control.should_save and dist.get_rank() == 0
        return control

    on_epoch_end = on_step_end
