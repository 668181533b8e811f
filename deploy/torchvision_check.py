"""The torchvision that pip brings along with vLLM, and that does not fit the torch that is installed."""

import importlib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from deploy.errors import UserError

CURE = "pip uninstall -y torchvision torchaudio torchcodec"


def check_torchvision() -> None:
    """Imports torchvision where there is one, before transformers and vLLM do.

    vLLM names torchvision, torchaudio and torchcodec, and pip may choose some that were built for another torch. Then
    transformers imports torchvision, and vLLM and the learner end with `operator torchvision::nms does not exist`.

    Raises:
        UserError: It cannot be imported; says how to be rid of it, as no text model needs it.
    """
    if find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"torchvision {_version('torchvision')} is built for another torch than {_version('torch')} ({reason}): "
            f"run `{CURE}`; tandem needs none of them"
        ) from error


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(unknown)"
