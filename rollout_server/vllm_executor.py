"""Our executor inside vLLM's engine process: one worker whose process group meets in a file.

vLLM 0.26 gives the single worker of an engine a TCPStore, which listens on every address of the machine without asking
who connects. vLLM 0.32 has it meet in a file by itself.
"""

import tempfile
import uuid

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class FileStoreExecutor(UniProcExecutor):
    """The executor of an engine on one GPU."""

    def _distributed_args(self) -> tuple[str, int, int]:
        """Returns where the process group meets, and the worker's global and local rank."""
        _address, rank, local_rank = super()._distributed_args()
        # torch makes the file, and removes it when the group ends.
        return f"file://{tempfile.gettempdir()}/td-engine-{uuid.uuid4().hex}", rank, local_rank
