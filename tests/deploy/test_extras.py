"""A package that is missing, or does not fit, gives one line with the cure."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deploy.cli import main
from deploy.extras import missing_extra
from deploy.torchvision_check import check_torchvision

ROOT = Path(__file__).resolve().parent.parent.parent
UNFIT = 'raise RuntimeError("operator torchvision::nms does not exist")'
REWARD_NODE = "deploy.placement, deploy.run_file, deploy.serve_command, reward_service.server, reward_service.worker"


@pytest.mark.parametrize(
    ("arguments", "package", "expected"),
    [
        (
            ["serve", "reward", "x.toml"],
            "math_verify",
            "serve reward: math_verify is not installed: install the extra reward",
        ),
        (
            ["serve", "rollout"],
            "vllm.v1.engine",
            "serve rollout: vllm is not installed: install the extra rollout-cpu or",
        ),
        (["serve", "learner"], "deepspeed", "the extra learner"),
        (["train", "--resume", "latest"], "ray", "the extra deploy"),
    ],
)
def test_a_missing_package_names_the_extra_that_brings_it(arguments: list[str], package: str, expected: str) -> None:
    line = missing_extra(ModuleNotFoundError(name=package), arguments)

    assert line is not None
    assert expected in line
    assert "\n" not in line


def test_a_module_that_no_extra_brings_is_our_mistake() -> None:
    assert missing_extra(ModuleNotFoundError(name="runtime.nowhere"), ["serve", "reward"]) is None


def test_the_extras_that_are_named_exist() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    errors = [ModuleNotFoundError(name=name) for name in ("torch", "ray")]
    commands = (["serve", "rollout"], ["serve", "learner"], ["serve", "reward"], ["train"], ["data"], ["model"])

    lines = [missing_extra(error, command) or "" for error in errors for command in commands]

    words = {word for line in lines for word in re.findall(r"(?:extra|or|\() ?([a-z]+(?:-[a-z]+)?)", line)}
    assert {"rollout-cpu", "rollout-gpu", "learner", "reward", "deploy", "cpu", "gpu"} <= words & set(declared)


@pytest.mark.parametrize("modules", [REWARD_NODE, "evaluation.accuracy", "learner.ledger_verdict, deploy.run_folder"])
def test_a_small_node_imports_nothing_heavy(modules: str) -> None:
    heavy = "torch vllm ray deepspeed transformers datasets pyarrow matplotlib"
    code = f"import sys, {modules}; print(*set('{heavy}'.split()) & set(sys.modules))"

    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)

    assert imported.stdout == "\n"


@pytest.fixture
def unfit_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torchvision as pip brings one along that was built for another torch."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(UNFIT)
    (tmp_path / "torchvision-0.28.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.28.0.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.28.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)


@pytest.mark.usefixtures("unfit_torchvision")
@pytest.mark.parametrize(
    "command",
    [["serve", "rollout"], ["serve", "learner", "--run-folder", "run"], ["model", "tiny", "FOLDER"]],
)
def test_an_unfit_torchvision_ends_with_one_line_and_code_2(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a tiny model in a cache, which needs nothing but a copy.
    monkeypatch.setenv("HOME", str(tmp_path))

    code = main([argument.replace("FOLDER", str(tmp_path / "tiny")) for argument in command])

    said = capsys.readouterr().err
    assert code == 2
    assert said.startswith("tandem: torchvision 0.28.0 is built for another torch than ")
    assert "(operator torchvision::nms does not exist)" in said
    assert "run `pip uninstall -y torchvision torchaudio torchcodec`" in said
    assert said.count("\n") == 1


def test_no_torchvision_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.torchvision_check.find_spec", lambda _: None)

    check_torchvision()
