//! Holds: removed files that clients of this service, or of former services, have open.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use threefs_core::ids::{ClientId, InodeId};

/// A removed file that clients of a service have open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hold {
    pub inode: InodeId,
    /// The run of the service.
    pub run_id: u64,
    pub clients: Vec<ClientId>,
}

/// Holds of this service and of former ones.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    pub(crate) checked: tokio::sync::Mutex<Checked>,
    /// Files for which this service has stored holds. Locked while they are written.
    pub(crate) held: tokio::sync::Mutex<HashSet<InodeId>>,
    former: Mutex<Former>,
}

/// Up to which round the removals have been checked.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Checked {
    pub(crate) round: u64,
    /// Departures of services that the check has taken into account.
    pub(crate) departures: u64,
}

/// Holds of services that are gone.
#[derive(Debug, Default)]
pub(crate) struct Former {
    pub(crate) holds: Vec<Hold>,
    pub(crate) listed: bool,
    /// When this service first saw holds of each of them, in milliseconds of its uptime.
    pub(crate) since_ms: HashMap<u64, u64>,
}

impl Holds {
    /// Lists the holds of former services with the next check.
    pub(crate) fn list_former(&self) {
        self.former().listed = false;
    }

    /// Whether a client of a former service has not reported its open files yet.
    pub(crate) fn waits_for(&self, client: ClientId) -> bool {
        self.former().holds.iter().any(|hold| hold.clients.contains(&client))
    }

    pub(crate) fn former(&self) -> MutexGuard<'_, Former> {
        self.former.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
