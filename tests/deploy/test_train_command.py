"""Which model a run loads."""

from pathlib import Path

import pytest

from deploy.errors import UserError
from deploy.run_file import load_run_file
from deploy.train_command import with_model


def _model_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}", encoding="utf-8")
    return path


def test_a_model_folder_is_what_servers_and_learner_load(tmp_path: Path) -> None:
    model = _model_folder(tmp_path / "model")

    config = with_model(load_run_file(None, {"model.source": str(model)}), is_resumed=False)

    assert config.rollout.model == str(model)


def test_a_resumed_run_keeps_the_model_that_it_began_with(tmp_path: Path) -> None:
    began_with = _model_folder(tmp_path / "model")

    config = with_model(
        load_run_file(None, {"model.source": "tiny", "rollout.model": str(began_with)}), is_resumed=True
    )

    assert config.rollout.model == str(began_with)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no model folder, it has no config\.json"):
        with_model(load_run_file(None, {"model.source": str(tmp_path)}), is_resumed=False)
