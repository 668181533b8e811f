"""A Ray cluster for the time of one command: a local one of its own, or the one that the settings name."""

import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from deploy.errors import UserError
from deploy.placement import ClusterFacts
from deploy.run_file import RaySection

# A Unix socket's path has at most 107 characters, and Ray appends about 65 to its folder.
_LONGEST_TEMPORARY_FOLDER = 30
_CONNECT_SECONDS = 5.0


@contextmanager
def ray_cluster(settings: RaySection) -> Iterator[ClusterFacts]:
    """Starts or joins Ray, and leaves it at the end; a local one ends with it, and its files are removed.

    Call it on the main thread: Ray's processes get a death signal when the thread that started them ends.

    Raises:
        UserError: The cluster at `settings.address` cannot be joined, or a local Ray does not start.
    """
    if settings.address:
        check_address(settings)
        # One try of some 40 s; Ray makes 20 by default.
        with _environment({"RAY_USAGE_STATS_ENABLED": "0", "RAY_gcs_server_port_wait_time_s": "1"}):
            yield from _joined(settings)
        return
    folder = Path(tempfile.mkdtemp(prefix="td-", dir=_short_temporary_folder()))
    # With a token of its own, nobody else on the machine can use this Ray, and ~/.ray/auth_token, which would change
    # how later `ray start` commands of the user behave, is neither made nor needed.
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _token()}
    try:
        with _environment(own, without=("RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH", "RAY_NAMESPACE")):
            yield from _started(settings, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_address(settings: RaySection) -> None:
    """Looks whether anything listens at the address of the cluster; Ray itself finds out only after minutes.

    Raises:
        UserError: The address is no host:port, or nothing listens there.
    """
    host, _, port = settings.address.rpartition(":")
    if not settings.address:
        return
    if not host or not port.isdecimal():
        raise UserError(f"ray.address = {settings.address}: must be host:port")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(_no_cluster(settings, error)) from error


def _no_cluster(settings: RaySection, error: Exception) -> str:
    return (
        f"ray.address = {settings.address}: no Ray cluster can be joined there: {_first_line(error)}; "
        "leave it empty for a local Ray"
    )


def _started(settings: RaySection, folder: Path) -> Iterator[ClusterFacts]:
    import ray
    from ray._raylet import AuthenticationTokenLoader, Config

    # Ray reads its variables when it is imported, and that may have been before ours were set.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        try:
            ray.init(
                address="local",
                num_cpus=settings.num_cpus or None,
                namespace=settings.namespace,
                object_store_memory=settings.object_store_bytes,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(folder),
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"a local Ray does not start: {_first_line(error)}") from error
        yield _facts()
    finally:
        ray.shutdown()


def _joined(settings: RaySection) -> Iterator[ClusterFacts]:
    import ray

    try:
        try:
            ray.init(
                address=settings.address,
                namespace=settings.namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(_no_cluster(settings, error)) from error
        yield _facts()
    finally:
        ray.shutdown()


def _facts() -> ClusterFacts:
    import ray

    resources = ray.cluster_resources()
    return ClusterFacts(num_cpus=resources.get("CPU", 0.0), num_gpus=resources.get("GPU", 0.0))


@cache
def _token() -> str:
    # One for the whole process: Ray reads the token once and keeps it.
    return secrets.token_hex(32)


def _short_temporary_folder() -> str:
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _LONGEST_TEMPORARY_FOLDER else "/tmp"  # noqa: S108 - mkdtemp makes it private


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextmanager
def _environment(changes: Mapping[str, str], *, without: tuple[str, ...] = ()) -> Iterator[None]:
    """Sets and removes variables, which Ray hands on to its processes, and puts the old ones back."""
    before = {name: os.environ.get(name) for name in (*changes, *without)}
    os.environ.update(changes)
    for name in without:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
