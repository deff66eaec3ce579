"""The driver's library through nvidia-ml-py, loaded at the first question.

Runs in the worker process only. Every poll requests new handles: a reset invalidates the old ones.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from flyer_node.hardware.driver import DriverEvent, EventKind, GpuProbe, GpuStatus
from flyer_node.heap import trim_heap
from flyer_node.inventory.assemble import DriverFacts, DriverGpu
from flyer_node.inventory.model import Finding, FindingKind, Gpu
from flyer_node.inventory.pci import normal_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["NvmlDriver"]

LINKS_MAX = 18
"""NVML's bound on NVLink links of one GPU."""


class NvmlDriver:
    """`GpuDriver` over NVML. Without the library the node has no GPUs; this is not an error."""

    def __init__(self) -> None:
        self._nvml: Any = None

    def facts(self) -> DriverFacts:
        """All GPUs and what connects them."""
        nvml = self._library()
        if nvml is None:
            return DriverFacts()
        gpus: list[DriverGpu] = []
        findings: list[Finding] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                gpus.append(self._describe(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index))
            except nvml.NVMLError as error:
                findings.append(Finding(FindingKind.DRIVER, f"nvml index {index}", str(error)))
        return DriverFacts(str(nvml.nvmlSystemGetDriverVersion()), tuple(gpus), tuple(findings))

    def status(self, gpus: Sequence[str]) -> tuple[GpuStatus, ...]:
        """One look at each of these GPUs."""
        nvml = self._library()
        if nvml is None:
            return ()
        return tuple(self._observe(nvml, uuid) for uuid in gpus)

    def probe(self, gpus: Sequence[str]) -> tuple[GpuProbe, ...]:
        """A closer look at each of these GPUs: calls that need a GPU that works."""
        nvml = self._library()
        if nvml is None:
            return ()
        return tuple(self._probe(nvml, uuid) for uuid in gpus)

    def events(self, gpus: Sequence[str], wait_seconds: float) -> Iterator[DriverEvent | None]:
        """Xids, ECC storms, lost GPUs and changed recovery actions, as they happen."""
        nvml = self._library()
        if nvml is None:
            return
        waiting = nvml.nvmlEventSetCreate()
        kinds = {
            nvml.nvmlEventTypeXidCriticalError: EventKind.XID,
            nvml.nvmlEventTypeDoubleBitEccError: EventKind.ECC,
            nvml.nvmlEventTypeGpuUnavailableError: EventKind.UNAVAILABLE,
            nvml.nvmlEventTypeGpuRecoveryAction: EventKind.RECOVERY_ACTION,
        }
        for uuid in gpus:
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                supported = nvml.nvmlDeviceGetSupportedEventTypes(handle)
                mask = sum(kind for kind in kinds if kind & supported)
                if mask:
                    nvml.nvmlDeviceRegisterEvents(handle, mask, waiting)
        while True:
            try:
                data = nvml.nvmlEventSetWait(waiting, int(wait_seconds * 1000))
            except nvml.NVMLError_Timeout:
                yield None
                continue
            uuid = str(nvml.nvmlDeviceGetUUID(data.device))
            kind = kinds.get(data.eventType)
            if kind is not None:
                yield DriverEvent(uuid, kind, int(data.eventData))

    def _library(self) -> Any:
        if self._nvml is None:
            import pynvml

            try:
                pynvml.nvmlInit()
            except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
                return None
            self._nvml = pynvml
            trim_heap()  # the import leaves more free memory than the worker uses otherwise
        return self._nvml

    def _describe(self, nvml: Any, handle: Any, index: int) -> DriverGpu:
        minor: int | None = None
        memory = 0
        capability: tuple[int, int] | None = None
        with contextlib.suppress(nvml.NVMLError):
            minor = int(nvml.nvmlDeviceGetMinorNumber(handle))
        with contextlib.suppress(nvml.NVMLError):
            memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        with contextlib.suppress(nvml.NVMLError):
            major, lesser = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            capability = (int(major), int(lesser))
        gpu = Gpu(
            uuid=str(nvml.nvmlDeviceGetUUID(handle)),
            index=index,
            minor=minor,
            address=normal_address(str(nvml.nvmlDeviceGetPciInfo(handle).busId)),
            name=str(nvml.nvmlDeviceGetName(handle)),
            memory_bytes=memory,
            compute_capability=capability,
        )
        return DriverGpu(gpu, tuple(self._link_peers(nvml, handle)))

    def _link_peers(self, nvml: Any, handle: Any) -> Iterator[str]:
        for link in range(LINKS_MAX):
            try:
                if nvml.nvmlDeviceGetNvLinkState(handle, link):
                    remote = nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)
                    yield normal_address(str(remote.busId))
            except nvml.NVMLError:
                return

    def _observe(self, nvml: Any, uuid: str) -> GpuStatus:
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            field = nvml.nvmlDeviceGetFieldValues(
                handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
            )[0]
        except nvml.NVMLError as error:
            return GpuStatus(uuid, answers=False, error=str(error))
        if field.nvmlReturn == nvml.NVML_ERROR_GPU_IS_LOST:
            return GpuStatus(uuid, answers=False, error="GPU is lost")
        action = field.value.uiVal if field.nvmlReturn == nvml.NVML_SUCCESS else None
        pending = failed = False
        errors: int | None = None
        try:
            with contextlib.suppress(nvml.NVMLError_NotSupported):
                _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
                pending, failed = bool(is_pending), bool(has_failed)
            with contextlib.suppress(nvml.NVMLError_NotSupported):
                errors = int(
                    nvml.nvmlDeviceGetTotalEccErrors(
                        handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                    )
                )
        except nvml.NVMLError as error:
            return GpuStatus(uuid, answers=False, error=str(error))
        return GpuStatus(
            uuid,
            answers=True,
            recovery_action=action,
            remap_pending=pending,
            remap_failed=failed,
            uncorrectable_errors=errors,
            links_active=self._links_active(nvml, handle),
        )

    def _probe(self, nvml: Any, uuid: str) -> GpuProbe:
        status = self._observe(nvml, uuid)
        if not status.answers:
            return GpuProbe(uuid, refused=f"to answer ({status.error})")
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        answers: dict[str, int | None] = {}
        questions: tuple[tuple[str, Callable[[], Any]], ...] = (
            ("utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            ("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total),
            ("PCIe width", lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
            ("PCIe width at most", lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        )
        for name, ask in questions:
            try:
                answers[name] = int(ask())
            except nvml.NVMLError_NotSupported:
                answers[name] = None
            except nvml.NVMLError as error:
                return GpuProbe(uuid, refused=f"its {name} ({error})")
        return GpuProbe(
            uuid,
            recovery_action=status.recovery_action,
            remap_pending=status.remap_pending,
            uncorrectable_errors=status.uncorrectable_errors,
            links_active=status.links_active,
            link_width=answers["PCIe width"],
            link_width_max=answers["PCIe width at most"],
        )

    def _links_active(self, nvml: Any, handle: Any) -> int | None:
        active = 0
        for link in range(LINKS_MAX):
            try:
                active += bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
            except nvml.NVMLError:
                return active if link else None
        return active
