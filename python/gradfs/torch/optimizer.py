"""`remote`: a torch optimizer whose steps the job takes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gradfs import job
from gradfs.arrays import NAMES
from gradfs.errors import Closed, GradfsError, Refused, Timeout, explained
from gradfs.first_file import create_from
from gradfs.torch import parallel, process, scalars
from gradfs.torch import settings as told
from gradfs.torch.staging import Bucket, Copied, Files, Mapped, Slot, can_map, give_back_freed

#: Steps in which each way of staging gets used to the program, before it is measured or sends ahead.
WARM_STEPS = 2
#: Steps in which each way is measured. The quickest counts.
MEASURED_STEPS = 4
#: How much faster copying has to be to be kept: mapping also saves memory, and a busy machine hides small differences.
MARGIN = 1.1
#: Tensors that a message names; it counts the others.
MOST_NAMED = 20


class RemoteOptimizer(torch.optim.Optimizer):
    """An optimizer like the one given, whose steps the job takes. It joins the job, and starts it if this is rank 0.

    `optimizer` is an SGD, Adam, AdamW, RMSprop or Adagrad of torch. Its class, groups and numbers become the job's
    settings; a scheduler of either optimizer works. `module` (also in `DistributedDataParallel`) gets the job's
    weights.

    `clip_norm` clips the mean of all learners' gradients by its norm, where it is above 0. `staging` is ``auto``,
    ``copied`` or ``mapped``. `resume` is the directory of a snapshot (`RemoteOptimizer.save`) to go on from. `settings`
    are further ones of ``control/``. With `allow_changed_gradients`, the program may change gradients between backward
    and step; the change counts for this learner alone, so that clipping there is not what it is in
    `DistributedDataParallel`.

    TypeError or ValueError for an optimizer that gradfs does not have, Refused (a ValueError) with all tensors that do
    not fit, Timeout if no job is started. A process that joins a job that has made versions leaves its settings as they
    are.

    It shares `param_groups` with `optimizer`.
    """

    # A GradScaler leaves the check of its found_inf to step().
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module,
        *,
        clip_norm: float = 0.0,
        staging: str = "auto",
        resume: str | os.PathLike[str] | None = None,
        settings: Mapping[str, object] | None = None,
        allow_changed_gradients: bool = False,
    ) -> None:
        if staging not in ("auto", "copied", "mapped"):
            raise ValueError(f"staging is auto, copied or mapped, and not {staging!r}")
        process.check_free()
        self._more = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in (settings or {}).items()}
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups, self.state, self.optimizer = optimizer.param_groups, optimizer.state, optimizer
        self.module = parallel.unwrapped(module)
        self.clip_norm = clip_norm
        self._pid = os.getpid()
        self._closed = False
        self._allow_changed = allow_changed_gradients
        self._sync = parallel.share_sync(self.module)
        if any(_is_begun(state) for state in optimizer.state.values()):
            raise Refused(
                "this optimizer has made steps, and its state would be lost: "
                "`python -m gradfs.convert` makes a snapshot of a checkpoint, for remote(…, resume=DIR)"
            )
        self.reducer = told.reducer_of(optimizer)
        self._scales = told.scales_of(optimizer)
        self._names = self._tensors()
        wanted = self._wanted()
        attached = job.attach(self._first_file, wanted, os.fspath(resume) if resume else None)
        self.attached = attached
        self._join(attached)
        try:
            self._begin(attached, wanted, staging)
        except BaseException:
            self._leave()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether this process has left the job."""
        return self._closed

    def _begin(self, attached: job.Attached, wanted: dict[str, str], staging: str) -> None:
        assert attached.learner is not None
        self.files = Files(attached.learner)
        slots = self._checked()
        trained = self._of_groups()
        self._trained = [slot for slot in slots if slot.tensor in trained]
        self._buffers = [slot for slot in slots if _is_averaged(slot.tensor)]
        #: What this process last knew the job to have.
        self._known = wanted
        self._hyper = self._numbers()
        #: Whether the job's settings count, and not this process's: it has come to a job that had begun.
        self._follows = self.files.version() > 0 or attached.resumed is not None
        if self._follows:
            self._compare(wanted)
        else:
            self._configure(wanted)
            self._gather()
        self.files.read(slots)
        self._staging: Copied | Mapped = Copied(self.files, self._trained, self._buffers)
        self._can_map = can_map(self.files.layout, self._trained, self.status())
        self._choose = staging == "auto" and self._can_map
        if staging == "mapped":
            self._use(Mapped)
        self._times: dict[str, float] = {}
        self._steps, self._ended = 0, time.monotonic()
        self._sends_ahead, self._begun, self._sent = True, False, False
        self._norm: torch.Tensor | None = None
        me = weakref.ref(self)
        self._hooks = [_hooked(me, slot) for slot in self._trained]
        os.register_at_fork(after_in_child=lambda: _forget(me))
        self._sync.is_remote = True
        process.joined(attached, self)
        self.files.life.tell(self._begin_anew)

    def _first_file(self, to: Path) -> None:
        create_from(self.module, to)
        # With the configuration of a module of transformers, `hf/` is a checkpoint.
        config: Any = getattr(self.module, "config", None)
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(to.parent / job.FILES)

    # What the job is told

    def _tensors(self) -> dict[torch.Tensor, str]:
        """The names of parameters and buffers with a place in the job, each once. ValueError for strange parameters."""
        names: dict[torch.Tensor, str] = {p: name for name, p in self.module.named_parameters()}
        persistent = set(self.module.state_dict(keep_vars=True))
        names.update((b, name) for name, b in self.module.named_buffers() if name in persistent)
        strange = sum(p not in names for group in self.param_groups for p in group["params"])
        if strange:
            raise ValueError(f"{strange} parameters of the optimizer are not the module's")
        return names

    def _of_groups(self) -> set[torch.Tensor]:
        return {p for group in self.param_groups for p in group["params"] if p.requires_grad}

    def _wanted(self) -> dict[str, str]:
        numbers = told.numbers_of(self.optimizer, self.reducer)
        numbers["clip_norm"] = float(self.clip_norm)
        self._scales = told.scales_of(self.optimizer, self._scales)
        trained = self._of_groups()
        frozen = [n for t, n in self._names.items() if isinstance(t, torch.nn.Parameter) and t not in trained]
        averaged = [n for t, n in self._names.items() if _is_averaged(t)]
        rules = told.rules_of(self.optimizer, self._names, averaged, frozen, self._scales)
        return {"reducer": self.reducer, **told.text_of(numbers, rules), **self._more}

    def _numbers(self) -> list[Any]:
        """What a scheduler, or the program, may change between steps."""
        options = [[v for k, v in group.items() if k != "params"] for group in self.param_groups]
        return [self.clip_norm, *options]

    def _read(self, name: str) -> str:
        return (self.files.model / "control" / name).read_text()

    def _write(self, wanted: Mapping[str, str]) -> None:
        """Changes these settings, those that are others now, as one change."""
        others = {name: text for name, text in wanted.items() if not told.same(name, self._read(name), text)}
        if others:
            with self.files.explained("settings.json"):
                (self.files.model / "settings.json").write_text(
                    f"{json.dumps(others, ensure_ascii=False)}\n", encoding="utf-8"
                )

    def _configure(self, wanted: Mapping[str, str]) -> None:
        """Rank 0 writes what the job does not have, and the others wait until it has all."""
        if self.attached.world.rank == 0:
            return self._write(wanted)
        deadline = time.monotonic() + job.START_TIMEOUT
        for name, text in wanted.items():
            while not told.same(name, self._read(name), text):
                if time.monotonic() > deadline:
                    raise Timeout(f"control/{name} is {self._read(name)!r}: rank 0 should have written {text!r}")
                time.sleep(job.LOOK)

    def _compare(self, wanted: Mapping[str, str]) -> None:
        """Warns of settings that the job has otherwise. GradfsError if its optimizer is another one."""
        now = {name: self._read(name).strip() for name in wanted}
        others = {name: text for name, text in now.items() if not told.same(name, text, wanted[name])}
        if "reducer" in others:
            raise GradfsError(f"the job's optimizer is {others['reducer']}, and this one is {self.reducer}")
        self._known = now
        if others and not self.attached.resumed:
            what = ", ".join(f"{name} at {text!r} and not {wanted[name]!r}" for name, text in others.items())
            self._warn(f"it has {what}")

    def _warn(self, what: str) -> None:
        warnings.warn(
            f"the job is at version {self.files.version()}, and goes on with its settings: {what}. "
            "load_extra() or load_state_dict() brings this process up to date; apply_settings() writes its own",
            RuntimeWarning,
            stacklevel=2,
        )

    def _settle(self) -> None:
        """Has the job take this step with the rate and settings that the program has now.

        Each learner does so before its first byte of a step, so that whoever is first has settled it for all.
        """
        numbers = self._numbers()
        if numbers == self._hyper:
            return
        if self._sent:
            self._abandon()
            raise GradfsError(
                "a rate or setting has changed after backward, when gradients were on their way: "
                'change it before backward, or use remote(…, staging="copied")'
            )
        self._hyper = numbers
        if self._follows:
            return self._warn("the rates of this process do not count")
        wanted = self._wanted()
        changed = {name: text for name, text in wanted.items() if not told.same(name, self._known[name], text)}
        for name, text in changed.items():
            before, now = self._known[name], self._read(name)
            if not told.same(name, now, text) and not told.same(name, now, before):
                warnings.warn(
                    f"control/{name} was {now.strip()!r}, and not {before!r} as this process knew it: somebody has "
                    f"written it, or schedulers of ranks differ. It is {text!r} now",
                    RuntimeWarning,
                    stacklevel=4,
                )
        self._write(changed)
        self._known = wanted

    def apply_settings(self) -> None:
        """Writes this process's rates and settings to a job that had begun when it came. One rank has to call it."""
        wanted = self._wanted()
        self._write(wanted)
        self._known, self._hyper, self._follows = wanted, self._numbers(), False

    # Membership

    def _join(self, attached: job.Attached) -> None:
        self._joined = attached.learner is None
        if attached.learner is None:
            learner = attached.model / "learners" / attached.name
            with contextlib.suppress(OSError):
                learner.rmdir()  # that of a process of this rank that was killed
            with explained(f"joining as {attached.name}", str(attached.model)):
                learner.mkdir()
            attached.learner = learner

    def _gather(self) -> None:
        """Waits until the job has its first learners, so that all of them see the same."""
        deadline = time.monotonic() + job.START_TIMEOUT
        while self.files.version() == 0 and self.status()["state"] == "forming":
            if time.monotonic() > deadline:
                raise Timeout(
                    f"{self.files.model} waits for more learners: control/learners is {self._read('learners').strip()}"
                )
            time.sleep(job.LOOK)

    def _leave(self) -> None:
        if self._joined and self.attached.learner is not None:
            with contextlib.suppress(OSError):
                self.attached.learner.rmdir()
        self.attached.leave()

    def _checked(self) -> list[Slot]:
        """The tensors that have a place in the job, in the order of its bytes. Refused lists all that do not fit."""
        layout, wrong, slots = self.files.layout, [], []
        aliases: dict[torch.Tensor, list[str]] = {}
        for name, p in self.module.named_parameters(remove_duplicate=False):
            aliases.setdefault(p, []).append(name)
        for tensor, name in self._names.items():
            at = next((layout[alias] for alias in aliases.get(tensor, [name]) if alias in layout), None)
            if at is None:
                if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter):
                    wrong.append(f"{name} is not in the job")
                continue
            self._names[tensor] = at.name
            mine = str(tensor.dtype)[len("torch.") :]
            if NAMES.get(at.dtype) != mine or tuple(at.shape) != tuple(tensor.shape):
                wrong.append(
                    f"{name} is {mine} {list(tensor.shape)}, and in the job {NAMES.get(at.dtype)} {list(at.shape)}"
                )
                continue
            slots.append(Slot(tensor, at))
        known = {name for names in aliases.values() for name in names}
        known |= {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        wrong += [f"{name} is in the job, and not in the module" for name in layout if name not in known]
        if wrong:
            more = f"; and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
            raise Refused(f"the module does not fit {self.files.model}: {'; '.join(wrong[:MOST_NAMED])}{more}")
        return sorted(slots, key=lambda slot: slot.at.offset)

    def close(self) -> None:
        """Leaves the job. The module keeps the newest weights that it has."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._sync.is_remote = False
        self._staging.close()
        if self.attached.world.rank == 0 and "GRADFS_JOB_DIR" in os.environ:
            with contextlib.suppress(OSError):
                self._keep(Path(os.environ["GRADFS_JOB_DIR"]) / job.EXTRA)
        self._leave()

    # A step

    def _completed(self, slot: Slot) -> None:
        """Backward has added to a gradient."""
        if self._closed or self._pid != os.getpid():
            return
        self._staging.complete(slot)
        if self._sync.accumulates:
            return
        slot.completed += 1
        slot.grad = slot.tensor.grad
        slot.grad_version = 0 if slot.grad is None else slot.grad._version
        if isinstance(self._staging, Mapped) and self._sends_ahead and self._steps >= WARM_STEPS and slot.bucket:
            self._send_ahead(self._staging, slot, slot.bucket)

    def _send_ahead(self, staging: Mapped, slot: Slot, bucket: Bucket) -> None:
        if not self._begun:
            for each in staging.buckets:
                each.missing = len(each.slots)
            self._settle()
            self._begun = True
        if slot.completed > 1:
            raise GradfsError(
                f"backward has come to {slot.at.name} again, when its gradient was on its way: "
                "let all but the last backward of a step run in no_sync()"
            )
        bucket.missing -= 1
        if bucket.missing == 0:
            staging.send(bucket)
            self._sent = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Contributes the gradients, and brings the version that they are in. Returns the loss of a closure.

        Nothing counts if it raises. Under a GradScaler, all learners skip a step in which one of them has found Inf or
        NaN. After RolledBack, the module has the weights that the job goes on from, and no gradients.
        """
        if self._pid != os.getpid():
            raise Closed("this process was forked: its parent is the learner, and takes the steps")
        if self._closed:
            raise Closed("the process has left the job")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        found = getattr(self, "found_inf", None)
        if all(slot.tensor.grad is None for slot in self._trained):
            return loss  # as with torch: without a gradient there is no step
        self._check_changes(is_scaled=found is not None)
        if found is not None and self._scaled(found):
            self._end()
            return loss
        self._settle()
        self._staging.ship()
        self._staging.pull()
        self._end()
        self._measure()
        if self._norm is not None:
            self._norm.fill_(math.nan if self.grad_norm is None else self.grad_norm)
            self._norm = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, also those that are on their way: nothing of them counts."""
        self._abandon()
        super().zero_grad(set_to_none)

    def _abandon(self) -> None:
        if self._sent and isinstance(self._staging, Mapped) and not self._closed:
            self._staging.take_back()
        self._end()

    def _end(self) -> None:
        for slot in self._trained:
            slot.forget()
        self._begun = self._sent = False

    def _check_changes(self, is_scaled: bool) -> None:
        """Refuses gradients that were changed where that would not be what the program means."""
        changed = [slot for slot in self._trained if slot.is_changed()]
        again = any(slot.completed > 1 for slot in self._trained)
        if is_scaled or again or changed:
            if self._sent:
                self._abandon()
                raise GradfsError(
                    f"the gradient of {(changed or self._trained)[0].at.name} was changed when it was on its way: "
                    'clip by remote(…, clip_norm=…) or clip_grad_norm_, or use remote(…, staging="copied")'
                )
            self._sends_ahead = False
        unscaled = is_scaled and getattr(self, "grad_scale", None) is None
        others = [slot for slot in changed if slot.is_changed(times=1 if unscaled else 0)]
        if others and not self._allow_changed and self.attached.world.size > 1:
            self._end()
            raise GradfsError(
                f"the gradient of {others[0].at.name} was changed between backward and step(). "
                "That counts for this learner alone. To clip the mean of all learners, use remote(…, clip_norm=…) or "
                "optimizer.clip_grad_norm_(…). remote(…, allow_changed_gradients=True) permits it"
            )

    def _scaled(self, found: torch.Tensor) -> bool:
        """Whether all learners skip this step. If not, gradients are without their scale afterwards."""
        if scalars.any(bool(found.item())):
            return True
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            grads = [slot.tensor.grad for slot in self._trained if slot.tensor.grad is not None]
            with torch.no_grad():
                torch._foreach_mul_(grads, 1 / float(scale))
        return False

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clips the mean of all learners' gradients from this step on. Returns its norm, which is NaN until step()."""
        self.clip_norm = float(max_norm)
        self._norm = torch.full((), math.nan)
        return self._norm

    @property
    def grad_norm(self) -> float | None:
        """The norm of the newest version's mean gradient. None if the job has not measured it: without `clip_norm`."""
        norm = self.status().get("gradient_norm")
        return None if norm is None else float(norm)

    @property
    def version(self) -> int:
        """The number of the newest version: steps of the job, also of before this process came."""
        return self.files.version()

    @property
    def staging(self) -> str:
        """The way in which gradients travel now: ``copied`` or ``mapped``."""
        return self._staging.name

    def status(self) -> dict[str, Any]:
        """The job's ``status.json``."""
        status: dict[str, Any] = json.loads((self.files.model / "status.json").read_text())
        return status

    def _begin_anew(self) -> None:
        """The job was restored. So is the module, from the job's weights. Schedulers are the program's to take back."""
        if self._closed:
            return
        self._end()
        super().zero_grad()
        self._staging.close()
        self._staging = type(self._staging)(self.files, self._trained, self._buffers)
        self._staging.pull()
        self._known = {name: self._read(name) for name in self._known}
        if not self._follows:
            # The next step writes what the program has.
            self._hyper = []

    def _use(self, kind: type[Copied | Mapped]) -> None:
        if not isinstance(self._staging, kind):
            self._staging.close()
            self._staging = kind(self.files, self._trained, self._buffers)

    def _measure(self) -> None:
        """Notes how long a step took, and keeps the faster way when both have been tried."""
        now = time.monotonic()
        took, self._ended = now - self._ended, now
        self._steps += 1
        if not self._choose:
            return
        if self._steps > WARM_STEPS:
            self._times[self.staging] = min(took, self._times.get(self.staging, math.inf))
        if self._steps == WARM_STEPS + MEASURED_STEPS:
            self._steps = 0
            if self.staging == "copied":
                return self._use(Mapped)
            self._choose = False
            self._steps = WARM_STEPS
            if MARGIN * self._times["copied"] < self._times["mapped"]:
                self._use(Copied)
            give_back_freed()

    # State

    def state_dict(self) -> dict[str, Any]:
        """The groups. The optimizer's state is the job's: `save` has it."""
        return {**super().state_dict(), "state": {}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Brings rates and other options of groups up to date. State of tensors is Refused: it is the job's."""
        if state_dict.get("state"):
            raise Refused("the optimizer's state is the job's: go on from a snapshot by remote(…, resume=DIR)")
        self.optimizer.load_state_dict(state_dict)
        self.param_groups = self.optimizer.param_groups
        self._follows = False

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Rank 0 saves a snapshot of the job in the directory `path`, in place of the one that is there.

        `extra` comes back by `load_extra`, as do the groups and the module's integer buffers, such as counters of rank
        0. It may hold what `torch.load` takes by default: tensors, numbers, text and containers of them.
        """
        if self.attached.world.rank != 0:
            return
        job.command("save", str(self.files.model), os.fspath(path), "--replace")
        job.extra_of(Path(path)).unlink(missing_ok=True)
        self._keep(Path(path) / job.EXTRA, extra)
        job.keep_extra(Path(path) / job.EXTRA, Path(path))

    def _keep(self, file: Path, extra: Mapping[str, Any] | None = None) -> None:
        counters = {name: b for b, name in self._names.items() if not b.is_floating_point()}
        torch.save(
            {"extra": dict(extra or {}), "groups": self.state_dict()["param_groups"], "counters": counters}, file
        )

    def load_extra(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """The `extra` of the snapshot in `path`, by default of the one that the job goes on from.

        The groups have the snapshot's rates then, and this process's schedule counts again. Refused if the snapshot has
        no `extra` of its version.
        """
        directory = Path(path if path is not None else self.attached.resumed or "")
        if not str(directory) or not (directory / "manifest.json").exists():
            raise Refused(f"load_extra: {str(directory) or 'the job'} is no snapshot: name its directory")
        file = job.extra_of(directory)
        if not file.exists():
            raise Refused(f"{directory} has no extra of its version: it was not saved by RemoteOptimizer.save")
        kept = torch.load(file, weights_only=True)
        with torch.no_grad():
            for tensor, name in self._names.items():
                if name in kept["counters"]:
                    tensor.copy_(kept["counters"][name])
        for group, saved in zip(self.param_groups, kept["groups"]):
            group.update((option, value) for option, value in saved.items() if option != "params")
        self._follows = False
        extra: dict[str, Any] = kept["extra"]
        return extra


def _is_averaged(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point()


def _is_begun(state: Mapping[str, Any]) -> bool:
    """Whether a tensor's state is that of an optimizer that has made steps. Adagrad has some before the first."""
    kept = {option: value for option, value in state.items() if value is not None}
    return bool(kept) and float(kept.get("step", 1)) > 0


def _hooked(optimizer: weakref.ref[RemoteOptimizer], slot: Slot) -> Any:
    def completed(parameter: torch.Tensor) -> None:
        alive = optimizer()
        if alive is not None:
            alive._completed(slot)

    return slot.tensor.register_post_accumulate_grad_hook(completed)  # type: ignore[no-untyped-call]


def _forget(optimizer: weakref.ref[RemoteOptimizer]) -> None:
    """In a child of this process: its copies of descriptors end, so that the learner's life is that of the parent."""
    alive = optimizer()
    if alive is not None and not alive._closed:
        alive._staging.forget_in_child()


remote = RemoteOptimizer
