"""The API server in memory responds as the real one: both run the same cases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from flyer.api.manifest import RENAMED_FIELDS
from flyer.kube.apiserver import Access, Api

from fakekube import ApiServer

from . import test_policies as policies
from . import test_rules as real
from .memory_server import MemoryCluster
from .shape_cases import SHAPES, Shape

if TYPE_CHECKING:
    from .rule_cases import Case


@pytest.mark.parametrize("case", real.RULES, ids=[case.name for case in real.RULES])
async def test_a_rule_refuses_with_a_reason(case: Case, memory_api: Api) -> None:
    await real.test_a_rule_refuses_with_a_reason(case, memory_api)


@pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])
async def test_the_error_of_a_wrong_shape_names_the_field(shape: Shape, memory_api: Api) -> None:
    await real.test_the_error_of_another_shape_names_the_field(shape, memory_api)


@pytest.mark.parametrize("field", RENAMED_FIELDS)
async def test_strict_validation_refuses_the_old_name_of_a_field(
    field: str, memory_api: Api
) -> None:
    await real.test_strict_validation_refuses_the_old_name_of_a_field(field, memory_api)


async def test_the_status_that_the_engine_writes_is_accepted(memory_api: Api) -> None:
    await real.test_the_status_that_the_engine_writes_is_accepted(memory_api)


async def test_a_job_that_waits_may_be_changed(memory_api: Api) -> None:
    await real.test_a_job_that_waits_may_be_changed(memory_api)


async def test_the_token_can_be_released_and_assigned_again(memory_api: Api) -> None:
    await real.test_the_token_can_be_released_and_assigned_again(memory_api)


async def test_defaults_and_null(memory_api: Api) -> None:
    await real.test_defaults_and_null(memory_api)


async def test_the_policies_have_the_same_messages() -> None:
    async with ApiServer() as server, Api(Access(server.url), agent="tests") as api:
        await policies.every_policy(MemoryCluster(server), api)
