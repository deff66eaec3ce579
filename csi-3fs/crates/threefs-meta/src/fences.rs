//! Fences of volumes at the storage services: from the return of a call on, none of them executes
//! an update of an earlier epoch of the volume.

use fabric::BoxFuture;
use fabric::deadline::Deadline;
use threefs_core::fence::VolumeFence;
use threefs_mgmtd::MgmtdClient;

/// Raises fences.
pub trait Fences: Send + Sync {
    /// Before the first snapshot: requires that all storage services and mgmtd know fences, and that
    /// those of earlier releases are refused from then on.
    fn enable(&self, deadline: Deadline) -> BoxFuture<'_, Result<(), String>>;

    /// Raises the fence of a volume; returns once every storage service has confirmed it or has lost
    /// its lease. May be repeated, and a lower fence changes nothing.
    fn raise<'a>(
        &'a self,
        fence: &'a VolumeFence,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<(), String>>;
}

impl Fences for MgmtdClient {
    fn enable(&self, deadline: Deadline) -> BoxFuture<'_, Result<(), String>> {
        let enabled = self.enable_snapshots(deadline);
        Box::pin(async { enabled.await.map_err(|error| error.to_string()) })
    }

    fn raise<'a>(
        &'a self,
        fence: &'a VolumeFence,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<(), String>> {
        let raised = self.raise_fence(fence.clone(), deadline);
        Box::pin(async { raised.await.map_err(|error| error.to_string()) })
    }
}

/// Without fences no snapshot can be made.
#[derive(Debug)]
pub struct NoFences;

impl Fences for NoFences {
    fn enable(&self, _deadline: Deadline) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(std::future::ready(Err("this service cannot raise fences".into())))
    }

    fn raise<'a>(
        &'a self,
        _fence: &'a VolumeFence,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<(), String>> {
        let refused = Err("this service cannot raise fences".into());
        Box::pin(std::future::ready(refused))
    }
}
