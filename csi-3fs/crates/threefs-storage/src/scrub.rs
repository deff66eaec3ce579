//! State of a target's scrub: its progress, recorded in the folder of the store, and requests.

mod record;

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use threefs_core::ids::StoreId;
use threefs_core::replica::Alert;
use threefs_core::scrub::{Progress, ScrubStatus, Step};
use tokio::sync::{Notify, watch};

/// State of the scrub of one target.
pub(crate) struct Scrub {
    pub(crate) interval_s: u64,
    file: PathBuf,
    progress: Mutex<Progress>,
    /// Changes with each result of a repair.
    pub(crate) repairs: watch::Sender<()>,
    /// A pass was requested.
    pub(crate) requested: Notify,
}

impl Scrub {
    /// Reads the progress recorded in the `folder` of a store. Blocks.
    pub(crate) fn open(folder: &std::path::Path, interval_s: u64, store: StoreId) -> Self {
        let file = folder.join(record::FILE);
        let progress = Progress::restore(record::read(&file), store, unix_now_s(), interval_s);
        Self {
            interval_s,
            file,
            progress: Mutex::new(progress),
            repairs: watch::Sender::new(()),
            requested: Notify::new(),
        }
    }

    /// Starts a pass, unless one is running.
    pub(crate) fn start(&self) {
        self.progress().start(unix_now_s());
        self.requested.notify_one();
    }

    pub(crate) fn status(&self, used_bytes: u64) -> ScrubStatus {
        self.progress().status(used_bytes, self.interval_s)
    }

    /// Records what the replica reports about chunks that a read, a sync or a scrub found damaged.
    pub(crate) fn observe(&self, alert: &Alert) {
        match *alert {
            Alert::Damaged { chunk, .. } => {
                self.progress().damage_detected(chunk);
            }
            Alert::Repaired { chunk, .. } => self.progress().repaired(chunk),
            Alert::NotRepaired { chunk, .. } => {
                let mut progress = self.progress();
                progress.damage_detected(chunk);
                progress.not_repaired(chunk);
            }
            _ => return,
        }
        self.repairs.send_replace(());
    }

    pub(crate) fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn step(&self) -> Step {
        self.progress().step(unix_now_s(), self.interval_s)
    }

    pub(crate) async fn record(&self) {
        let progress = self.progress().record();
        self.write(progress).await;
    }

    pub(crate) async fn write(&self, progress: Progress) {
        let file = self.file.clone();
        let written = tokio::task::spawn_blocking(move || record::write(&file, &progress)).await;
        if let Ok(Err(error)) = written {
            tracing::warn!("cannot record the progress of the scrub in {:?}: {error}", self.file);
        }
    }
}

pub(crate) fn unix_now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
