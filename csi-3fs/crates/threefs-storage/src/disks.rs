//! Disks of a service: each is served as a node of mgmtd while its path shows it.
//! `threefs_core::disks` decides about each path.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fabric::rpc::{Shutdown, ShutdownHandle};
use threefs_core::disks::{DiskId, DiskIdentity, Found, Host, Refusal, Step, steps};
use threefs_mgmtd::MgmtdError;
use tokio::task::JoinSet;

use crate::disk::{self, End, Shared};
use crate::error::StorageServiceError;
use crate::watcher::Watcher;

/// Starts and stops the disks.
pub(crate) struct Disks {
    shared: Arc<Shared>,
    watcher: Watcher,
    running: BTreeMap<String, Running>,
    tasks: JoinSet<(String, End)>,
    /// Disks that mgmtd has refused, while a path shows them: not served again.
    refused: BTreeSet<DiskId>,
    /// What was logged last about each path.
    logged: BTreeMap<String, String>,
}

/// A disk that is served, or is being closed.
struct Running {
    identity: DiskIdentity,
    stop: ShutdownHandle,
}

impl Disks {
    pub(crate) fn new(shared: Arc<Shared>, watcher: Watcher) -> Self {
        let (running, tasks) = (BTreeMap::new(), JoinSet::new());
        let (refused, logged) = (BTreeSet::new(), BTreeMap::new());
        Self { shared, watcher, running, tasks, refused, logged }
    }

    /// Serves the disks until shutdown is requested; then every target leaves its chain, unless no
    /// time is configured for that.
    ///
    /// # Errors
    /// No disk may be served.
    pub(crate) async fn serve(mut self, shutdown: Shutdown) -> Result<(), StorageServiceError> {
        let mut is_new_cluster = self.shared.is_new_cluster.subscribe();
        let mut routing = self.shared.routing.clone();
        loop {
            self.execute()?;
            tokio::select! {
                () = shutdown.requested() => break,
                Some(ended) = self.tasks.join_next() => {
                    let (path, end) = ended.unwrap_or_else(|error| resume_unwind(error.into_panic()));
                    self.ended(&path, end)?;
                }
                () = self.watcher.changed() => {}
                Ok(()) = is_new_cluster.changed() => {}
                Ok(()) = routing.changed() => {}
            }
        }
        let timeout = Duration::from_millis(self.shared.config.drain_ms);
        if !timeout.is_zero() {
            self.running.values().for_each(|disk| disk.stop.request());
            let ended = async { while self.tasks.join_next().await.is_some() {} };
            let _ = tokio::time::timeout(timeout, ended).await;
        }
        Ok(())
    }

    /// Executes the step of each path.
    fn execute(&mut self) -> Result<(), StorageServiceError> {
        let found = self.watcher.found();
        let is_there = |id: &DiskId| {
            let mut there = found.values();
            there.any(|found| matches!(found, Found::Disk(disk) if disk.disk == *id))
        };
        self.refused.retain(is_there);
        let is_new_cluster = *self.shared.is_new_cluster.borrow();
        let (service, paths) = (self.shared.service, self.watcher.paths().to_vec());
        let host = Host::new(service, paths, &self.shared.routing.borrow(), is_new_cluster);
        let running: BTreeMap<String, DiskIdentity> =
            self.running.iter().map(|(path, it)| (path.clone(), it.identity.clone())).collect();
        let steps = steps(&host, &running, &found);
        if running.is_empty()
            && let Some(refusal) = only_refusals(&steps)
        {
            return Err(refusal.into());
        }
        for (path, step) in steps {
            match step {
                Step::Keep => drop(self.logged.remove(&path)),
                Step::Wait(reason) => {
                    if self.is_news(&path, &reason) {
                        tracing::info!(path, "no disk is served from there: {reason}");
                    }
                }
                Step::Refuse(refusal) => self.warn(&path, &refusal.to_string()),
                Step::Adopt(node) => self.watcher.adopt(&path, node),
                Step::Start(disk) if self.refused.contains(&disk.disk) => {}
                Step::Start(disk) => self.start(path, disk),
                Step::Stop(reason) => self.stop(&path, &reason),
            }
        }
        Ok(())
    }

    fn start(&mut self, path: String, identity: DiskIdentity) {
        let (stop, stopped) = Shutdown::new();
        let disk =
            disk::run(Arc::clone(&self.shared), PathBuf::from(&path), identity.clone(), stopped);
        let name = path.clone();
        self.tasks.spawn(async move { (name, disk.await) });
        self.running.insert(path, Running { identity, stop });
    }

    fn stop(&mut self, path: &str, reason: &str) {
        let Some(disk) = self.running.get(path) else { return };
        disk.stop.request();
        let text = format!("{} is not served from there any more: {reason}", disk.identity.node);
        self.warn(path, &text);
    }

    /// Serving the disk at a path has ended.
    fn ended(&mut self, path: &str, end: End) -> Result<(), StorageServiceError> {
        let Some(disk) = self.running.remove(path) else { return Ok(()) };
        let refusal = match end {
            End::Stopped => return Ok(()),
            End::Unusable(reason) if self.shared.config.disks.is_empty() => {
                return Err(StorageServiceError::Data { path: path.to_owned(), reason });
            }
            End::Unusable(reason) => {
                self.warn(path, &format!("the disk cannot be used: {reason}; retrying"));
                return Ok(());
            }
            End::Refused(refusal) => refusal,
        };
        // mgmtd has lost its store, which does not depend on the disk.
        if self.running.is_empty() || matches!(refusal, MgmtdError::ChainsLost { .. }) {
            return Err(refusal.into());
        }
        tracing::error!("the disk at `{path}` is not served any more: {refusal}");
        self.refused.insert(disk.identity.disk);
        Ok(())
    }

    /// Logs what keeps a disk from being served, once.
    fn warn(&mut self, path: &str, text: &str) {
        if self.is_news(path, text) {
            tracing::warn!(path, "{text}");
        }
    }

    /// Whether this differs from what was logged last about a path.
    fn is_news(&mut self, path: &str, text: &str) -> bool {
        let before = self.logged.insert(path.to_owned(), text.to_owned());
        before.is_none_or(|before| before != text)
    }
}

/// The first refusal, if no path can have a disk otherwise.
fn only_refusals(steps: &BTreeMap<String, Step>) -> Option<Refusal> {
    let mut refusals = steps.values().map(|step| match step {
        Step::Refuse(refusal) => Some(refusal),
        _ => None,
    });
    let first = refusals.next().flatten()?;
    refusals.all(|refusal| refusal.is_some()).then(|| first.clone())
}
