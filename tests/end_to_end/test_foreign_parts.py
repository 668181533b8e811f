"""Parts that do not belong together are refused in one line: another tokenizer, another's Ray."""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.process import ReadyFile
from tests.end_to_end.training import Training, start_training
from tests.mistakes.cases import is_where_parts_meet
from tests.models import save_tiny_qwen2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SERVER = ("--rollout.context_length", "128", "--rollout.kv_cache_bytes", "33554432", "--rollout.dtype", "float32")


@contextmanager
def learner(model: Path, folder: Path) -> Iterator[str]:
    """Address of a learner that waits for its servers."""
    ready = folder / "ready.json"
    (folder / "run").mkdir()
    log = (folder / "learner.txt").open("w")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "deploy.cli", "serve", "learner", "--run-folder", str(folder / "run")),
            *("--ready-file", str(ready), "--rollout.model", str(model), "--rollout.context_length", "128"),
        ],
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"},
    )
    try:
        training = Training(process, folder, folder / "learner.txt")
        training.wait_until(ready.is_file, what="the learner")
        written = ReadyFile.read(ready)
        assert written is not None
        yield written.address
    finally:
        process.kill()
        process.wait()
        log.close()


def test_a_server_with_another_tokenizer_is_not_taken_in(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        save_tiny_qwen2(folder)
    tokenizer = json.loads((theirs / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (theirs / "tokenizer.json").write_text(json.dumps(tokenizer))

    with learner(ours, tmp_path) as address:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "deploy.cli", "serve", "rollout", "--rollout.model", str(theirs), *SERVER),
                *("--rollout.learner_address", address),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    line = done.stderr.splitlines()[-1]
    assert done.returncode == 2, done.stderr
    assert is_where_parts_meet("a rollout server with another tokenizer than the learner", line), line


@pytest.fixture
def foreign_ray(tmp_path: Path) -> Iterator[str]:
    """Address of a cluster that asks for a token which we do not have."""
    environment = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    script = "import ray, time; ray.init(include_dashboard=False, num_cpus=1, _node_ip_address='127.0.0.1')\n"
    script += "print(ray.get_runtime_context().gcs_address, flush=True); time.sleep(300)"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.terminate()
    process.communicate()


def test_a_ray_cluster_of_somebody_else_is_not_joined(tmp_path: Path, foreign_ray: str) -> None:
    save_tiny_qwen2(tmp_path / "model")
    arguments = ("--model.source", str(tmp_path / "model"), "--rollout.context_length", "128")
    run_file = tmp_path / "run.toml"
    run_file.write_text("")

    training = start_training(str(run_file), "--ray.address", foreign_ray, *arguments, runs=tmp_path / "runs")
    printed = training.finish()

    assert training.process.returncode == 2, printed
    assert is_where_parts_meet("a Ray of somebody else", printed.splitlines()[-1]), printed
    assert "Traceback" not in printed
