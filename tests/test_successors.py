"""A program that ends, and the next one that writes as the same learner as soon as the first is reaped."""

import numpy as np
import pytest
from filetools import BLOCK, array, f32, finish, go, hear, killed, mounts, program

mounted = mounts(both=False, lease=0)

# Eight threads: the kernel closes the files of such a program from whichever of them is the last to go.
PREDECESSOR = """
for _ in range(int(argv[1])):
    threading.Thread(target=time.sleep, args=[30], daemon=True).start()
fd = os.open(argv[0], os.O_WRONLY)
os.pwrite(fd, bytes([0, 0, 128, 66]) * 16384, 0)  # A block of 64.0.
say("written")
wait()
os._exit(0)
"""


@pytest.mark.parametrize("threads", [0, 8], ids=["alone", "with threads"])
def test_killed_writer_leaves_no_half_step__to_the_next_program(mounted, threads):
    mount = mounted()
    for step in range(1, 26):
        child = program(PREDECESSOR, mount.model / "gradients", threads)
        hear(child)
        killed(child)
        # Half of the rounds touch its bytes, half do not.
        mount.contribute(np.ones(BLOCK // 4, "<f4"), offset=BLOCK * (step % 2))
        weights = array(mount.model / "weights")
        assert weights[: BLOCK // 4].max() == step // 2, f"round {step}: bytes of the killed one count"
        assert weights[BLOCK // 4] == (step + 1) // 2 and mount.version() == step


@pytest.mark.parametrize("threads", [0, 8], ids=["alone", "with threads"])
def test_what_exit_leaves_open_counts__before_the_next_program(mounted, threads):
    mount = mounted()
    for step in range(1, 26):
        child = program(PREDECESSOR, mount.model / "gradients", threads)
        hear(child)
        go(child)
        finish(child)
        mount.contribute(f32(1))
        weights = array(mount.model / "weights")
        assert weights[:2].tolist() == [65 * step, 64 * step] and mount.version() == 2 * step, f"round {step}"
