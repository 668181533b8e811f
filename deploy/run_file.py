"""A run file: every setting of a run in one TOML file, overridden on the command line."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from deploy.data_config import DataSection
from deploy.errors import UserError
from deploy.mistakes import check_settings
from deploy.overrides import apply_overrides
from deploy.toml_writer import write_toml
from evaluation.config import EvaluationSettings
from learner.config import LearnerSettings
from reward_service.config import RewardSettings
from rollout_server.config import RolloutSettings
from runtime.settings import Settings


class RunSection(Settings):
    """What the run is called and where its folder lies."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=80)] = "run"
    """The run folder is called after it and the time: `<name>-<UTC time>`."""
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 1
    """Decides problems, prompt order, sampling and the tiny model; the same seed begins the same run."""
    folder: str = "runs"
    """Where run folders are made."""


class ModelSection(Settings):
    """Where the policy that is trained comes from."""

    source: str = "tiny"
    """`tiny` for the small model made on the spot, a folder as transformers saves it, or a hub's `org/name`."""
    revision: str = ""
    """Branch, tag or commit of a model on a hub; empty for its main branch."""
    cache_folder: str = "~/.cache/tandem"
    """Where the tiny model is kept for the next run."""


class RolloutSection(RolloutSettings):
    """The rollout servers, all alike."""

    model: str = ""
    """Model folder; in a run it is filled in from [model]."""
    num_servers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Rollout servers."""


class RewardSection(RewardSettings):
    """The reward services, all alike."""

    num_servers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Reward services."""


class RaySection(Settings):
    """The Ray cluster that places the services."""

    address: str = ""
    """Cluster to join, host:port; empty for a local Ray of the run's own. RAY_ADDRESS is not looked at."""
    namespace: str = "tandem"
    """Ray namespace of the services."""
    num_cpus: Annotated[int, Field(ge=0)] = 0
    """Cores that a local Ray hands out; 0 for all of the machine."""
    object_store_bytes: Annotated[int, Field(ge=80_000_000)] = 128 << 20
    """Shared memory of a local Ray; samples and weights never go through it."""


class ServicesSection(Settings):
    """How services are started, watched and stopped."""

    start_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 300.0
    """How long a service may take until it serves."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """How often a rollout server or reward service that died is started again."""


class RunConfig(Settings):
    """Every setting of a run."""

    run: RunSection = RunSection()
    """Name, seed and folder."""
    model: ModelSection = ModelSection()
    """The policy that is trained."""
    data: DataSection = DataSection()
    """The problems."""
    learner: LearnerSettings = LearnerSettings()
    """The learner."""
    rollout: RolloutSection = RolloutSection()
    """The rollout servers."""
    reward: RewardSection = RewardSection()
    """The reward services."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """Held-out accuracy."""
    services: ServicesSection = ServicesSection()
    """Start and restart of services."""
    ray: RaySection = RaySection()
    """The Ray cluster."""


def load_run_file(path: Path | None, overrides: Mapping[str, str]) -> RunConfig:
    """Reads a run file and sets the overrides.

    Args:
        path: TOML file; None for the defaults.
        overrides: Text by dotted key, e.g. `{"learner.num_steps": "20"}`.

    Raises:
        UserError: The file cannot be read, or a key or value in it or in the overrides is wrong; one line.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; name a run file, such as deploy/runs/tiny.toml") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: is no TOML: {error}; see docs/run_file.md") from error
        check_settings(tree, model=RunConfig, source=str(path))
    tree = apply_overrides(tree, overrides, model=RunConfig)
    return check_settings(tree, model=RunConfig, source="command line")


def dump_toml(config: RunConfig) -> str:
    """The run file that loads back to an equal config."""
    return write_toml(config.model_dump(mode="json"))
