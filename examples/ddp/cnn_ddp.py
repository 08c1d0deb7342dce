"""A CNN with BatchNorm, trained by torch's DistributedDataParallel."""

import itertools
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = int(os.environ.get("STEPS", "132"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.fc1, self.fc2 = nn.Linear(32 * 16, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def data():
    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    y = torch.tensor(y)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return TensorDataset(x[:1408], y[:1408]), TensorDataset(x[1408:], y[1408:])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, test = data()
    model = DDP(Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=0)
    loader = DataLoader(train, batch_size=32, sampler=sampler, num_workers=2, persistent_workers=True)
    losses = []
    for epoch in range(math.ceil(STEPS / len(loader))):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in itertools.islice(loader, STEPS - len(losses)):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            losses.append(loss.item())
        if rank == 0:
            model.eval()
            with torch.no_grad():
                acc = sum((model.module(x).argmax(1) == y).sum().item() for x, y in DataLoader(test, 256)) / len(test)
            print(f"epoch {epoch}: loss {loss.item():.4f} accuracy {acc:.4f}", flush=True)
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "losses": losses}, os.environ.get("OUT", "cnn.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
