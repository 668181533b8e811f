"""A service for the supervisor's tests: says that it is ready, then does what its first argument says."""

import os
import signal
import sys
import time
from pathlib import Path

from runtime.process import ReadyFile, exit_with_parent


def main() -> int:
    behaviour, *options = sys.argv[1:]
    values = dict(option.removeprefix("--").split("=", 1) for option in options)
    exit_with_parent()
    sys.stdout.write(f"trivial service: {behaviour}\n")
    sys.stdout.flush()
    if behaviour == "fail":
        sys.stderr.write("the reason why it fails\n")
        return 3
    if behaviour == "hang":
        time.sleep(60)
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready = ReadyFile(
        pid=os.getpid(),
        address="127.0.0.1:1",
        metrics_address="127.0.0.1:2",
        instance_id=os.environ.get("INSTANCE", ""),
    )
    ready.write(Path(values["ready-file"]))
    if behaviour == "end":
        return 0
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
