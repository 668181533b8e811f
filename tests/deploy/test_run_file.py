"""Run files: what is read, what is refused and with which line, what is written."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.errors import UserError
from deploy.mistakes import check_settings
from deploy.overrides import split_overrides
from deploy.run_file import RunConfig, dump_toml, load_run_file
from deploy.toml_writer import write_toml

# TOML files are UTF-8, which has no lone surrogates.
_TEXTS = st.text(st.characters(codec="utf-8"))

MISTAKES_IN_FILE = [
    ("[learner]\nnum_step = 3", "learner.num_step: unknown key, did you mean num_steps?"),
    ("[learner]\nnum_servers = 3", "learner.num_servers: unknown key, did you mean rollout.num_servers?"),
    ("[learner]\nqqq = 3", "learner.qqq: unknown key"),
    ("[learnr]\nnum_steps = 3", "learnr: unknown key, did you mean learner?"),
    ("[learner.samplin]\ntemperature = 1.0", "learner.samplin: unknown key, did you mean sampling?"),
    ("[learner]\nnum_steps = 0", "learner.num_steps = 0: must be greater than or equal to 1"),
    ('[learner]\nnum_steps = "5"', 'learner.num_steps = "5": must be a valid integer'),
    ("[learner]\nnum_steps = 2.5", "learner.num_steps = 2.5: must be a valid integer"),
    ("[learner]\nnum_steps = true", "learner.num_steps = true: must be a valid integer"),
    ("[learner]\ngradient_checkpointing = 1", "learner.gradient_checkpointing = 1: must be a valid boolean"),
    ('[learner]\nadvantage = "ppo"', "learner.advantage = \"ppo\": must be 'grpo'"),
    ("[learner]\nimportance_cap = 1.0", "learner: importance_cap = 1.0: must be at least 1 + clip_high = 1.2"),
    ("learner = 3", "learner: must be a table, as in [learner]"),
    ("[data]\nsource = 2024-01-01", "2024-01-01: a date or time is not used in run files; put it in quotes"),
    (
        "[data]\nnum_train = -1\nnum_held_out = -1",
        "data.num_train = -1: must be greater than or equal to 0 (and 1 more)",
    ),
    ("[run]\nname = 'a/b'", 'run.name = "a/b": must match pattern'),
    ("[learner", "is no TOML: "),
]


@pytest.mark.parametrize(("text", "line"), MISTAKES_IN_FILE)
def test_a_mistake_in_the_file_is_one_line_that_names_the_place(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(UserError) as caught:
        load_run_file(path, {})

    assert str(caught.value).startswith(f"{path}: {line}")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match=r"^nowhere.toml: No such file or directory; name a run file"):
        load_run_file(Path("nowhere.toml"), {})


@pytest.mark.parametrize(
    ("key", "text", "line"),
    [
        ("learner.num_step", "3", "--learner.num_step: unknown key, did you mean num_steps?"),
        ("learnr.num_steps", "3", "--learnr.num_steps: unknown key, did you mean learner?"),
        ("learner.sampling", "3", "--learner.sampling: is a table; set one of its keys, as in"),
        ("learner.num_steps", "many", 'command line: learner.num_steps = "many": must be a valid integer'),
        ("learner.num_steps", "-1", "command line: learner.num_steps = -1: must be greater than or equal to 1"),
    ],
)
def test_a_mistake_in_an_override_is_one_line_that_names_it(key: str, text: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        load_run_file(None, {key: text})

    assert str(caught.value).startswith(line)


def test_overrides_are_typed_by_the_settings() -> None:
    config = load_run_file(
        None,
        {
            "learner.num_steps": "20",
            "learner.sampling.temperature": "0.7",
            "learner.learning_rate": "2",
            "learner.betas": "[0.5, 0.6]",
            "learner.gradient_checkpointing": "true",
            "learner.dtype": "bf16",
            "run.name": "2024",
        },
    )

    assert config.learner.num_steps == 20
    assert config.learner.sampling.temperature == 0.7
    assert config.learner.learning_rate == 2.0
    assert config.learner.betas == (0.5, 0.6)
    assert config.learner.gradient_checkpointing is True
    assert config.learner.dtype == "bf16"
    assert config.run.name == "2024"


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[learner]\nnum_steps = 3\nprompts_per_step = 4\n", encoding="utf-8")

    config = load_run_file(path, {"learner.num_steps": "5"})

    assert (config.learner.num_steps, config.learner.prompts_per_step) == (5, 4)


def test_only_options_with_a_dot_are_overrides() -> None:
    rest, overrides = split_overrides(["train", "--a.b", "1", "x.toml", "--dry-run", "--c.d.e=f=g", "--a.b", "-2"])

    assert rest == ["train", "x.toml", "--dry-run"]
    assert overrides == {"a.b": "-2", "c.d.e": "f=g"}


@pytest.mark.parametrize("arguments", [["--a.b"], ["--a.b", "--c.d", "1"]])
def test_an_override_without_a_value_is_refused(arguments: list[str]) -> None:
    with pytest.raises(UserError, match=r"--a\.b: needs a value"):
        split_overrides(arguments)


@settings(max_examples=30, deadline=None)
@given(
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True),
    folder=_TEXTS,
    learning_rate=st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False),
    num_steps=st.integers(min_value=1, max_value=1 << 62),
    gradient_checkpointing=st.booleans(),
    betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
)
def test_a_written_run_file_loads_back_equal(
    name: str,
    folder: str,
    learning_rate: float,
    num_steps: int,
    gradient_checkpointing: bool,
    betas: tuple[float, float],
) -> None:
    tree = {
        "run": {"name": name, "folder": folder},
        "learner": {
            "learning_rate": learning_rate,
            "num_steps": num_steps,
            "gradient_checkpointing": gradient_checkpointing,
            "betas": betas,
        },
    }
    config = check_settings(tree, model=RunConfig, source="test")

    again = check_settings(tomllib.loads(dump_toml(config)), model=RunConfig, source="test")

    assert again == config


_PLAIN = st.one_of(_TEXTS, st.integers(-(1 << 63), (1 << 63) - 1), st.floats(allow_nan=False), st.booleans())
_TREES = st.recursive(
    st.dictionaries(_TEXTS, st.one_of(_PLAIN, st.lists(_PLAIN))),
    lambda inner: st.dictionaries(_TEXTS, st.one_of(inner, st.lists(inner))),
    max_leaves=8,
)


@settings(max_examples=30, deadline=None)
@given(tree=_TREES)
def test_any_tree_of_toml_values_survives_writing(tree: dict[str, object]) -> None:
    assert tomllib.loads(write_toml(tree)) == tree  # type: ignore[arg-type]
