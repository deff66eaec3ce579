//! The life of one target on its node: its store is opened, and opened again whenever it fails.
//!
//! A store that reports an I/O error is closed and opened again after a pause, which doubles while
//! that does not help. What was cached is dropped then, so a new replica begins with what the disk
//! has; mgmtd has heard OFFLINE meanwhile, and has it synced.
//!
//! A store whose log is damaged does not open again. If the chain is served without this target, the
//! store is set aside in a folder beside it and a new one is synced from nothing. If it may be the
//! last one with the chain's data it stays as it is.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, Weak, atomic::Ordering::Relaxed};
use std::time::Duration;

use fabric::moment::Moment;
use rand::Rng;
use threefs_core::error::StoreError;
use threefs_core::ids::{ChainId, TargetId};
use threefs_core::replica::{Config, Event};
use threefs_core::routing::PublicState;
use tokio::sync::watch;

use super::{Hosted, Node, inform};
use crate::peers::CALL_PATIENCE;
use crate::service::draw_incarnation;
use crate::target::{Holds, Target};

/// Before a store is opened again for the first time.
const PAUSE_MIN: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// A store that has worked for so long has recovered: its next failure is a first one.
const RECOVERED: Duration = Duration::from_secs(300);

/// Until the target is retired, or the node is gone.
pub(super) async fn host(node: Weak<Node>, id: TargetId, chain: ChainId) {
    let mut failures = 0;
    loop {
        let Some(this) = node.upgrade().filter(|node| node.wants(id)) else { return };
        match this.open(id, chain).await {
            Ok(target) => {
                let (mut failure, opened) = (target.failure(), Moment::now());
                this.begin(id, chain, target);
                drop(this);
                if !has_failed(&mut failure).await {
                    return;
                }
                let Some(this) = node.upgrade() else { return };
                this.park(id, chain);
                drop(this);
                if Moment::now().since(opened) >= RECOVERED {
                    failures = 0;
                }
                // Its operations under way still have the store open.
                while failure.changed().await.is_ok() {}
            }
            Err(error) => {
                this.park(id, chain);
                // Not at the first look: mgmtd has to hear that this target is away.
                let damaged = matches!(error, StoreError::Damaged { .. });
                if damaged && this.is_served_without(id, chain) {
                    match set_aside(&this.folder(id)) {
                        Ok(folder) => {
                            tracing::error!(
                                "{id} of {chain}: {error}; it is kept as {folder:?}, and synced anew"
                            );
                            continue;
                        }
                        Err(error) => {
                            tracing::error!("{id} of {chain} cannot be set aside: {error}")
                        }
                    }
                }
                let remedy = if damaged {
                    "it is set aside when others serve the chain; if none does, restore the disk \
                     or promote another target"
                } else {
                    "it is opened again"
                };
                tracing::error!("{id} of {chain} cannot be used: {error}; {remedy}");
            }
        }
        tokio::time::sleep(pause(failures)).await;
        failures += 1;
    }
}

/// False: the target is gone.
async fn has_failed(failure: &mut watch::Receiver<bool>) -> bool {
    failure.wait_for(|failed| *failed).await.is_ok()
}

/// Doubles with each failure; up to a quarter less, so that targets of one disk do not go in step.
fn pause(failures: u32) -> Duration {
    let longest = PAUSE_MIN.saturating_mul(1 << failures.min(16)).min(PAUSE_MAX);
    longest.mul_f64(rand::rng().random_range(0.75..=1.0))
}

/// Where a damaged store is kept.
pub(super) fn aside(folder: &Path) -> PathBuf {
    folder.with_extension("damaged")
}

/// Gives the store's folder another name; one that was set aside before is removed.
fn set_aside(folder: &Path) -> io::Result<PathBuf> {
    let aside = aside(folder);
    match fs::remove_dir_all(&aside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::rename(folder, &aside)?;
    if let Some(parent) = folder.parent() {
        File::open(parent)?.sync_all()?;
    }
    Ok(aside)
}

impl Node {
    /// It was not retired, and this node goes on.
    fn wants(&self, id: TargetId) -> bool {
        let targets = self.targets.read().unwrap_or_else(PoisonError::into_inner);
        targets.contains_key(&id) && !self.leaving.load(Relaxed)
    }

    /// Makes an open target known, with what has been learnt meanwhile.
    fn begin(&self, id: TargetId, chain: ChainId, target: Arc<Target>) {
        let mut targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
        // It was retired meanwhile.
        if !targets.contains_key(&id) {
            return;
        }
        // Newer routing than this comes after it is in the map, or is this.
        let routing = self.shared.routing();
        if let Some(chain) = routing.chain(chain) {
            inform(&target, &routing, chain, id);
        }
        let lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(valid_until) = lease.valid_until() {
            target.handle(Event::Lease { valid_until });
        }
        drop(lease);
        if self.leaving.load(Relaxed) {
            target.handle(Event::Leave);
        }
        targets.insert(id, Hosted::Open(target));
        drop(targets);
        self.shared.report_changed.notify_one();
    }

    /// A target without a usable store is reported as OFFLINE.
    fn park(&self, id: TargetId, chain: ChainId) {
        let mut targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(hosted) = targets.get_mut(&id) {
            *hosted = Hosted::Broken(chain);
        }
        drop(targets);
        self.shared.report_changed.notify_one();
    }

    /// Whether mgmtd, of late, has said that others serve this chain and that this target is away.
    fn is_served_without(&self, id: TargetId, chain: ChainId) -> bool {
        let lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner);
        if !lease.is_valid(self.shared.clock.now()) {
            return false;
        }
        drop(lease);
        let routing = self.shared.routing();
        routing.chain(chain).is_some_and(|chain| {
            chain.head().is_some() && chain.state_of(id) == Some(PublicState::Offline)
        })
    }

    async fn open(&self, id: TargetId, chain: ChainId) -> Result<Arc<Target>, StoreError> {
        let (folder, disk) = (self.folder(id), self.disk.clone());
        let opened = tokio::task::spawn_blocking(move || {
            let store = (disk.open)(&folder, disk.budget)?;
            let holds = Holds::of(&*store);
            Ok((store, holds))
        });
        let (store, holds) = opened.await.map_err(|error| StoreError::Io {
            operation: "open the store".into(),
            reason: error.to_string(),
        })??;
        let mut config = Config::new(id, chain, draw_incarnation());
        config.call_timeout_ms = self.config.call_timeout_ms * u64::from(CALL_PATIENCE);
        config.store_stall_ms = self.config.store_stall_ms;
        config.full_wait_ms = self.config.full_wait_ms;
        let target = Target::new(config, store, holds, Arc::clone(&self.shared));
        let rearmed = Arc::clone(&target.rearmed);
        tokio::spawn(Target::keep_time(Arc::downgrade(&target), rearmed));
        Ok(target)
    }
}

#[cfg(test)]
#[path = "hosting_test.rs"]
mod tests;
