"""A small GPT with tied weights, parameter groups, a schedule, accumulation and clipping, trained by torch's
DistributedDataParallel.
"""

import argparse
import contextlib
import math
import os
import pathlib

import torch
import gradfs.torch as dist
import torch.nn.functional as F
from torch import nn
from gradfs.torch import DistributedDataParallel as DDP

V, T, D, L, H = 128, 64, 96, 2, 4
STEPS, WARMUP, LR, ACCUM, BATCH, EVERY, PATIENCE = 120, 10, 3e-3, 4, 8, 20, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        B = x.shape[0]
        q, k, v = (t.view(B, -1, H, D // H).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, -1, D)
        x = x + self.proj(y)
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.ln_f = nn.LayerNorm(D)
        self.lm_head = nn.Linear(D, V, bias=False)
        self.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, (nn.Linear, nn.Embedding)) else None)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).view(-1, V), targets.reshape(-1))


def text():
    raw = b"".join(sorted(pathlib.Path(os.__file__).parent.glob("a*.py"))[i].read_bytes() for i in range(5))
    return torch.tensor([min(b, 127) for b in raw])


def batch(corpus, seed, n):
    g = torch.Generator().manual_seed(seed)
    at = torch.randint(0, len(corpus) - T - 1, (n,), generator=g)
    return torch.stack([corpus[i : i + T] for i in at]), torch.stack([corpus[i + 1 : i + T + 1] for i in at])


def schedule(step):
    return step / WARMUP if step < WARMUP else 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--resume")
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--steps", type=int, default=STEPS)
    p.add_argument("--every", type=int, default=EVERY)
    p.add_argument("--out", default="gpt_checkpoint")
    p.add_argument("--losses", default="gpt_losses.pt")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT()
    corpus = text()
    split = int(len(corpus) * 0.9)
    train, val = corpus[:split], corpus[split:]
    decay = [p for n, p in model.named_parameters() if p.dim() >= 2]
    rest = [p for n, p in model.named_parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    opt = dist.remote(opt, model, resume=a.resume)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, schedule)
    start, best, bad, losses = 0, float("inf"), 0, []
    if a.resume:
        c = opt.load_extra()
        model.load_state_dict(c["model"])
        opt.load_state_dict(c["opt"])
        sched.load_state_dict(c["sched"])
        start = c["step"]
    model = DDP(model)
    cast = torch.autocast("cpu", torch.bfloat16) if a.bf16 else contextlib.nullcontext()
    for step in range(start, a.steps):
        opt.zero_grad()
        for micro in range(ACCUM):
            sync = contextlib.nullcontext() if micro == ACCUM - 1 else model.no_sync()
            with sync:
                with cast:
                    loss = model(*batch(train, (step * ACCUM + micro) * world + rank, BATCH)) / ACCUM
                loss.backward()
        norm = opt.clip_grad_norm_(1.0)
        opt.step()
        sched.step()
        losses.append(loss.item() * ACCUM)
        if (step + 1) % a.every == 0:
            model.eval()
            with torch.no_grad():
                v = sum(model.module(*batch(val, 10**6 + i * world + rank, BATCH)) for i in range(4)) / 4
            dist.all_reduce(v)
            v = v.item() / world
            model.train()
            if rank == 0:
                print(f"step {step + 1}: loss {losses[-1]:.4f} val {v:.4f} norm {norm:.3f}", flush=True)
                c = {
                    "model": model.module.state_dict(),
                    "opt": opt.state_dict(),
                    "sched": sched.state_dict(),
                    "step": step + 1,
                }
                opt.save(a.out, extra=c)
            best, bad = (v, 0) if v < best else (best, bad + 1)
            if bad >= PATIENCE:
                break
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "losses": losses}, a.losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
