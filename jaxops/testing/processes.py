"""Several processes of a program on this machine."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Sequence


def run_local(command: Sequence[str], count: int) -> int:
    """Runs a command in `count` processes, and ends all when one fails; returns its exit code.

    Each has the arguments `--processes`, `--process` with its number, and `--coordinator` with the
    address at which the first one listens, for `jax.distributed.initialize`.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    common = [*command, "--processes", str(count), "--coordinator", coordinator]
    children = [subprocess.Popen([*common, "--process", str(i)]) for i in range(count)]
    try:
        while True:
            codes = [child.poll() for child in children]
            failed = [code for code in codes if code]
            if failed or None not in codes:
                return failed[0] if failed else 0
            time.sleep(0.1)
    finally:
        for child in children:
            child.kill()
            child.wait()
