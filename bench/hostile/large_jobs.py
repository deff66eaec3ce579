"""Creates suspended jobs with a large annotation; prints the API server's responses as JSON.

python -m bench.hostile.large_jobs KUBECONFIG NAMESPACE COUNT ANNOTATION BYTES
"""

from __future__ import annotations

import asyncio
import json
import sys

from flyer.kube.apiserver import Api, Limits, find_access
from flyer.kube.apiserver.errors import ApiError
from flyer.kube.apiserver.resources import FLYERJOBS

from bench.sched.loads import flyer_job
from bench.sched.testbed import IN_FLIGHT


async def main(kubeconfig: str, namespace: str, count: int, annotation: str, size: int) -> None:
    """Create them, 64 at a time."""
    gate = asyncio.Semaphore(IN_FLIGHT)
    refusals: list[str] = []

    async def create(api: Api, number: int) -> None:
        body = flyer_job(f"large-{size}-{number}", 1, suspend=True)
        body["metadata"] |= {"namespace": namespace, "annotations": {annotation: "x" * size}}
        async with gate:
            try:
                await api.create(FLYERJOBS, body, namespace)
            except ApiError as error:
                refusals.append(str(error))

    limits = Limits(concurrency_max=IN_FLIGHT, answer_seconds=60.0, call_seconds=120.0)
    api = Api(await find_access(kubeconfig), agent="bench-large-jobs", limits=limits)
    try:
        await asyncio.gather(*(create(api, number) for number in range(count)))
    finally:
        await api.close()
    print(
        json.dumps({"refused": len(refusals), "why": refusals[:1], "taken": count - len(refusals)})
    )


if __name__ == "__main__":
    _, config, where, jobs, key, length = sys.argv
    asyncio.run(main(config, where, int(jobs), key, int(length)))
