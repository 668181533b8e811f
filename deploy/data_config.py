"""Settings of what is trained on and what accuracy is measured on."""

from typing import Annotated

from pydantic import Field

from runtime.problems.forms import AnswerForm
from runtime.settings import Settings


class DataSection(Settings):
    """What is trained on, and what accuracy is measured on."""

    source: str = "arithmetic"
    """`arithmetic` for seeded problems in words, a JSONL, JSON or Parquet file, or a dataset of the Hub (org/name)."""
    subset: str = ""
    """Of a dataset of the Hub: its configuration, such as "main" of openai/gsm8k; empty for its only one."""
    split: str = "train"
    """Of a dataset of the Hub: its split."""
    revision: str = ""
    """Of a dataset of the Hub: branch, tag or commit; empty for the newest."""
    question_column: str = ""
    """Column of the question; empty for the first there is of question, problem, prompt."""
    answer_column: str = ""
    """Column of the reference answer; empty for the first there is of answer, final_answer, ground_truth, solution."""
    kind_column: str = ""
    """What accuracy is broken down by; empty for the first of kind, level, difficulty, subject, type, source with at
    most 20 values."""
    id_column: str = ""
    """Column of distinct ids; empty for the first there is of id, problem_id, unique_id, or else row numbers."""
    answer_form: AnswerForm = "auto"
    r"""Where the answer stands: `gsm8k` after the last `####`, `boxed` in the last `\boxed{}`, `plain` all of the
    column, `auto` whichever of these a row shows."""
    template: str = "none"
    """What stands around the question: `none`, `simple`, `boxed`, `chat`, or a TOML file (see docs/your_data.md)."""
    num_train: Annotated[int, Field(ge=0)] = 4096
    """Problems to train on, the first ones; of a file or dataset at most this many, 0 for all."""
    num_held_out: Annotated[int, Field(ge=0)] = 256
    """Problems that are never trained on, for the accuracy; drawn by the run's seed, or the first ones of
    `held_out_source`."""
    held_out_source: str = ""
    """A file or dataset for the held-out problems alone, of which none is trained on; empty to take them out of
    `source`. Columns named above that it lacks are looked for by their usual names."""
    held_out_subset: str = ""
    """Of a dataset of the Hub as `held_out_source`: its configuration."""
    held_out_split: str = ""
    """Of a dataset of the Hub: the split of the held-out problems. Of `held_out_source`, empty for "test"; without
    `held_out_source`, a split of `source`, or empty to draw them from the split that is trained on."""
