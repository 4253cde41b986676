"""`examples/train_distributed.py` by several processes, killed and continued by others."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import processes
import pytest
from test_examples import EXAMPLES, load

PROGRAM = EXAMPLES / "train_distributed.py"
#: How many processes continue what two began: one is the quickest.
LATER = int(os.environ.get("JAXOPS_LATER_PROCESSES", "1"))
STEPS = 24
PATIENCE = 120  # seconds


class Run:
    """The program in processes of its own, which may be local ones that it starts itself."""

    def __init__(self, folder, *arguments, checkpoints=True):
        self.losses = folder / f"{len(list(folder.iterdir()))}.jsonl"
        self.command = [sys.executable, PROGRAM, "--losses", self.losses]
        if checkpoints:
            self.command += ["--checkpoints", folder / "checkpoints", "--save-every", "3"]
        self.command += arguments
        self.environment = processes.environment(JAX_PLATFORMS="cpu", XLA_FLAGS="")
        self.children = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for child in self.children:
            child.kill()
            child.communicate()

    def start(self, *arguments):
        command = [str(a) for a in (*self.command, *arguments)]
        pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.children.append(subprocess.Popen(command, env=self.environment, **pipe))

    def wait(self):
        for child in self.children:
            said, _ = child.communicate(timeout=PATIENCE)
            assert child.returncode == 0, said

    def by_step(self):
        if not self.losses.exists():
            return {}
        lines = self.losses.read_text().splitlines()
        return {found["step"]: found["loss"] for found in map(json.loads, lines)}

    def wait_for(self, steps):
        until = time.monotonic() + PATIENCE
        while len(self.by_step()) < steps:
            failed = [c for c in self.children if c.poll() is not None]
            assert not failed, failed[0].communicate()[0]
            assert time.monotonic() < until, f"{steps} steps took too long"
            time.sleep(0.05)


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def compare(got, want):
    """Losses of the same steps: equal but for the roundings of other sums."""
    steps = sorted(got)
    np.testing.assert_allclose([got[s] for s in steps], [want[s] for s in steps], rtol=1e-5)


def test_killed_processes_are_continued_by_other_numbers_of_them(tmp_path):
    """Two processes over data and time, then others over tensor, as one process at once."""
    with Run(tmp_path, "--steps", STEPS, checkpoints=False) as run:
        run.start()
        run.wait()
        want = run.by_step()
    assert len(want) == STEPS
    assert want[STEPS - 1] < 0.8 * want[0]

    mesh = ("--mesh", "data=2,time=2", "--cpu-devices", "2", "--steps", "10000")
    with Run(
        tmp_path, *mesh, "--processes", "2", "--coordinator", f"localhost:{free_port()}"
    ) as run:
        for process in range(2):
            run.start("--process", process)
        run.wait_for(5)
        run.children[1].kill()
        before = run.by_step()
    compare({s: loss for s, loss in before.items() if s < STEPS}, want)

    newest = max(int(f.name) for f in (tmp_path / "checkpoints").iterdir() if f.name.isdigit())
    assert 0 < newest < STEPS - 4, "the processes were killed too late"
    mesh = ("--mesh", f"tensor={2 * LATER}", "--cpu-devices", "2", "--save-every", "100")
    with Run(tmp_path, *mesh, "--processes", LATER, "--steps", STEPS) as run:
        run.start()
        run.wait()
        compare(run.by_step(), want)
        assert sorted(run.by_step()) == list(range(newest, STEPS))


@pytest.mark.parametrize("mesh", ["time=8", "data=2,tensor=2,time=2"])
def test_devices_send_no_more_than_in_plain_jax(mesh):
    """Neither more often nor more bytes."""
    example = load("train_distributed")
    with jax.enable_x64(False):
        found = example.make_mesh(mesh, jax.devices("cpu")[:8])
        ours, plain = (example.traffic_of(found, which) for which in (None, "xla"))
    assert ours
    for i in range(2):
        assert sum(t[i] for t in ours.values()) <= sum(t[i] for t in plain.values())
    assert "all-gather" not in ours


def test_a_wrong_mesh_is_refused():
    example = load("train_distributed")
    for text in ("tensor=0", "depth=2", "data=3", "tensor"):
        with pytest.raises(SystemExit, match="--mesh"):
            example.make_mesh(text)


def test_weak_scaling_follows_its_formula():
    example = load("train_distributed")
    # 64 devices: 8 in each of 8 nodes, 7/8 of 2e9 bytes inside, 7/8 of 2e9 / 8 outside.
    want = 1.75e9 / 450e9 + 1.75e9 / 8 / 50e9 + 28 * 5e-6
    assert example.sent_seconds(1e9, 64) == pytest.approx(want)
    assert list(example.weak_scaling(1e9, 0.1)) == [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
