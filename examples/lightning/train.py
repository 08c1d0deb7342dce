"""A small module, trained by Lightning: `gradfs launch -n 2 train.py`, or `torchrun … train.py --strategy ddp`."""

import argparse
import os

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from gradfs_strategy import GradfsStrategy
from torch import nn


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.losses = []

    def training_step(self, batch, index):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", F.mse_loss(self.net(x), y), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def data(n, seed):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(x, x.sin().sum(1, keepdim=True))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--strategy", choices=["gradfs", "ddp"], default="gradfs")
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--out", default="lightning_out")
    a = p.parse_args()
    torch.set_num_threads(1)
    pl.seed_everything(0)
    model = Net()
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=GradfsStrategy() if a.strategy == "gradfs" else "ddp",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_epochs=a.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[pl.callbacks.ModelCheckpoint(a.out, "best", monitor="val_loss")],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train = torch.utils.data.DataLoader(data(256, 1), batch_size=8, shuffle=True)
    trainer.fit(model, train, torch.utils.data.DataLoader(data(64, 2), batch_size=8))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    print(f"rank {trainer.global_rank}: {metrics}", flush=True)
    os.makedirs(a.out, exist_ok=True)
    result = {"losses": model.losses, "weights": model.net.state_dict(), "metrics": metrics}
    torch.save(result, f"{a.out}/rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
