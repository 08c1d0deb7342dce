"""Any program that can open a file can train: the same step from C, Python, Perl, Node and the shell.

Each program reads `weights` and writes `gradients` with the standard file calls of its language, and the weights
after it are compared bit for bit: with the reducer `sum` a contribution g makes w + g. A language that is not
installed is skipped; with CI=true it fails, because there a skip would go unnoticed.
"""

import array
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ran
from patience import HANGS

PROGRAMS = Path(__file__).resolve().parent / "programs"
DEADLINE = HANGS

# float32 values that stay exact through two steps. Several blocks of 64 KiB, a last one that is not full, and a
# second tensor that begins in the middle of a block.
SHAPES = {"first": [99_991], "second": [3, 333]}
COUNT = sum(SHAPES["first"]) + 3 * 333
INITIAL = array.array("f", (i % 1000 - 500 for i in range(COUNT)))

# Contribute 2 w + 1.
COMPUTING = {
    "c": ["read", "pread", "stdio", "mmap"],
    "py": ["open", "os", "pathlib", "mmap", "numpy"],
    "pl": ["sysread", "print"],
    "js": ["sync", "whole", "stream"],
}
# Contribute w.
COPYING = {"c": ["sendfile"], "py": ["sendfile", "copyfile", "copy_file_range"]}
SHELL_COPIES = {
    "cat": "cat $W > $G",
    "cp": "cp $W $G",
    "dd": "dd if=$W of=$G bs=64K status=none",
    "dd of a size that fits no block": "dd if=$W of=$G bs=4321 status=none",
    "dd without truncating": "dd if=$W of=$G bs=1M conv=notrunc,fsync status=none",
    "dd direct": "dd if=$W of=$G bs=1M oflag=direct status=none",
    "dd of the halves, the last one first":
        "dd if=$W of=$G bs=4096 skip=50 seek=50 conv=notrunc status=none; "
        "dd if=$W of=$G bs=4096 count=50 conv=notrunc status=none",
    "head and tail": "{ head -c 100000 $W; tail -c +100001 $W; } > $G",
    "a pipe": "cat < $W | cat | dd of=$G bs=1M iflag=fullblock status=none",
    "tee": "tee $G < $W > /dev/null",
    "as a learner": "mkdir $M/learners/shell && cat $M/learners/shell/weights > $M/learners/shell/gradients; "
                    "rmdir $M/learners/shell",
}


def require(language, *programs):
    """Path of the first of `programs` that is installed; without one, the tests of the language are skipped."""
    path = next(filter(None, map(shutil.which, programs)), None)
    if path is None:
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up(f"{language} is not installed: none of {', '.join(programs)} is on the PATH")
    return path


@pytest.fixture(scope="session")
def step_in_c(tmp_path_factory):
    compiler = require("a C compiler", "cc", "gcc", "clang")
    binary = tmp_path_factory.mktemp("c") / "step"
    subprocess.run([compiler, "-O1", "-Wall", "-Werror", "-o", binary, PROGRAMS / "step.c"], check=True)
    return [str(binary)]


@pytest.fixture
def program(request):
    """Command of the step program of a language, by the extension of its source."""

    def command(language, way):
        if way == "numpy":
            pytest.importorskip("numpy")
        if language == "c":
            return request.getfixturevalue("step_in_c")
        interpreter = {
            "py": lambda: sys.executable,
            "pl": lambda: require("Perl", "perl"),
            "js": lambda: require("Node", "node"),
        }
        return [interpreter[language](), str(PROGRAMS / f"step.{language}")]

    return command


@pytest.fixture
def model_file(tmp_path):
    header, end = {}, 0
    for name, shape in SHAPES.items():
        size = 4
        for extent in shape:
            size *= extent
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path = tmp_path / "numbers.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + INITIAL.tobytes())
    return path


@pytest.fixture
def mount(start_mount, model_file):
    return start_mount(model=model_file, reducer="sum", block_size="64KiB")


def run(command, **options):
    """Runs a program to its end; fails with what it said unless it succeeds."""
    __tracebackhide__ = True
    done = ran(command, **options)
    if done.returncode != 0:
        pytest.fail(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def shell(script, mount):
    """Runs a script that calls the model $M, its weights $W and its gradients $G."""
    __tracebackhide__ = True
    return run([require("a shell", "sh"), "-euc", f"M={mount.model} W=$M/weights G=$M/gradients; {script}"])


def expect(mount, version, values):
    """The mount has exactly this version, and exactly these weights in it."""
    assert mount.wait_for_version(version) == version
    weights = array.array("f")
    weights.frombytes(mount.weights())
    wrong = [i for i, (is_, should) in enumerate(zip(weights, values)) if is_ != should]
    assert len(weights) == len(values) and not wrong, (
        f"{len(wrong)} of {len(values)} wrong, from {wrong[:3]}: {[weights[i] for i in wrong[:3]]} "
        f"instead of {[values[i] for i in wrong[:3]]}"
    )


def ways(table):
    return [(language, way) for language, ways in table.items() for way in ways]


@pytest.mark.parametrize("language,way", ways(COMPUTING))
def test_two_steps(mount, program, language, way):
    command = [*program(language, way), str(mount.model), way]
    run(command)
    expect(mount, 1, [3 * w + 1 for w in INITIAL])
    run(command)
    expect(mount, 2, [9 * w + 4 for w in INITIAL])


@pytest.mark.parametrize("language,way", ways(COPYING))
def test_copying_doubles(mount, program, language, way):
    command = [*program(language, way), str(mount.model), way]
    run(command)
    expect(mount, 1, [2 * w for w in INITIAL])
    run(command)
    expect(mount, 2, [4 * w for w in INITIAL])


@pytest.mark.parametrize("script", SHELL_COPIES.values(), ids=SHELL_COPIES.keys())
def test_copying_in_the_shell_doubles(mount, script):
    shell(script, mount)
    # Each close of something written is a step. Two dd are two, but neither reads what the other one wrote.
    expect(mount, max(1, script.count("dd if=$W")), [2 * w for w in INITIAL])


def test_one_element_from_printf(mount):
    # 1.0 is 00 00 80 3f. What is not written counts as zero.
    shell(r"printf '\000\000\200\077' | dd of=$G bs=4 seek=20000 conv=notrunc status=none", mount)
    expected = INITIAL[:]
    expected[20000] += 1
    expect(mount, 1, expected)
    shell(r"printf '\000\000\200\077' | dd of=$G bs=4 conv=notrunc status=none", mount)
    expected[0] += 1
    expect(mount, 2, expected)


def test_reading_in_the_shell(mount):
    assert shell("head -c 16 $W | od -A n -t f4", mount).split() == ["-500", "-499", "-498", "-497"]
    assert shell("od -A n -t f4 -j 400 -N 4 $W", mount).split() == ["-400"]
    assert shell("dd if=$W bs=4 skip=70007 count=1 status=none | od -A n -t f4", mount).split() == ["-493"]
    assert shell("wc -c < $W", mount).strip() == shell("stat -c %s $G", mount).strip() == str(4 * COUNT)
    assert shell("tail -c 4 $W | od -A n -t f4", mount).split() == [str(int(INITIAL[-1]))]
    assert shell("cat $M/version", mount) == "0\n"
    shell("cmp $W $M/versions/0/weights", mount)
    # The data of the safetensors file is the flat bytes.
    shell(f"tail -c {4 * COUNT} $M/weights.safetensors | cmp - $W", mount)


def test_learners_of_several_languages(start_mount, model_file, program):
    ways = {"py": "open", "pl": "print", "js": "sync", "c": "read"}
    programs = {language: program(language, way) for language, way in ways.items()}
    mount = start_mount(model=model_file, reducer="sum", block_size="64KiB", learners=len(programs) + 1)
    places = {language: mount.join(f"in-{language}") for language in [*ways, "sh"]}
    expected = list(INITIAL)
    for version in (1, 2):
        running = [
            subprocess.Popen([*programs[language], str(places[language]), way]) for language, way in ways.items()
        ]
        shell("cat $M/learners/in-sh/weights > $M/learners/in-sh/gradients", mount)
        assert [process.wait(DEADLINE) for process in running] == [0] * len(running)
        # Four contribute 2 w + 1, the shell contributes w.
        expected = [w + 4 * (2 * w + 1) + w for w in expected]
        expect(mount, version, expected)


# A contribution with a NaN is refused with EINVAL, at a write or at the close; no language may miss it.
REFUSED = [
    ("c", "read"), ("c", "stdio"), ("c", "mmap"), ("py", "open"), ("py", "mmap"), ("pl", "sysread"), ("pl", "print"), ("js", "sync"),
    ("js", "whole"), ("js", "stream"), "cat $W > $G", "cp $W $G", "dd if=$W of=$G bs=1M status=none",
]  # fmt: skip


@pytest.fixture
def poisoned(start_mount, model_file):
    """A mount whose weights hold one NaN, in a block that is never written whole."""
    data = bytearray(model_file.read_bytes())
    data[-4:] = b"\0\0\xc0\x7f"
    model_file.write_bytes(data)
    return start_mount(model=model_file, reducer="sum", block_size="64KiB")


@pytest.mark.parametrize("how", REFUSED, ids=str)
def test_a_refusal_reaches_the_program(poisoned, program, how):
    if isinstance(how, str):
        command = [require("a shell", "sh"), "-euc", f"W={poisoned.model}/weights G={poisoned.model}/gradients; {how}"]
    else:
        command = [*program(*how), str(poisoned.model), how[1]]
    done = ran(command)
    assert done.returncode != 0, f"{command} did not notice"
    assert os.strerror(errno.EINVAL).lower() in done.stderr.lower(), done.stderr
    # It counts nowhere, and the next one does.
    assert poisoned.version() == 0
    poisoned.contribute(array.array("f", [1.0]))
    poisoned.wait_for_version(1)
    expected = INITIAL[:2]
    expected[0] += 1
    assert poisoned.weights()[:8] == expected.tobytes()
