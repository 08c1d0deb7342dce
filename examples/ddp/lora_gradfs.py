"""A LoRA adapter on a frozen sentence encoder (BASE is its directory), trained by torch's DistributedDataParallel."""

import itertools
import os

import torch
import gradfs.torch as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from gradfs.torch import DistributedDataParallel as DDP
from transformers import AutoModel, AutoTokenizer

BASE = os.environ["BASE"]
STEPS = int(os.environ.get("STEPS", "20"))
A = ["the cat", "a dog", "my car", "this book", "our house", "the tea", "a ship", "that song"]
B = ["is red", "is very old", "makes noise", "was lost", "smells good", "costs a lot"]
TEXT = [f"{a} {b}" for a, b in itertools.product(A, B)]


def build():
    torch.manual_seed(0)
    model = AutoModel.from_pretrained(BASE)
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], lora_dropout=0.0))


def loss_of(model, tok, step, rank, world):  # sentences of the same subject are close
    g = torch.Generator().manual_seed(step * world + rank)
    a = torch.randperm(len(A), generator=g)
    b = torch.randint(0, len(B), (2, len(A)), generator=g)
    sentences = [TEXT[i * len(B) + j] for row in b for i, j in zip(a.tolist(), row.tolist())]
    out = model(**tok(sentences, padding=True, return_tensors="pt")).last_hidden_state.mean(1)
    x, y = F.normalize(out, dim=-1).chunk(2)
    return F.cross_entropy(x @ y.T * 20, torch.arange(len(A)))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    tok = AutoTokenizer.from_pretrained(BASE)
    model = DDP(build())
    model.eval()  # no dropout
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.0)
    opt = dist.remote(opt, model)
    losses = []
    for step in range(STEPS):
        opt.zero_grad()
        loss = loss_of(model, tok, step, rank, world)
        loss.backward()
        opt.step()
        losses.append(loss.item())
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    if rank == 0:
        out = os.environ.get("OUT", "adapter")
        model.module.save_pretrained(out)
        torch.save(losses, f"{out}/losses.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
