"""The ready file, and the end with the parent."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from runtime.process import ReadyFile

ROOT = Path(__file__).parents[2]

# A parent that starts a child which ends with it, prints the child's id, and waits.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import time
from runtime.process import exit_with_parent
exit_with_parent()
exit_with_parent()
print("watching", flush=True)
time.sleep(60)
'''], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_ready_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    ready = ReadyFile(pid=1, address="127.0.0.1:1", metrics_address="127.0.0.1:2", instance_id="x")
    path = tmp_path / "ready.json"
    assert ReadyFile.read(path) is None

    ready.write(path)

    assert ReadyFile.read(path) == ready
    assert [file.name for file in tmp_path.iterdir()] == ["ready.json"]


def test_a_child_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.communicate()

    ended, _, _ = select.select([child], [], [], 2)
    os.close(child)
    assert ended
