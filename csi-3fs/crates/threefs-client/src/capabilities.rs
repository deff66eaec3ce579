//! Capabilities that a client with a ticket shows the storage services, asked of the metadata
//! service when a file's chunks are first used, and kept until they end.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use fabric::capability::Capability;
use fabric::credentials::{Credential, Credentials};
use fabric::rpc::decode;
use fabric::ticket::Ticket;
use threefs_core::ids::InodeId;
use threefs_core::terms::FileTerms;

/// Files with a capability at once: 10 MiB. Beyond it all are asked for again.
const KEPT_MAX: usize = 65_536;
/// Asked for again so long before the end, if the ticket lasts longer.
const MARGIN_S: u64 = 60;

pub(crate) struct Capabilities {
    credentials: Credentials,
    kept: Mutex<HashMap<InodeId, Kept>>,
}

struct Kept {
    capability: Capability,
    /// Chunks below may be changed.
    chunks: u64,
}

impl Capabilities {
    pub(crate) fn new(credentials: &Credentials) -> Self {
        Self { credentials: credentials.clone(), kept: Mutex::default() }
    }

    /// Whether this client holds a ticket, and so needs capabilities.
    pub(crate) fn needed(&self) -> bool {
        matches!(self.credentials.current(), Credential::Ticket(_))
    }

    /// One that is good for changes of the chunks below `chunks`.
    pub(crate) fn get(&self, inode: InodeId, chunks: u64) -> Option<Capability> {
        let Credential::Ticket(sealed) = self.credentials.current() else { return None };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let kept = self.lock();
        let known = kept.get(&inode).filter(|known| known.chunks >= chunks)?;
        let fresh = is_fresh(&known.capability, sealed.ticket(), now);
        fresh.then(|| known.capability.clone())
    }

    pub(crate) fn keep(&self, inode: InodeId, capability: Capability) {
        // Storage says what is wrong with terms that cannot be read.
        let chunks = decode(capability.terms()).map_or(u64::MAX, |terms: FileTerms| terms.chunks);
        let mut kept = self.lock();
        if kept.len() >= KEPT_MAX {
            kept.clear();
        }
        kept.insert(inode, Kept { capability, chunks });
    }

    pub(crate) fn forget(&self, inode: InodeId) {
        self.lock().remove(&inode);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<InodeId, Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Near its end a capability is used only where a new one would end no later.
fn is_fresh(capability: &Capability, ticket: &Ticket, now_unix_s: u64) -> bool {
    let ends = capability.expires_unix_s();
    ends > now_unix_s + MARGIN_S || (ends > now_unix_s && ends >= ticket.expires_unix_s)
}
