//! The life of one target on its node: its store is opened, and opened again whenever it fails.
//! When, and when a damaged one is set aside, is decided by `threefs_core::hosting`.
//!
//! What was cached is dropped when a store is opened again, so a new replica begins with what the
//! disk has; mgmtd has heard OFFLINE meanwhile, and has it synced. A store that is set aside is kept
//! in a folder beside its own.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, Weak, atomic::Ordering::Relaxed};
use std::time::Duration;

use rand::Rng;
use threefs_core::error::StoreError;
use threefs_core::hosting::{Reopening, sets_aside};
use threefs_core::ids::{ChainId, TargetId};
use threefs_core::replica::{Config, Event};
use tokio::sync::watch;

use super::{Hosted, Node, inform};
use crate::peers::CALL_PATIENCE;
use crate::service::draw_incarnation;
use crate::target::{Holds, Target};

/// Until the target is retired, or the node is gone.
pub(super) async fn host(node: Weak<Node>, id: TargetId, chain: ChainId) {
    let mut reopening = Reopening::default();
    loop {
        let Some(this) = node.upgrade().filter(|node| node.wants(id)) else { return };
        match this.open(id, chain).await {
            Ok(target) => {
                let mut failure = target.failure();
                reopening.opened(this.shared.clock.now());
                this.begin(id, chain, target);
                drop(this);
                if !has_failed(&mut failure).await {
                    return;
                }
                let Some(this) = node.upgrade() else { return };
                this.park(id, chain);
                let pause_ms = reopening.failed(this.shared.clock.now());
                drop(this);
                // Its operations under way still have the store open.
                while failure.changed().await.is_ok() {}
                tokio::time::sleep(pause(pause_ms)).await;
            }
            Err(error) => {
                this.park(id, chain);
                // Not at the first look: mgmtd has to hear that this target is away.
                if this.sets_aside(&error, id, chain) {
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
                let remedy = if matches!(error, StoreError::Damaged { .. }) {
                    "it is set aside when others serve the chain; if none does, restore the disk \
                     or promote another target"
                } else {
                    "it is opened again"
                };
                tracing::error!("{id} of {chain} cannot be used: {error}; {remedy}");
                let pause_ms = reopening.failed(this.shared.clock.now());
                drop(this);
                tokio::time::sleep(pause(pause_ms)).await;
            }
        }
    }
}

/// False: the target is gone.
async fn has_failed(failure: &mut watch::Receiver<bool>) -> bool {
    failure.wait_for(|failed| *failed).await.is_ok()
}

/// Up to a quarter less, so that targets of one disk do not go in step.
fn pause(longest_ms: u64) -> Duration {
    Duration::from_millis(longest_ms).mul_f64(rand::rng().random_range(0.75..=1.0))
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

    /// Whether a store that could not be opened is to make room for an empty one.
    fn sets_aside(&self, error: &StoreError, id: TargetId, chain: ChainId) -> bool {
        let lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner);
        let lease_valid = lease.is_valid(self.shared.clock.now());
        drop(lease);
        sets_aside(error, self.shared.routing().chain(chain), id, lease_valid)
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
