"""Learner settings: defaults stand, mistakes are named."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from learner.config import LearnerSettings


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="learning_rat"):
        LearnerSettings.model_validate({"learning_rat": 1})


def test_the_cap_must_let_the_clip_act() -> None:
    with pytest.raises(ValidationError, match=r"importance_cap = 1.1: must be at least 1 \+ clip_high = 1.3"):
        LearnerSettings(importance_cap=1.1, clip_high=0.3)


def test_every_field_has_a_help_text() -> None:
    assert [name for name, field in LearnerSettings.model_fields.items() if not field.description] == []


def test_settings_import_no_heavy_library() -> None:
    code = "import sys, learner.config; print({'torch', 'deepspeed', 'ray', 'vllm'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
