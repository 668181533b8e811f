"""The mistakes: what is wrong, and the command that a user would give."""

import re
from collections.abc import Callable

from tests.mistakes.workspace import Workspace, cut, replace, set_config

Command = Callable[[Workspace], list[str]]

_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n"
_NO_ANSWERS = "".join(f'{{"question": "{n}?", "answer": ""}}\n' for n in range(8))


def _offline_hub(space: Workspace, *arguments: str) -> list[str]:
    address = f"http://127.0.0.1:{space.free_port()}"
    space.environment = {"HF_ENDPOINT": address, "HF_HOME": str(space.folder / "hub")}
    return space.train(*arguments)


def _hub(space: Workspace, *arguments: str) -> list[str]:
    space.environment = {"HF_ENDPOINT": space.hub, "HF_HOME": str(space.folder / "hub")}
    return space.train(*arguments)


def _data(space: Workspace, content: str, *arguments: str) -> list[str]:
    return space.train("--data.source", space.data(content), "--data.num_held_out", "2", *arguments)


def _taken_folder(space: Workspace, kind: str) -> list[str]:
    return ["model", kind, str(space.file("taken/file", "").parent)]


def _resume(space: Workspace, *arguments: str) -> list[str]:
    run = space.file("runs/run-20260101-000000/config.toml", "").parent
    return ["train", "--resume", str(run), *arguments]


SETTINGS: dict[str, Command] = {
    "a misspelt key": lambda s: s.train(content="[learner]\nnum_step = 3\n"),
    "a misspelt key on the command line": lambda s: s.train("--learner.learning_rte", "1e-4"),
    "a key in the wrong table": lambda s: s.train(content="[rollout]\nnum_steps = 3\n"),
    "a table that there is not": lambda s: s.train(content="[learning]\nnum_steps = 3\n"),
    "text for a number": lambda s: s.train(content='[learner]\nnum_steps = "five"\n'),
    "a number out of bounds": lambda s: s.train("--learner.num_steps", "0"),
    "a choice that there is not": lambda s: s.train("--learner.dtype", "fp8"),
    "values that contradict each other": lambda s: s.train("--learner.clip_high", "1.5"),
    "an override without a value": lambda s: s.train("--learner.num_steps"),
    "a table where a value belongs": lambda s: s.train("--learner.sampling", "5"),
    "no run file": lambda s: ["train", str(s.folder / "none.toml")],
    "a run file that is no TOML": lambda s: s.train(content="learner: {}\n"),
}
MODELS: dict[str, Command] = {
    "a model folder that there is not": lambda s: s.train("--model.source", str(s.folder / "none")),
    "a folder that is no model": lambda s: s.train("--model.source", str(s.folder)),
    "no weights": lambda s: s.train("--model.source", s.model(lambda f: (f / "model.safetensors").unlink())),
    "weights in another format": lambda s: s.train(
        "--model.source", s.model(lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"))
    ),
    "weights cut short": lambda s: s.train("--model.source", s.model(cut("model.safetensors", 100))),
    "a Git LFS pointer for weights": lambda s: s.train(
        "--model.source", s.model(replace("model.safetensors", _POINTER))
    ),
    "no fast tokenizer": lambda s: s.train("--model.source", s.model(lambda f: (f / "tokenizer.json").unlink())),
    "a quantised model": lambda s: s.train(
        "--model.source", s.model(set_config(quantization_config={"quant_method": "awq"}))
    ),
    "a model that is no language model": lambda s: s.train(
        "--model.source", s.model(set_config(architectures=["BertModel"]))
    ),
    "a context longer than the model's": lambda s: s.train(
        "--model.source", s.model(), "--rollout.context_length", "100000"
    ),
    "a revision of a folder": lambda s: s.train("--model.source", s.model(), "--model.revision", "main"),
    "a model that the hub has not": lambda s: _hub(s, "--model.source", "org/none"),
    "a gated model": lambda s: _hub(s, "--model.source", "org/gated"),
    "a revision that the hub has not": lambda s: _hub(s, "--model.source", "org/model", "--model.revision", "v9"),
    "no network, and the model not in the cache": lambda s: _offline_hub(s, "--model.source", "org/model"),
    "a folder for the model that is not empty": lambda s: _taken_folder(s, "smollm2"),
    "too little memory": lambda s: s.train(
        "--model.source", s.model(set_config(hidden_size=65536, intermediate_size=262144, num_hidden_layers=90))
    ),
}
DATA: dict[str, Command] = {
    "a data file that there is not": lambda s: s.train("--data.source", str(s.folder / "none.jsonl")),
    "a line that is no JSON": lambda s: _data(s, '{"question": "1?", "answer": "1"}\n{"question": \n'),
    "a file without the column": lambda s: _data(s, '{"text": "1?", "answer": "1"}\n' * 4),
    "a column that the file has not": lambda s: _data(
        s, '{"question": "1?", "answer": "1"}\n' * 4, "--data.answer_column", "gold"
    ),
    "rows without answers": lambda s: _data(s, _NO_ANSWERS),
    "fewer problems than are held out": lambda s: s.train("--data.source", s.data(), "--data.num_held_out", "40"),
    "an empty file": lambda s: _data(s, ""),
    "a template that there is not": lambda s: s.train("--data.template", "boxd"),
    "a template without the question": lambda s: s.train(
        "--data.template", str(s.file("template.toml", 'text = "Answer!"'))
    ),
    "a misspelt source": lambda s: s.train("--data.source", "arithmetics"),
}
SERVICES: dict[str, Command] = {
    "no host:port for the cluster": lambda s: s.train("--ray.address", "localhost"),
    "nothing at the address of the cluster": lambda s: s.train("--ray.address", f"127.0.0.1:{s.free_port()}"),
    "a port in use": lambda s: ["serve", "reward", "--reward.listen.port", s.taken_port(), "--reward.num_workers", "1"],
    "off loopback without a token": lambda s: [
        *("serve", "reward", "--reward.listen.host", "0.0.0.0"),
        *("--reward.num_workers", "1"),
    ],
    "a rollout server without a model": lambda s: ["serve", "rollout"],
    "a learner without a run folder": lambda s: ["serve", "learner"],
}
RUNS: dict[str, Command] = {
    "no run to go on with": lambda s: ["train", "--resume", str(s.folder / "none")],
    "a run file and a run to go on with": lambda s: ["train", s.run_file(), "--resume", "latest"],
    "another seed in the middle of a run": lambda s: _resume(s, "--run.seed", "2"),
    "a run folder that cannot be made": lambda s: s.train("--run.folder", str(s.file("file", ""))),
    "no ledger to verify": lambda s: ["ledger", "verify", str(s.folder)],
    "a ledger that is none": lambda s: ["ledger", "verify", str(s.file("run/ledger.sqlite", "none").parent)],
}
WHERE_PARTS_MEET = {
    "a rollout server with another tokenizer than the learner": (
        "tandem: learner_address = ADDRESS: the server is not taken in: "
        "tokenizer_fingerprint: the learner has OURS, ADDRESS has THEIRS"
    ),
    "a Ray of somebody else": "tandem: ray.address = ADDRESS: no Ray cluster can be joined there: REASON; "
    "leave it empty for a local Ray",
    "a disk that is full": "tandem: too little room on the disk of FOLDER/runs: REASON: free some, set run.folder to "
    "another disk, or lower learner.checkpoints_kept",
}
"""Said when real services meet; tests/end_to_end/test_foreign_parts.py and tests/deploy/test_disk.py make them."""
_PLACEHOLDERS = {"ADDRESS": r"[\d.]+:\d+", "OURS": r"\w+", "THEIRS": r"\w+", "FOLDER": ".+", "REASON": ".+"}


def is_where_parts_meet(what: str, line: str) -> bool:
    """Whether a line is the one that the page has, whatever its placeholders stand for."""
    pattern = re.escape(WHERE_PARTS_MEET[what])
    for placeholder, meaning in _PLACEHOLDERS.items():
        pattern = pattern.replace(placeholder, meaning)
    return re.fullmatch(pattern, line) is not None


CASES = {
    "The run file and the command line": SETTINGS,
    "Models": MODELS,
    "Data": DATA,
    "Services": SERVICES,
    "Runs": RUNS,
}
