"""The environment of a rank is complete; errors of invalid pods name field and value."""

import json

import pytest
from flyer.job.pod import PodSpec, PodSpecError, agent_environment, log_name, rank_environment

SPEC = PodSpec(
    job="gpt",
    namespace="team",
    chain="c1",
    attempt=3,
    node="b0",
    zone="B",
    node_rank=2,
    nodes=4,
    ranks_per_node=2,
    master_addr="10.0.0.1",
    master_port=29400,
    command=["python", "train.py"],
    env={"LR": "0.1", "RANK": "99", "OMP_NUM_THREADS": "4"},
    topology_path="/run/topology.json",
    socket_path="/run/job.sock",
    log_dir="/logs",
    run_dir="/run/pod",
)


def test_a_rank_has_the_variables_of_torchrun_pet_and_flyer():
    assert rank_environment(SPEC, 1) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "4",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "8",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29400",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "c1",
        "PET_NNODES": "4",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "2",
        "PET_MASTER_ADDR": "10.0.0.1",
        "PET_MASTER_PORT": "29400",
        "FLYER_JOB": "team/gpt",
        "FLYER_CHAIN": "c1",
        "FLYER_ATTEMPT": "3",
        "FLYER_ZONE": "B",
        "FLYER_TOPOLOGY": "/run/topology.json",
        "FLYER_SOCKET": "/run/job.sock",
        "OMP_NUM_THREADS": "4",
        "MKL_NUM_THREADS": "4",
        "OPENBLAS_NUM_THREADS": "4",
        "PYTHONUNBUFFERED": "1",
        "LR": "0.1",
    }


def test_a_bare_torchrun_gets_no_rank():
    assert "WORLD_SIZE" not in agent_environment(SPEC)
    assert agent_environment(SPEC)["PET_NPROC_PER_NODE"] == "2"


def test_a_pod_survives_a_round_trip_through_json():
    assert PodSpec.from_json(SPEC.to_json()) == SPEC
    assert log_name(5) == "rank-0005.log"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"node_rank": 4}, r"`node_rank` is 4, not from 0 to 3"),
        ({"nodes": 0}, "`nodes` is 0"),
        ({"nodes": "4"}, "`nodes` is '4', not int"),
        ({"ranks_per_node": True}, "`ranks_per_node` is True"),
        ({"master_port": 70000}, "70000"),
        ({"command": []}, "`command` is empty"),
        ({"command": "python"}, "`command` is 'python'"),
        ({"args": ["a\0b"]}, "`args`"),
        ({"env": {"A": 1}}, "`env`"),
        ({"env": {"A=B": "1"}}, "`env`"),
        ({"mood": "fine"}, "unknown field `mood`"),
    ],
)
def test_the_error_of_an_invalid_pod_names_field_and_value(change, named):
    body = {**json.loads(SPEC.to_json()), **change}
    with pytest.raises(PodSpecError, match=named):
        PodSpec.from_object(body)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"job": "x"}', "[" * 100_000])
def test_invalid_json_is_refused(text):
    with pytest.raises(PodSpecError):
        PodSpec.from_json(text)
