"""What to install where a command meets a package that is not: the extras of pyproject.toml, by what needs them."""

from collections.abc import Sequence

_EXTRAS = {
    "serve rollout": "rollout-cpu or rollout-gpu",
    "serve learner": "learner",
    "serve reward": "reward",
    "train": "deploy (cpu or gpu, where this machine makes the tiny model or runs services)",
    "model": "cpu or gpu",
    "data": "deploy",
}
_PACKAGES = frozenset(
    {
        "accelerate",
        "datasets",
        "deepspeed",
        "gguf",
        "huggingface_hub",
        "jaxtyping",
        "jinja2",
        "math_verify",
        "matplotlib",
        "numpy",
        "psutil",
        "pyarrow",
        "ray",
        "rich",
        "safetensors",
        "tokenizers",
        "torch",
        "transformers",
        "vllm",
    }
)
"""What the extras bring; any other module that is missing is a mistake of ours or of a package's."""


def missing_extra(error: ModuleNotFoundError, arguments: Sequence[str]) -> str | None:
    """Says in one line which extra brings the package that a command did not find.

    Args:
        error: What its import ended with.
        arguments: The command, as in `serve reward run.toml`.

    Returns:
        The line; None where no extra brings it.
    """
    package = (error.name or "").partition(".")[0]
    words = [argument for argument in arguments if not argument.startswith("-")]
    for command in (" ".join(words[:2]), " ".join(words[:1])):
        if package in _PACKAGES and command in _EXTRAS:
            return f"{command}: {package} is not installed: install the extra {_EXTRAS[command]}; see docs/install.md"
    return None
