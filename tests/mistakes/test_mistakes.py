"""Each mistake gives one line and exit code 2, harms nothing, and stands in docs/mistakes.md.

TANDEM_WRITE_DOCS=1 python -m pytest tests/mistakes     # writes the page
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cli import main
from tests.deploy.fake_hub import FakeHub, serve_hub
from tests.mistakes.cases import CASES, WHERE_PARTS_MEET, Command
from tests.mistakes.workspace import Workspace
from tests.models import save_tiny_qwen2

ROOT = Path(__file__).parents[2]
HUB_WORDS = ("'", "Retrying", "[")
PAGE = ROOT / "docs" / "mistakes.md"
HEAD = """\
# Mistakes and their lines

What `tandem` says to each of these mistakes, each with exit code 2 and without a stack trace (`--debug` shows it). This
page is made by a test (`tests/mistakes`), which makes every one of them. FOLDER stands for the user's folder.
"""


@pytest.fixture(scope="module")
def good_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "good"
    save_tiny_qwen2(folder)
    return folder


@pytest.fixture(scope="module")
def hub(good_model: Path) -> Iterator[FakeHub]:
    with serve_hub(good_model) as hub:
        yield hub


@pytest.fixture
def space(tmp_path: Path, good_model: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    for name in ("TANDEM_TOKEN", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    # The lines must be the same on a machine with GPUs.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.chdir(ROOT)
    space = Workspace(tmp_path / "work", good_model, hub.address)
    space.folder.mkdir()
    yield space
    for held in space.held:
        held.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("what", "command"),
    [pytest.param(what, command, id=what) for chapter in CASES.values() for what, command in chapter.items()],
)
def test_a_mistake_gives_its_line_and_harms_nothing(
    what: str, command: Command, space: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(space)
    before = files(space.folder)

    code, printed = run(arguments, space, capsys)

    line = one_line(printed)
    assert code == 2, printed
    assert line.startswith("tandem: "), printed
    assert {path: content for path, content in files(space.folder).items() if path in before} == before
    readable = space.readable(line)
    if os.environ.get("TANDEM_WRITE_DOCS"):
        LINES[what] = readable
    else:
        assert row(what, readable) in PAGE.read_text(encoding="utf-8").splitlines()


LINES: dict[str, str] = {}


def test_the_page_has_every_mistake_and_nothing_else() -> None:
    if os.environ.get("TANDEM_WRITE_DOCS"):
        PAGE.write_text(page(), encoding="utf-8")
    rows = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.read_text(encoding="utf-8").splitlines()]

    cases = [what for chapter in CASES.values() for what in chapter]
    assert [cell for cell in rows if cell in cases] == cases
    assert len(cases) >= 30


def test_the_lines_of_parts_that_meet_are_on_the_page() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()

    assert all(row(what, line) in lines for what, line in WHERE_PARTS_MEET.items())


def run(arguments: list[str], space: Workspace, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code, and what was printed on stderr."""
    if not space.environment:
        code = main(arguments)
        return code, capsys.readouterr().err
    kept = {name: value for name, value in os.environ.items() if "PROXY" not in name.upper()}
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", *arguments],
        env=kept | space.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    return done.returncode, done.stderr


def one_line(printed: str) -> str:
    """The only line; before it huggingface_hub may say itself that it tries again."""
    *rest, line = printed.splitlines()
    assert all(other.startswith(HUB_WORDS) for other in rest), printed
    return line


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "hub" not in path.parts}


def page() -> str:
    chapters = []
    for title, cases in CASES.items():
        rows = "\n".join(row(what, LINES[what]) for what in cases)
        chapters.append(f"## {title}\n\n| mistake | line |\n|---|---|\n{rows}\n")
    parts = "\n".join(row(what, line) for what, line in WHERE_PARTS_MEET.items())
    return "\n".join([HEAD, *chapters, f"## Where parts meet\n\n| mistake | line |\n|---|---|\n{parts}\n"])


def row(what: str, line: str) -> str:
    return f"| {what} | `{line.replace('|', chr(92) + '|')}` |"
