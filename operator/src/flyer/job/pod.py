"""Pod: the part of a job's attempt that one node runs, as a value with a JSON form.

Defines the environment of a rank. Pure: reads neither the environment nor the file system.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from flyer.job.key_file import KEY_FILE_VARIABLE

__all__ = [
    "EXIT_PEER_LOST",
    "EXIT_SUSPENDED",
    "PodSpec",
    "PodSpecError",
    "agent_environment",
    "log_name",
    "rank_environment",
]

EXIT_SUSPENDED = 104
"""Exit status of a rank after `release`: it released its node and did not fail."""

EXIT_PEER_LOST = 75
"""Exit status of a rank that failed because a peer did: the job is restarted."""

# One thread per rank by default: many ranks share the cores of a node.
THREAD_COUNT_NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class PodSpecError(ValueError):
    """An invalid pod: the text names the field, its value and the expected one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSpec:
    """One node's part of a gang.

    `log_dir` receives `rank-NNNN.log` (raw output, appended); `run_dir` belongs to this pod of this
    attempt alone: `pids.json`, `failure.json` and `launcher.log` appear in it.
    """

    job: str
    namespace: str = "default"
    chain: str = ""
    attempt: int = 1
    node: str
    zone: str = ""
    node_rank: int = 0
    nodes: int = 1
    ranks_per_node: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int
    command: list[str]
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    working_dir: str | None = None
    topology_path: str | None = None
    socket_path: str | None = None
    key_path: str | None = None
    """File with the key of the job's collectives; a HFREDUCE_KEY_FILE in `env` has priority."""
    log_dir: str
    run_dir: str
    stop_grace_seconds: float = 30.0
    """Time from a forwarded SIGTERM to SIGKILL."""

    def __post_init__(self) -> None:
        """Validate the fields."""
        _check(self)

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole gang."""
        return self.nodes * self.ranks_per_node

    @property
    def first_rank(self) -> int:
        """The lowest global rank on this node."""
        return self.node_rank * self.ranks_per_node

    def to_json(self) -> str:
        """The pod as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> PodSpec:
        """Parse the output of `to_json`. Raises PodSpecError."""
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PodSpecError(f"not a JSON object: {text[:60]!r}") from error
        if not isinstance(body, dict):
            raise PodSpecError(f"not a JSON object: {text[:60]!r}")
        return cls.from_object(body)

    @classmethod
    def from_object(cls, body: dict[str, Any]) -> PodSpec:
        """Build the pod from a parsed JSON object. Raises PodSpecError."""
        known_fields = {spec_field.name for spec_field in fields(cls)}
        if unknown := sorted(set(body) - known_fields):
            raise PodSpecError(
                f"unknown field `{unknown[0]}`; known fields: {', '.join(sorted(known_fields))}"
            )
        try:
            return cls(**body)
        except TypeError as error:
            raise PodSpecError(f"a field is missing: {error}") from error


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "str | None": (str, type(None)),
    "list[str]": (list,),
    "dict[str, str]": (dict,),
}


def _check(spec: PodSpec) -> None:
    for spec_field in fields(spec):
        value = getattr(spec, spec_field.name)
        if not isinstance(value, _KINDS[str(spec_field.type)]) or isinstance(value, bool):
            raise PodSpecError(f"`{spec_field.name}` is {value!r:.80}, not {spec_field.type}")
    for name in ("command", "args"):
        for word in getattr(spec, name):
            if not isinstance(word, str) or "\0" in word:
                raise PodSpecError(f"`{name}` holds {word!r:.80}, not a string without NUL")
    env: dict[Any, Any] = spec.env
    for key, value in env.items():
        words = (key, value)
        if not all(isinstance(word, str) and "\0" not in word for word in words) or "=" in key:
            raise PodSpecError(f"`env` holds {key!r:.80}: {value!r:.80}, not a name and a string")
    bounds = {
        "attempt": (0, 2**31),
        "nodes": (1, 2**20),
        "node_rank": (0, spec.nodes - 1),
        "ranks_per_node": (1, 1024),
        "master_port": (1, 65535),
        "stop_grace_seconds": (0, 86400),
    }
    for name, (low, high) in bounds.items():
        if not low <= getattr(spec, name) <= high:
            raise PodSpecError(f"`{name}` is {getattr(spec, name)}, not from {low} to {high}")
    if not spec.command:
        raise PodSpecError("`command` is empty: it must name a program")


def log_name(rank: int) -> str:
    """The file of a rank's raw output inside `log_dir`."""
    return f"rank-{rank:04d}.log"


def rank_environment(spec: PodSpec, local_rank: int) -> dict[str, str]:
    """The variables that are added to a rank's inherited environment.

    torchrun's names, so that scripts for torchrun run unchanged; PET_* for a bare `torchrun`;
    FLYER_* for Fire-Flyer. The user's `env` may set anything except a rank's identity.
    """
    identity = {
        "RANK": spec.first_rank + local_rank,
        "WORLD_SIZE": spec.world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": spec.ranks_per_node,
        "GROUP_RANK": spec.node_rank,
        "GROUP_WORLD_SIZE": spec.nodes,
        "ROLE_RANK": spec.first_rank + local_rank,
        "ROLE_WORLD_SIZE": spec.world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": spec.master_addr,
        "MASTER_PORT": spec.master_port,
        "TORCHELASTIC_RESTART_COUNT": max(spec.attempt - 1, 0),
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": spec.chain or spec.job,
        **pod_environment(spec),
    }
    return {**_defaults(spec), **spec.env, **{name: str(value) for name, value in identity.items()}}


def agent_environment(spec: PodSpec) -> dict[str, str]:
    """The environment of a command that starts the ranks of its node itself (a bare torchrun)."""
    identity = {name: str(value) for name, value in pod_environment(spec).items()}
    return {**_defaults(spec), **spec.env, **identity}


def pod_environment(spec: PodSpec) -> dict[str, str | int]:
    """The variables that all ranks of a pod share."""
    variables: dict[str, str | int] = {
        "PET_NNODES": spec.nodes,
        "PET_NPROC_PER_NODE": spec.ranks_per_node,
        "PET_NODE_RANK": spec.node_rank,
        "PET_MASTER_ADDR": spec.master_addr,
        "PET_MASTER_PORT": spec.master_port,
        "FLYER_JOB": f"{spec.namespace}/{spec.job}",
        "FLYER_CHAIN": spec.chain,
        "FLYER_ATTEMPT": spec.attempt,
        "FLYER_ZONE": spec.zone,
    }
    if spec.topology_path is not None:
        variables["FLYER_TOPOLOGY"] = spec.topology_path
    if spec.socket_path is not None:
        variables["FLYER_SOCKET"] = spec.socket_path
    return variables


def _defaults(spec: PodSpec) -> dict[str, str]:
    threads = spec.env.get("OMP_NUM_THREADS", "1")
    key = {} if spec.key_path is None else {KEY_FILE_VARIABLE: spec.key_path}
    return {**dict.fromkeys(THREAD_COUNT_NAMES, threads), "PYTHONUNBUFFERED": "1", **key}
