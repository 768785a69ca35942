"""The sources of rank and world size, and the values that are refused."""

from __future__ import annotations

import json

import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders.order.ranks import rank_and_world_size

STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8"}
CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"], "evaluator": ["e:1"]}


def tf_config(kind, index, cluster=CLUSTER):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_alone_by_default():
    assert rank_and_world_size(environ={}) == (0, 1)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        (STEP, (5, 8)),
        (STEP | {"SLURM_STEP_NUM_TASKS": "6"}, (5, 6)),
        (STEP | {"RANK": "0", "WORLD_SIZE": "2"}, (0, 2)),
        (tf_config("chief", 0), (0, 3)),
        (tf_config("worker", 1), (2, 3)),
        (tf_config("worker", 1, {"worker": ["b:1", "c:1"]}), (1, 2)),
        (tf_config("evaluator", 0), (0, 1)),
        (tf_config("worker", 0, {}), (0, 1)),
        ({"TF_CONFIG": ""}, (0, 1)),
        ({"TF_CONFIG": "{}"}, (0, 1)),
    ],
)
def test_every_launcher_is_understood(environ, expected):
    assert rank_and_world_size(environ=environ) == expected


def test_explicit_values_come_before_the_environment():
    assert rank_and_world_size(1, 2, environ={"RANK": "3", "WORLD_SIZE": "4"}) == (1, 2)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_NTASKS": "8"},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        STEP | {"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
        STEP | {"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"},
    ],
    ids=["salloc", "batch script", "interactive step", "batch step"],
)
def test_one_process_in_an_allocation_of_many_tasks_is_alone(environ):
    assert rank_and_world_size(environ=environ) == (0, 1)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be from 0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE must be at least 1"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number, not 'two'"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not"),
        ({"SLURM_STEP_ID": "1", "SLURM_PROCID": "0"}, "SLURM_NTASKS is not"),
        ({"TF_CONFIG": "{"}, "TF_CONFIG"),
        ({"TF_CONFIG": "[]"}, "TF_CONFIG"),
        ({"TF_CONFIG": '{"cluster": {"worker": 3}}'}, "TF_CONFIG"),
        (tf_config("worker", 2), "TF_CONFIG has the task worker 2 in a cluster of 2"),
        (tf_config("worker", "1"), "TF_CONFIG"),
        (tf_config("ps", 0), "TF_CONFIG has the task type 'ps'"),
        (tf_config(None, 0), "TF_CONFIG"),
    ],
)
def test_a_half_given_or_senseless_value_names_its_variable(environ, named):
    with pytest.raises(UsageError, match=named):
        rank_and_world_size(environ=environ)


@pytest.mark.parametrize(("rank", "world_size"), [(0, None), (None, 2), (2, 2), (-1, 2), (0, 0)])
def test_senseless_arguments_are_refused(rank, world_size):
    with pytest.raises(UsageError, match=r"rank|world_size"):
        rank_and_world_size(rank, world_size, environ={"RANK": "0", "WORLD_SIZE": "2"})
