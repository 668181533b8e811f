"""Resolves models in a process of its own, as huggingface_hub reads its environment once: `SOURCE[@REVISION]...`."""

import sys

from deploy.errors import UserError
from deploy.model_source import resolve_model
from deploy.run_file import ModelSection

if __name__ == "__main__":
    for argument in sys.argv[1:]:
        source, _, revision = argument.partition("@")
        try:
            line = str(resolve_model(ModelSection(source=source, revision=revision), seed=1))
        except UserError as error:
            line = f"UserError: {error}"
        sys.stdout.write(f"{line}\n")
