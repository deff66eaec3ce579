//! Lifecycle of one target: its store is opened, and reopened whenever it fails.
//! `threefs_core::hosting` decides when, and when a damaged store is quarantined.
//!
//! Reopening a store drops its cached state, so a new replica starts with the state on disk; mgmtd
//! has received OFFLINE meanwhile and has the replica synced. A quarantined store is kept in a
//! separate folder.

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

use super::{Node, TargetSlot, notify};
use crate::identity::draw_incarnation;
use crate::peers::BUSY_TIMEOUT_FACTOR;
use crate::scrub::Scrub;
use crate::scrubber;
use crate::target::{StoreUsage, Target};

/// Runs a target until it is retired or the node is dropped.
pub(super) async fn run_target(node: Weak<Node>, id: TargetId, chain: ChainId) {
    let mut reopening = Reopening::default();
    loop {
        let Some(this) = node.upgrade().filter(|node| node.is_hosted(id)) else { return };
        match this.open(id, chain).await {
            Ok(target) => {
                let mut failure = target.failure();
                reopening.record_open(this.context.clock.now());
                this.activate(id, chain, target);
                drop(this);
                if !has_failed(&mut failure).await {
                    return;
                }
                let Some(this) = node.upgrade() else { return };
                this.mark_broken(id, chain);
                let pause_ms = reopening.record_failure(this.context.clock.now());
                drop(this);
                // Operations in flight still have the store open.
                while failure.changed().await.is_ok() {}
                tokio::time::sleep(pause(pause_ms)).await;
            }
            Err(error) => {
                this.mark_broken(id, chain);
                // Not at the first failure: mgmtd must first learn that this target is OFFLINE.
                if this.sets_aside(&error, id, chain) {
                    match quarantine(&this.folder(id)) {
                        Ok(folder) => {
                            tracing::error!(
                                "{id} of {chain}: {error}; the store is quarantined as {folder:?} and the target is synced again"
                            );
                            continue;
                        }
                        Err(error) => {
                            tracing::error!("{id} of {chain}: cannot quarantine the store: {error}")
                        }
                    }
                }
                let remedy = if matches!(error, StoreError::Damaged { .. }) {
                    "the store is quarantined if another target serves the chain; otherwise restore the \
                     disk or promote another target"
                } else {
                    "retrying"
                };
                tracing::error!("{id} of {chain}: cannot open the store: {error}; {remedy}");
                let pause_ms = reopening.record_failure(this.context.clock.now());
                drop(this);
                tokio::time::sleep(pause(pause_ms)).await;
            }
        }
    }
}

/// False: the target was dropped.
async fn has_failed(failure: &mut watch::Receiver<bool>) -> bool {
    failure.wait_for(|failed| *failed).await.is_ok()
}

/// Reduced by up to a quarter, so that targets of one disk do not retry in lockstep.
fn pause(longest_ms: u64) -> Duration {
    Duration::from_millis(longest_ms).mul_f64(rand::rng().random_range(0.75..=1.0))
}

/// Folder of a quarantined store.
pub(super) fn quarantine_folder(folder: &Path) -> PathBuf {
    folder.with_extension("damaged")
}

/// Renames the store's folder; removes a previously quarantined one.
fn quarantine(folder: &Path) -> io::Result<PathBuf> {
    let quarantine_folder = quarantine_folder(folder);
    match fs::remove_dir_all(&quarantine_folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::rename(folder, &quarantine_folder)?;
    if let Some(parent) = folder.parent() {
        File::open(parent)?.sync_all()?;
    }
    Ok(quarantine_folder)
}

impl Node {
    /// Whether the target is not retired and the node is not shutting down.
    fn is_hosted(&self, id: TargetId) -> bool {
        let targets = self.targets.read().unwrap_or_else(PoisonError::into_inner);
        targets.contains_key(&id) && !self.draining.load(Relaxed)
    }

    /// Publishes an open target, and passes the current routing and lease to it.
    fn activate(&self, id: TargetId, chain: ChainId, target: Arc<Target>) {
        let mut targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
        // Retired meanwhile.
        if !targets.contains_key(&id) {
            return;
        }
        // Routing that is newer than this is delivered after the target is in the map.
        let routing = self.context.routing();
        if let Some(chain) = routing.chain(chain) {
            notify(&target, &routing, chain, id);
        }
        // As the routing, and before the lease, which counts only with them.
        let fences = self.fences.lock().unwrap_or_else(PoisonError::into_inner);
        target.handle(Event::Fences(Arc::clone(&fences.table)));
        drop(fences);
        let lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(valid_until) = lease.valid_until() {
            target.handle(Event::Lease { valid_until });
        }
        drop(lease);
        if self.draining.load(Relaxed) {
            target.handle(Event::Leave);
        }
        targets.insert(id, TargetSlot::Open(target));
        drop(targets);
        self.context.report_changed.notify_one();
    }

    /// Marks a target without a usable store, which is reported as OFFLINE.
    fn mark_broken(&self, id: TargetId, chain: ChainId) {
        let mut targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = targets.get_mut(&id) {
            *slot = TargetSlot::Broken(chain);
        }
        drop(targets);
        self.context.report_changed.notify_one();
    }

    /// Whether a store that cannot be opened is to be replaced by an empty one.
    fn sets_aside(&self, error: &StoreError, id: TargetId, chain: ChainId) -> bool {
        let lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner);
        let lease_valid = lease.is_valid(self.context.clock.now());
        drop(lease);
        sets_aside(error, self.context.routing().chain(chain), id, lease_valid)
    }

    async fn open(&self, id: TargetId, chain: ChainId) -> Result<Arc<Target>, StoreError> {
        let (folder, disk) = (self.folder(id), self.disk.clone());
        let interval_s = self.config.scrub_interval_s;
        let context = Arc::clone(&self.context);
        let task = tokio::task::spawn_blocking(move || {
            let store = (disk.open)(&folder, disk.budget)?;
            let usage = StoreUsage::of(&*store);
            context.memberships.reread(id, &folder, usage.id);
            let recorded = context.memberships.get(id);
            if let Some(record) = recorded.filter(|record| record.chain.id != chain) {
                return Err(StoreError::Io {
                    operation: "open the store".into(),
                    reason: format!("it holds data of {}", record.chain.id),
                });
            }
            let scrub = Scrub::open(&folder, interval_s, usage.id);
            Ok((store, usage, scrub, folder))
        });
        let (store, usage, scrub, folder) = task.await.map_err(|error| StoreError::Io {
            operation: "open the store".into(),
            reason: error.to_string(),
        })??;
        let mut config = Config::new(id, chain, draw_incarnation());
        config.call_timeout_ms = self.config.call_timeout_ms * u64::from(BUSY_TIMEOUT_FACTOR);
        config.store_stall_ms = self.config.store_stall_ms;
        config.full_wait_ms = self.config.full_wait_ms;
        let target = Target::new(config, store, usage, scrub, folder, Arc::clone(&self.context));
        let rearmed = Arc::clone(&target.rearmed);
        tokio::spawn(Target::run_timer(Arc::downgrade(&target), rearmed));
        let (scrub, limits) = (Arc::clone(&target.scrub), Arc::clone(&self.scrub_limits));
        tokio::spawn(scrubber::run(Arc::downgrade(&target), scrub, limits));
        Ok(target)
    }
}

#[cfg(test)]
#[path = "lifecycle_test.rs"]
mod tests;
