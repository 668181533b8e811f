"""A rollout server as a process of its own: `python -m tests.rollout_server.run_server SETTINGS_JSON READY_FILE`."""

import asyncio
import sys
from pathlib import Path

from rollout_server.config import RolloutSettings
from rollout_server.server import serve
from runtime.process import exit_with_parent
from runtime.telemetry import set_up_logging


def main() -> None:
    exit_with_parent()
    settings, ready_file = sys.argv[1:]
    set_up_logging(service="rollout")
    asyncio.run(serve(RolloutSettings.model_validate_json(settings), ready_file=Path(ready_file)))


# vLLM's engine process imports this module again.
if __name__ == "__main__":
    main()
