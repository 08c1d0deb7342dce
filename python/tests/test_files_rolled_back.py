"""A shard dies, the job goes on from its newest snapshot, and whoever takes part hears of it once.

Each cluster here has three shards, and a registry of its own. Models are sums, so that weights tell what counts.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy
import pytest
from conftest import HANGS, binary, until

import gradfs

ONES = numpy.ones(50000, "f4")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class _Cluster:
    """Shards with models on all of them. All are shown by one mount."""

    def __init__(self, place: Path) -> None:
        self.place, self.mount, self._running = place, place / "mount", []

    def begin(self, **models: dict[str, object]) -> None:
        self.registry = self._start("registry")
        self.shards = [self._start("shard", "--registry", self.registry) and self._running[-1] for _ in range(3)]
        first = gradfs.create_from({"w": 0 * ONES}, self.place / "model.safetensors")
        for name, settings in models.items():
            settings = {"model": first, "reducer": "sum", "block_size": "64KiB", "learners": 1, **settings}
            settings |= {"snapshot_to": self.place / f"store-{name}", "snapshot_every": "1h", "shards": 3, "timeout": 30}
            self.command("create", name, *(f"--{key.replace('_', '-')}={value}" for key, value in settings.items()))
        self.mount.mkdir()
        self.command("mount", "--background", "--log-file", self.place / "log", self.mount)

    def _start(self, *words: str) -> str:
        said = self.place / f"said{len(self._running)}"
        with said.open("w") as output:
            command = [binary(), *words, "--listen", "127.0.0.1:0"]
            self._running.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
        until(lambda: "ready" in said.read_text())
        return re.search(r"listens on ([^ ,;]+)", said.read_text())[1]

    def command(self, *words: object, may_fail_with: str = "nothing") -> bool:
        command = [binary(), words[0], "--registry", self.registry, *words[1:]]
        done = subprocess.run(list(map(str, command)), check=False, timeout=HANGS, capture_output=True, text=True)
        assert done.returncode == 0 or may_fail_with in done.stderr, done.stderr
        return done.returncode == 0

    def durable(self, *names: str) -> None:
        """Waits until what is shown now has a snapshot."""
        for name in names or ["m"]:
            # The first snapshot of a job is at once, and may be under way.
            until(lambda: self.command("snapshot", name, "--wait", may_fail_with="another snapshot"))  # noqa: B023

    def lose(self, *names: str) -> None:
        """Kills a shard, and waits until the models are restored."""
        models = [gradfs.open(self.mount / name) for name in names or ["m"]]
        restored = [model.status["restored"] + 1 for model in models]
        shard = self.shards.pop()
        shard.kill()
        shard.wait(HANGS)
        until(lambda: [model.status["restored"] for model in models] == restored)

    def end(self) -> None:
        subprocess.run([binary(), "unmount", "--lazy", str(self.mount)], check=False, capture_output=True)
        for process in reversed(self._running):
            process.kill()
            process.wait(HANGS)


@pytest.fixture
def cluster(tmp_path):
    started = []

    def start(**models):
        started.append(_Cluster(tmp_path))
        started[-1].begin(**(models or {"m": {}}))
        return started[-1]

    yield start
    for one in started:
        one.end()


def rolled_back(call, *arguments):
    with pytest.raises(gradfs.RolledBack) as caught:
        call(*arguments)
    return caught.value


def shown(model):
    with model.pull() as weights:
        (value,) = set(weights["w"].numpy().tolist())
    return value


def ended(process, status=0):
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == status, out + err
    return out


def test_who_takes_part_hears_once_that_the_job_was_restored(cluster):
    one = cluster(m={"consistency": "async"})
    model = gradfs.open(one.mount / "m")
    waits = [gradfs.open(model.path) for _ in range(2)]
    heard, followed = [], []
    with model.join("active") as active, model.join("idle") as idle, model.join("stepping") as stepping:
        for _ in range(3):
            active.push({"w": ONES})
        one.durable()
        # Nothing of this is in the snapshot.
        active.push({"w": ONES})
        until(lambda: shown(idle) == 4)
        old = idle.pull()
        step = stepping.step()
        step["w"] = ONES
        waiting = threading.Thread(target=lambda: heard.append(rolled_back(waits[0].wait, None, HANGS)))
        follower = gradfs.Follower(model.path, lambda version, weights: followed.append(weights["w"].numpy()[0].item()))
        with follower:
            until(lambda: followed == [4])
            waiting.start()
            unheard = model.join("unheard")
            one.lose()
            waiting.join(HANGS)
            until(lambda: followed[-1] == 3)
        assert heard[0].restored == 1

        # Gradients of weights that are undone do not count, whenever they come.
        back = rolled_back(idle.push, {"w": ONES})
        assert isinstance(back, gradfs.Left) and back.errno == errno.ENOTCONN and "the job was restored" in str(back)
        assert (back.to_version, back.restored, back.to_step, back.extra) == (model.version, 1, None, {})
        assert back.to_version - int(model.control["schedule_start"]) == 3, "the number that it had"
        assert old["w"].numpy()[0] == 4 and shown(idle) == 3
        idle.push({"w": ONES})
        assert rolled_back(step.commit).restored == 1
        stepping.push({"w": ONES})
        rolled_back(active.pull)
        active.push({"w": ONES})
        until(lambda: {shown(idle), shown(active), shown(stepping)} == {6})
        # Its learners have said it.
        until(lambda: shown(model) == 6)
        assert model.wait(0, 0) == model.version == back.to_version + 3
        assert rolled_back(waits[1].push, {"w": ONES}).restored == 1
        waits[1].push({"w": ONES})
        until(lambda: shown(model) == 7)

        unheard.close()
        assert "unheard" not in {learner["id"] for learner in model.status["learners"]}
    assert not {"active", "idle", "stepping"} & {learner["id"] for learner in model.status["learners"]}


def test_rolled_back_has_what_was_said_of_the_version(cluster):
    one = cluster(m={"reducer": "assign"})
    model, idle = (gradfs.open(one.mount / "m") for _ in range(2))
    for step in 7, 8:
        model.publish({"w": step * ONES}, meta={"step": str(step), "shard": "train-3"})
    one.durable()
    model.publish({"w": 9 * ONES}, meta={"step": "9"})
    one.lose()
    back = rolled_back(model.publish, {"w": 10 * ONES}, {"step": "10"})
    assert (back.to_step, back.extra) == (8, {"step": "8", "shard": "train-3"}) and shown(model) == 8
    assert model.publish({"w": 9 * ONES}, meta={"step": "9"}) == back.to_version + 1
    copy = pickle.loads(pickle.dumps(back))
    assert vars(copy) == vars(back) and str(copy) == str(back) and copy.to_step == 8
    # Who was idle hears of two restorations at once.
    one.durable()
    one.lose()
    back = rolled_back(idle.publish, {"w": 11 * ONES})
    assert (back.restored, back.to_step) == (2, 9) and shown(idle) == 9
    assert rolled_back(model.pull).to_version == back.to_version and shown(model) == 9


LOOP = """
import os, sys, time, numpy, gradfs
path, name, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = gradfs.open(path)
heard, step = [], 0
with model.join(name) as learner:
    while step < steps:
        try:
            with learner.pull() as weights:
                begun = weights["w"].numpy()[0]
            time.sleep(0.02)
            learner.push({"w": numpy.full(50000, step + 1, "f4")})
            step += 1
            print(step, flush=True)
        except gradfs.RolledBack as back:
            step = back.to_version - int(model.control["schedule_start"])
            heard.append(back.restored)
print("heard", heard, flush=True)
"""


def test_a_loop_that_goes_back_trains_as_if_nothing_had_been_lost(cluster, program):
    one = cluster(m={"learners": 2})
    model, steps = gradfs.open(one.mount / "m"), 80
    learners = [program(LOOP, model.path, name, steps) for name in ("a", "b")]
    until(lambda: model.version >= 20)
    one.durable()
    until(lambda: model.version >= 40)
    one.lose()
    said = [ended(learner).split("heard ") for learner in learners]
    assert [heard for _, heard in said] == ["[1]\n"] * 2
    assert rolled_back(model.wait, 0).restored == 1
    assert shown(model) == 2 * sum(range(1, steps + 1))


def test_a_restored_job_ends_its_connections_by_rolled_back(cluster, library):
    one = cluster()
    url = f"gradfs://{one.registry}/m"
    model = gradfs.open(url)
    learner = model.join("me")
    for _ in range(2):
        learner.push({"w": ONES})
    one.durable()
    learner.push({"w": ONES})
    learner.step().abort()
    one.lose()

    def until_it_fails():
        while True:
            learner.push({"w": ONES})

    back = rolled_back(until_it_fails)
    assert back.errno == errno.ENOTCONN and back.to_version >= 1 << 20
    again = gradfs.open(url)
    assert again.version == back.to_version and shown(again) == 2
    with again.join("again") as learner:
        learner.push({"w": ONES})
        assert shown(learner) == 3


@pytest.mark.slow
def test_the_example_has_the_weights_of_a_training_without_a_loss(cluster, tmp_path):
    pytest.importorskip("sklearn")
    digits = tmp_path / "digits.safetensors"
    subprocess.run([sys.executable, EXAMPLES / "make_digits_model.py", digits], check=True, timeout=HANGS)
    one = cluster(digits={"model": digits})
    model = gradfs.open(one.mount / "digits")
    path = os.pathsep.join([str(Path(gradfs.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, EXAMPLES / "train_restored.py", model.path, "--check"]
    options = {"env": {**os.environ, "PYTHONPATH": path}, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, **options) as example:
        try:
            until(lambda: model.version >= 50 or example.poll() is not None)
            one.durable("digits")
            until(lambda: model.version >= 100 or example.poll() is not None)
            one.lose("digits")
            out, _ = example.communicate(timeout=HANGS)
        finally:
            example.kill()
    assert example.returncode == 0 and "check passed" in out and "restored 1 times" in out, out
    assert len(set(re.findall(r"back to (\d+)", out))) == 1, "all learners go back to one step"


TORCH = """
import os, sys, time, torch
import gradfs, gradfs.torch as dist
torch.set_num_threads(1)
dist.init_process_group()
staging, steps, place = sys.argv[1], 14, sys.argv[2]
module = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(50000))})
opt = dist.remote(torch.optim.SGD(module.parameters(), lr=1.0), module, staging=staging)
schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0 if step < 8 else 0.5)
heard, step = [], 0
while step < steps:
    try:
        opt.zero_grad()
        (-(step + 1) * module["w"].sum()).backward()
        if step in (6, 10) and not heard:
            print(f"at {step}", flush=True)
            while not os.path.exists(f"{place}/goes-{step}"):
                time.sleep(0.02)
        opt.step()
        schedule.step()
        assert dist.mean(step) == step
        step += 1
    except gradfs.RolledBack as back:
        assert module["w"].grad is None and opt.staging == staging
        step = back.to_version - int(opt.status()["control"]["schedule_start"])
        heard.append((step, module["w"].max().item()))
        schedule.last_epoch = step - 1
        schedule.step()
assert module["w"].min() == module["w"].max()
print(heard, module["w"][0].item(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_torch_optimizer_goes_on_with_a_restored_job(cluster, program, tmp_path):
    pytest.importorskip("torch")
    one = cluster(m={"learners": 2}, n={})
    programs = []
    for name, rank, world, staging in ("m", 0, 2, "copied"), ("m", 1, 2, "copied"), ("n", 0, 1, "mapped"):
        learner = one.mount / name / "learners" / f"rank{rank}"
        learner.mkdir()
        environ = {"GRADFS_LEARNER": learner, "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank}
        environ = {key: str(value) for key, value in {**environ, "LOCAL_WORLD_SIZE": world}.items()}
        programs.append(program(TORCH, staging, tmp_path, environ=environ))

    def goes(step, meanwhile):
        for each in programs:
            assert each.stdout.readline() == f"at {step}\n", each.stderr.read()
        meanwhile("m", "n")
        (tmp_path / f"goes-{step}").touch()

    goes(6, one.durable)
    goes(10, one.lose)
    weight = sum(range(1, 9)) + sum(range(9, 15)) / 2
    assert [ended(each) for each in programs] == [f"[(6, 21.0)] {weight}\n"] * 3
