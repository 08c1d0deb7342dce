"""A learner, or somebody who looks on, as a program: it says each call and its outcome as a line of JSON.

    python learner.py learner NAME MOUNT MODEL FLAG      contributes ones, leaves while the file FLAG is there
    python learner.py watcher NAME MOUNT MODEL FLAG      reads what the mount shows
"""

import errno
import json
import os
import sys
import time

import numpy as np

PAUSE = 0.03
# So often an fsync that timed out is tried again: its contribution counts once all the same.
AGAIN = 2


class Client:
    def __init__(self, name, mount, model, flag):
        self.name, self.mount, self.model, self.flag = name, mount, model, flag
        self.place = f"{model}/learners/{name}"

    def say(self, do, t0=None, **more):
        event = {"do": do, "who": self.name, "mount": self.mount, "t0": t0, "t1": time.monotonic(), **more}
        os.write(1, json.dumps(event).encode() + b"\n")

    def failed(self, call, error, t0, do="fail"):
        """Says an error, and why it was."""
        try:
            with open(f"{self.place if 'weights' not in call else self.model}/error") as file:
                why = file.read().strip()
        except OSError:
            why = ""
        excused = error.errno == errno.EIO and "counts after all" in why
        self.say(do, t0, call=call, errno=error.errno, why=why, excused=excused)
        return error.errno

    def see(self, place):
        """One look at the weights; the errno."""
        t0 = time.monotonic()
        try:
            file = os.open(f"{place}/weights", os.O_RDONLY)
            try:
                data = bytearray(os.fstat(file).st_size)
                if os.preadv(file, [data], 0) != len(data):
                    raise OSError(errno.ENODATA, "a short read")
                version = int(os.getxattr(file, "user.gradfs.version"))
            finally:
                os.close(file)
        except OSError as error:
            return self.failed(f"read of {place}/weights", error, t0)
        values = np.frombuffer(data, "<f4")
        self.say("see", t0, version=version, low=int(values.min()), high=int(values.max()))
        return 0


class Learner(Client):
    def step(self):
        """One contribution; the errno."""
        t0, call = time.monotonic(), "open of gradients"
        self.say("try", t0)
        try:
            file = os.open(f"{self.place}/gradients", os.O_WRONLY | os.O_TRUNC)
            try:
                size, call = os.stat(f"{self.place}/weights").st_size, "write"
                data = memoryview(np.ones(size // 4, "<f4")).cast("B")
                while data:
                    data = data[os.write(file, data[: 1 << 18]) :]
                call = "fsync"
                for again in range(AGAIN + 1):
                    try:
                        os.fsync(file)
                        break
                    except OSError as error:
                        if error.errno != errno.ETIMEDOUT or again == AGAIN:
                            raise
                        self.failed(call, error, t0, "again")
            except BaseException:
                try:
                    os.close(file)
                except OSError:
                    pass
                raise
            call = "close"
            os.close(file)
        except OSError as error:
            return self.failed(call, error, t0, "give")
        self.say("give", t0, errno=0)
        return 0

    def join(self):
        t0 = time.monotonic()
        try:
            os.mkdir(self.place)
        except OSError as error:
            if error.errno == errno.EEXIST and os.path.isdir(self.place):
                return 0
            # Where a mount was killed, its learners are in the job until their lease ends.
            return self.failed("mkdir", error, t0)
        return 0

    def leave(self):
        """Leaves while the flag is there."""
        while os.path.exists(self.flag):
            t0 = time.monotonic()
            try:
                os.rmdir(self.place)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    self.failed("rmdir", error, t0)
                    time.sleep(PAUSE)
                    continue
            self.say("left", t0)
            while os.path.exists(self.flag):
                time.sleep(PAUSE)

    def run(self):
        has_joined, failures = False, 0
        while True:
            if os.path.exists(self.flag):
                self.leave()
                has_joined = False
            if has_joined:
                trouble = self.step() or self.see(self.place)
            else:
                trouble = self.join() or self.see(self.place)
                has_joined = not trouble
            failures = failures + 1 if trouble else 0
            # Where the job was restored, the mount has joined for it, and the next step goes well.
            if trouble not in (0, errno.ETIMEDOUT) and failures > 1:
                has_joined = False
                try:
                    os.rmdir(self.place)
                except OSError:
                    pass
            time.sleep(PAUSE if not trouble else 0.1)


class Watcher(Client):
    def number(self, what):
        t0 = time.monotonic()
        try:
            with open(f"{self.model}/{what}") as file:
                self.say("number", t0, what=what, value=int(file.read() or -1))
        except OSError as error:
            self.failed(f"read of {what}", error, t0)

    def run(self):
        while True:
            self.see(self.model)
            for what in ("version", "durable_version"):
                self.number(what)
            time.sleep(4 * PAUSE)


if __name__ == "__main__":
    {"learner": Learner, "watcher": Watcher}[sys.argv[1]](*sys.argv[2:]).run()
