//! Capabilities that a client with a ticket shows the storage services, asked of the metadata
//! service when a file's chunks are first used, and kept until they end.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use fabric::capability::Capability;
use fabric::credentials::{Credential, Credentials};
use fabric::ticket::Ticket;
use threefs_core::ids::InodeId;

/// Files with a capability at once: 6 MiB. Beyond it all are asked for again.
const KEPT_MAX: usize = 65_536;
/// Asked for again so long before the end, if the ticket lasts longer.
const MARGIN_S: u64 = 60;

pub(crate) struct Capabilities {
    credentials: Credentials,
    kept: Mutex<HashMap<InodeId, Capability>>,
}

impl Capabilities {
    pub(crate) fn new(credentials: &Credentials) -> Self {
        Self { credentials: credentials.clone(), kept: Mutex::default() }
    }

    /// Whether this client holds a ticket, and so needs capabilities.
    pub(crate) fn needed(&self) -> bool {
        matches!(self.credentials.current(), Credential::Ticket(_))
    }

    pub(crate) fn get(&self, inode: InodeId) -> Option<Capability> {
        let Credential::Ticket(sealed) = self.credentials.current() else { return None };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let kept = self.lock();
        kept.get(&inode).filter(|kept| is_fresh(kept, sealed.ticket(), now)).cloned()
    }

    pub(crate) fn keep(&self, inode: InodeId, capability: Capability) {
        let mut kept = self.lock();
        if kept.len() >= KEPT_MAX {
            kept.clear();
        }
        kept.insert(inode, capability);
    }

    pub(crate) fn forget(&self, inode: InodeId) {
        self.lock().remove(&inode);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<InodeId, Capability>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Near its end a capability is used only where a new one would end no later.
fn is_fresh(capability: &Capability, ticket: &Ticket, now_unix_s: u64) -> bool {
    let ends = capability.expires_unix_s();
    ends > now_unix_s + MARGIN_S || (ends > now_unix_s && ends >= ticket.expires_unix_s)
}
