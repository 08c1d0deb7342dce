"""The examples of Lightning and transformers: two ranks have equal weights, and the losses of torch's DDP."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch_support import EXAMPLES, launch, needs_a_mount, succeeded, torch, torchrun, written

import gradfs

pytestmark = needs_a_mount()

#: Losses, weights and metrics of fp32 that differ by less are those of sums in another order.
NEAR = 1e-4


def needs(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")


def trained(program: Path, of_ddp: list[str], to: Path) -> tuple[list[Any], list[Any]]:
    """What two ranks write with gradfs, and with DDP."""
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(launch, 2, program, "--out", str(to / "gradfs"), HF_HUB_OFFLINE="1"),
            pool.submit(torchrun, 2, program, *of_ddp, "--out", str(to / "ddp"), HF_HUB_OFFLINE="1"),
        ]
        for run in runs:
            succeeded(run.result())
    mine, theirs = ([torch.load(to / kind / f"rank{rank}.pt") for rank in (0, 1)] for kind in ("gradfs", "ddp"))
    assert mine[0]["weights"].keys() == theirs[0]["weights"].keys()
    for name, tensor in mine[0]["weights"].items():
        assert torch.equal(tensor, mine[1]["weights"][name]), f"{name} differs between ranks"
        assert torch.allclose(tensor, theirs[0]["weights"][name], atol=NEAR, rtol=0), name
    for one, other in zip(mine, theirs):
        assert one["losses"] == pytest.approx(other["losses"], abs=NEAR)
    return mine, theirs


def test_from_pretrained_takes_each_version(start: Any, tmp_path: Path) -> None:
    needs("transformers")
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    first = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=32, **sizes))
    first.save_pretrained(tmp_path / "checkpoint")
    options = ("--with-files", tmp_path / "checkpoint", "--reducer", "assign", "--retain", "1")
    model = gradfs.open(start(tmp_path / "checkpoint" / "model.safetensors", *options))
    weights = {name: tensor.clone() for name, tensor in model.pull().torch().items()}
    model.publish({name: tensor + 1 for name, tensor in weights.items()})
    for version, place in ((0, "versions/0/hf"), (1, "hf")):
        loaded = AutoModelForCausalLM.from_pretrained(Path(model.path) / place, dtype="auto").state_dict()
        assert loaded.keys() == first.state_dict().keys()
        for name, tensor in weights.items():
            assert torch.equal(loaded[name], tensor + version), name


def test_lightning_trains_as_with_its_ddp(tmp_path: Path) -> None:
    needs("lightning")
    mine, theirs = trained(EXAMPLES.parent / "lightning" / "train.py", ["--strategy", "ddp"], tmp_path)
    assert mine[0]["losses"] != mine[1]["losses"], "ranks have their own batches"
    assert mine[0]["losses"][-1] < mine[0]["losses"][0]
    assert mine[0]["metrics"] == mine[1]["metrics"] == pytest.approx(theirs[0]["metrics"], abs=NEAR)
    assert (tmp_path / "gradfs" / "best.ckpt").exists()


def test_the_trainer_of_transformers_trains_as_with_ddp(tmp_path: Path) -> None:
    needs("transformers", "accelerate")
    mine, _ = trained(EXAMPLES.parent / "transformers" / "train.py", ["--ddp"], tmp_path)
    assert mine[0]["losses"] == mine[1]["losses"], "the losses are means of all ranks"
    assert mine[0]["losses"][-1] < mine[0]["losses"][0]
    assert [at.name for at in (tmp_path / "gradfs").glob("checkpoint-*")] == ["checkpoint-20"]


def test_the_strategy_shares_objects_numbers_and_flags(tmp_path: Path) -> None:
    needs("lightning")
    program = written(
        tmp_path / "program.py",
        f"""
        sys.path.insert(0, {str(EXAMPLES.parent / "lightning")!r})
        import lightning.pytorch as pl
        from gradfs_strategy import GradfsStrategy

        class Net(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = torch.nn.Linear(4, 1)

            def training_step(self, batch, index):
                return self.net(batch).square().mean()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

            def on_train_end(self):
                to, rank = self.trainer.strategy, self.trainer.global_rank
                told = {{"path": "x" * 200}}
                assert to.broadcast(told if rank == 1 else None, src=1) == told
                assert to.all_gather(torch.tensor([rank, 7])).tolist() == [[0, 7], [1, 7]]
                assert to.reduce_boolean_decision(rank == 0, all=False)
                assert not to.reduce_boolean_decision(rank == 0, all=True)
                assert to.reduce(torch.tensor(float(rank))).item() == 0.5 and to.reduce("a") == "a"
                assert self.trainer.world_size == 2
                print("shared", self.net.weight.tolist(), flush=True)

        pl.seed_everything(0, verbose=False)
        trainer = pl.Trainer(
            accelerator="cpu", strategy=GradfsStrategy(staging="mapped"), max_epochs=1, accumulate_grad_batches=2,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4))
        """,
    )
    out = succeeded(launch(2, program))
    shared = [line.partition("shared ")[2] for line in out.splitlines() if "shared" in line]
    assert len(shared) == 2 and shared[0] == shared[1]


def test_the_trainer_in_a_process_group_is_refused(tmp_path: Path) -> None:
    needs("transformers", "accelerate")
    program = written(
        tmp_path / "program.py",
        f"""
        sys.path.insert(0, {str(EXAMPLES.parent / "transformers")!r})
        from gradfs_callback import GradfsCallback
        from transformers import Trainer, TrainingArguments

        assert os.environ["MASTER_ADDR"] and os.environ["MASTER_PORT"]
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.net = torch.nn.Linear(4, 1)

            def forward(self, x, labels=None):
                return {{"loss": self.net(x).square().mean()}}

        args = TrainingArguments({str(tmp_path / "out")!r}, max_steps=1, use_cpu=True, report_to="none")
        data = [{{"x": torch.randn(4), "labels": 0}} for _ in range(64)]
        trainer = Trainer(Net(), args, train_dataset=data, callbacks=[GradfsCallback()])
        try:
            trainer.train()
        except ValueError as error:
            print("refused:", error, flush=True)
        """,
    )
    out = succeeded(launch(2, program, HF_HUB_OFFLINE="1"))
    assert out.count("refused: accelerate has made a process group") == 2
