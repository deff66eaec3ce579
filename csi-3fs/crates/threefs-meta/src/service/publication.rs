//! Publication of the fences of all volumes: mgmtd may have lost some in a restore, which starts a new era
//! of the routing. Storage services do not serve before.

use std::sync::Arc;
use std::time::Duration;

use fabric::deadline::Deadline;
use threefs_core::routing::RoutingInfo;
use threefs_kv::Store;
use threefs_mgmtd::MgmtdClient;
use tokio::sync::watch;

use crate::ops;

/// Timeout of one part.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Pause after a failure.
const PAUSE: Duration = Duration::from_millis(500);
/// Failures between two log lines.
const FAILURES_PER_LINE: u32 = 20;
/// Volumes in a part.
const VOLUMES_AT_ONCE: usize = 256;

/// Publishes after the start, and in each new era. Never returns. The store must be registered.
pub(crate) async fn run(
    store: &Store,
    mgmtd: &MgmtdClient,
    mut routing: watch::Receiver<Arc<RoutingInfo>>,
) {
    let (mut published, mut failures) = (None, 0);
    loop {
        let is_new = |routing: &Arc<RoutingInfo>| {
            routing.version.0 > 0 && published != Some(routing.version.era())
        };
        let era = routing.wait_for(is_new).await.ok().map(|routing| routing.version.era());
        let Some(era) = era else { return std::future::pending().await };
        match publish(store, mgmtd, era).await {
            Ok(()) => (published, failures) = (Some(era), 0),
            Err(error) => {
                if failures % FAILURES_PER_LINE == 0 {
                    tracing::warn!(error, "the epochs of volumes could not be published");
                }
                failures += 1;
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

async fn publish(store: &Store, mgmtd: &MgmtdClient, era: u32) -> Result<(), String> {
    let mut after = None;
    loop {
        let list = ops::ListFences { after, limit: VOLUMES_AT_ONCE };
        let (fences, last) = store
            .transact(Deadline::after(ATTEMPT), &list)
            .await
            .map_err(|error| error.to_string())?;
        let published =
            mgmtd.publish_fences(era, fences, last.is_none(), Deadline::after(ATTEMPT)).await;
        published.map_err(|error| error.to_string())?;
        after = last;
        if after.is_none() {
            return Ok(());
        }
    }
}
