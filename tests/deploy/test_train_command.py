"""Which model a run loads."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.errors import UserError
from deploy.run_file import load_run_file
from deploy.train_command import train, with_model
from tests.deploy.run_samples import step_record, write_metrics
from tests.models import save_tiny_qwen2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    save_tiny_qwen2(folder)
    return folder


def settings(**changes: str) -> dict[str, str]:
    return {"rollout.context_length": "128"} | {key.replace("__", "."): value for key, value in changes.items()}


def test_a_model_folder_is_what_servers_and_learner_load(model: Path) -> None:
    config = with_model(load_run_file(None, settings(model__source=str(model))), is_resumed=False)

    assert config.rollout.model == str(model)


def test_a_folder_below_the_working_folder_is_no_id_of_a_hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent.parent)
    source = f"{model.parent.name}/{model.name}"

    config = with_model(load_run_file(None, settings(model__source=source)), is_resumed=False)

    assert config.rollout.model == str(model)


def test_a_resumed_run_keeps_the_model_that_it_began_with(model: Path) -> None:
    config = with_model(load_run_file(None, settings(model__source="tiny", rollout__model=str(model))), is_resumed=True)

    assert config.rollout.model == str(model)


def test_a_resumed_run_whose_weights_are_gone_says_so(model: Path, tmp_path: Path) -> None:
    known = Path(shutil.copytree(model, tmp_path / "model"))
    (known / "model.safetensors").unlink()

    with pytest.raises(UserError, match="has no weights"):
        with_model(load_run_file(None, settings(rollout__model=str(known))), is_resumed=True)


def test_a_context_longer_than_the_model_knows_is_refused(model: Path) -> None:
    with pytest.raises(UserError, match=r"rollout\.context_length = 1025: must be at most 1024"):
        with_model(
            load_run_file(None, {"model.source": str(model), "rollout.context_length": "1025"}), is_resumed=False
        )


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("nowhere", "model.source = nowhere: there is no such folder, and the id of a model on a hub is org/name"),
        ("./org/name", "model.source = ./org/name: there is no such folder"),
        ("/org/name", "model.source = /org/name: there is no such folder"),
        ("https://hub.example/org/name", "model.source = https://hub.example/org/name: there is no such folder"),
        ("~no_such_user/model", "model.source = ~no_such_user/model: "),
        (__file__, f"model.source = {__file__}: is a file; name the folder of the model"),
    ],
)
def test_a_source_that_is_no_model_is_said_in_one_line(source: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        with_model(load_run_file(None, settings(model__source=source)), is_resumed=False)

    assert str(caught.value).startswith(line)


@pytest.mark.parametrize("source", ["tiny", str(Path(__file__).parent)])
def test_only_a_model_of_a_hub_has_a_revision(source: str) -> None:
    with pytest.raises(UserError, match=r"model\.revision = main: only a model of a hub has revisions"):
        with_model(load_run_file(None, settings(model__source=source, model__revision="main")), is_resumed=False)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no model folder, it has no config\.json"):
        with_model(load_run_file(None, settings(model__source=str(tmp_path))), is_resumed=False)


def test_a_model_that_is_there_is_found_without_torch() -> None:
    heavy = "{'torch', 'transformers', 'huggingface_hub'}"
    code = f"import sys, deploy.model_source, deploy.tiny_model; print(sorted({heavy} & sys.modules.keys()))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_a_run_that_is_complete_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[learner]\nnum_steps = 2\n", encoding="utf-8")
    (tmp_path / "report.json").write_text("{}", encoding="utf-8")
    write_metrics(tmp_path / "metrics.jsonl", [step_record(1), step_record(2)])

    with pytest.raises(UserError, match=r"the run is complete with 2 steps; go on to more with --learner.num_steps 4$"):
        train(run_file=None, overrides={}, resume=str(tmp_path), is_dry_run=False)
