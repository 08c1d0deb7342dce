"""A small GPT-2, trained from scratch by the Trainer: `gradfs launch -n 2 train.py`, or `torchrun … train.py --ddp`."""

import argparse
import os

import gradfs.torch as dist
import torch
from gradfs_callback import GradfsCallback, GradfsTrainer, join
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

V, T = 64, 16


def data(n):
    """Sequences that count on from a random number, in steps of 1 to 4."""
    g = torch.Generator().manual_seed(1)
    first, by = torch.randint(0, V, (n, 1), generator=g), torch.randint(1, 5, (n, 1), generator=g)
    sequences = (first + by * torch.arange(T)) % V
    return [{"input_ids": one, "labels": one} for one in sequences]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--ddp", action="store_true")
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--out", default="transformers_out")
    a = p.parse_args()
    torch.set_num_threads(1)
    set_seed(0)
    config = GPT2Config(vocab_size=V, n_positions=T, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
    rank = int(os.environ.get("RANK", "0"))
    optimizers = (optimizer, None) if a.ddp else join(optimizer, model)
    args = TrainingArguments(
        a.out,
        max_steps=a.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        warmup_steps=4,
        logging_steps=1,
        save_steps=a.steps,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    kind, callbacks = (Trainer, []) if a.ddp else (GradfsTrainer, [GradfsCallback()])
    trainer = kind(model, args, train_dataset=data(256), optimizers=optimizers, callbacks=callbacks)
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    os.makedirs(a.out, exist_ok=True)
    result = {"losses": losses, "weights": model.state_dict()}
    torch.save(result, f"{a.out}/rank{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
