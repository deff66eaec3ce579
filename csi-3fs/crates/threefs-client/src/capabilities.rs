//! Capabilities that a client with a ticket presents to storage services: requested from the
//! metadata service when a file's chunks are first used, and cached until they expire. The first
//! request in the second half of a capability's lifetime renews it in the background, while
//! requests continue to use the old one. Capabilities of idle files are not renewed.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fabric::auth::capability::{Capability, LIFE_S};
use fabric::auth::credentials::{Credential, Credentials};
use fabric::boot_instant::BootInstant;
use threefs_core::fence::VolumeEpoch;
use threefs_core::ids::InodeId;
use threefs_core::terms::{FileTerms, WRITE_LIFETIME_S};

/// Maximum number of cached capabilities: 10 MiB. Beyond it, the cache is cleared.
const CACHED_MAX: usize = 65_536;
/// Time before its expiry in which a capability is not used, because it must arrive in time.
const MARGIN: Duration = Duration::from_secs(5);

pub(crate) struct Capabilities {
    credentials: Credentials,
    cached: Mutex<HashMap<InodeId, Cached>>,
}

struct Cached {
    capability: Capability,
    /// Bytes of the file below this may be written.
    end: u64,
    /// When it was received: the clock of the service that signed it may differ from the local one.
    received_at: BootInstant,
    /// End of the permission to write, in seconds since 1970.
    until_unix_s: u64,
    /// A renewal is in progress.
    renewing: bool,
}

/// A cached capability.
#[derive(Debug)]
pub(crate) struct Lookup {
    pub capability: Capability,
    /// The caller must renew it.
    pub renew: bool,
}

impl Capabilities {
    pub(crate) fn new(credentials: &Credentials) -> Self {
        Self { credentials: credentials.clone(), cached: Mutex::default() }
    }

    /// Whether this client holds a ticket, and so needs capabilities.
    pub(crate) fn are_required(&self) -> bool {
        matches!(self.credentials.current(), Credential::Ticket(_))
    }

    /// A capability for writing the bytes below `end`; 0: for reading. If a storage service rejects
    /// it, it is dropped.
    pub(crate) fn get(&self, inode: InodeId, end: u64) -> Option<Lookup> {
        self.get_at(inode, end, BootInstant::now())
    }

    fn get_at(&self, inode: InodeId, end: u64, now: BootInstant) -> Option<Lookup> {
        let Credential::Ticket(sealed) = self.credentials.current() else { return None };
        let mut cached = self.lock();
        let current = cached.get_mut(&inode).filter(|current| current.end >= end)?;
        let (ends_unix_s, life_s) = match end {
            0 => (current.capability.expires_unix_s(), LIFE_S),
            _ => (current.until_unix_s, WRITE_LIFETIME_S),
        };
        let life = Duration::from_secs(life_s);
        let remaining = life.saturating_sub(now.since(current.received_at));
        // A new one would expire no later.
        let is_last = ends_unix_s >= sealed.ticket().expires_unix_s;
        if remaining.is_zero() || (remaining <= MARGIN && !is_last) {
            return None;
        }
        let renew = remaining <= life / 2 && !is_last && !current.renewing;
        current.renewing |= renew;
        Some(Lookup { capability: current.capability.clone(), renew })
    }

    /// Caches a capability; returns the end of the bytes that it permits to write, and the place that
    /// updates must name.
    pub(crate) fn keep(
        &self,
        inode: InodeId,
        capability: Capability,
    ) -> (u64, Option<VolumeEpoch>) {
        let ends = capability.expires_unix_s();
        // Storage services report invalid terms.
        let terms = FileTerms::decode(capability.terms());
        let (end, until_unix_s, place) = terms.map_or((u64::MAX, ends, None), |terms| {
            (terms.end, terms.until_unix_s.min(ends), terms.place)
        });
        let mut cached = self.lock();
        if cached.len() >= CACHED_MAX {
            cached.clear();
        }
        let received_at = BootInstant::now();
        cached
            .insert(inode, Cached { capability, end, received_at, until_unix_s, renewing: false });
        (end, place)
    }

    /// A renewal has failed: the next request retries it.
    pub(crate) fn renewal_failed(&self, inode: InodeId) {
        if let Some(current) = self.lock().get_mut(&inode) {
            current.renewing = false;
        }
    }

    pub(crate) fn forget(&self, inode: InodeId) {
        self.lock().remove(&inode);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<InodeId, Cached>> {
        self.cached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use fabric::auth::Key;
    use fabric::auth::keys::KeyRing;
    use fabric::auth::ticket::Ticket;
    use threefs_core::ids::{TableId, TableVersion};
    use threefs_core::layout::{ChainChoice, Layout};

    use super::*;

    const INODE: InodeId = InodeId(7);
    /// A clock unrelated to the local one.
    const SIGNED_UNIX_S: u64 = 1_000;

    fn ring() -> KeyRing {
        KeyRing::of(Key::from_bytes(&[7; 32]).unwrap())
    }

    fn ticket(expires_unix_s: u64) -> Ticket {
        Ticket {
            cluster: "default".into(),
            key_id: 0,
            directory: 1,
            path: "/v".into(),
            read_only: false,
            node: String::new(),
            expires_unix_s,
        }
    }

    /// A capability for writing below `end`.
    fn capability(ticket: &Ticket, end: u64) -> Capability {
        let layout = Layout {
            table: TableId(1),
            table_version: TableVersion(1),
            chunk_bytes: 1 << 20,
            stripe: 1,
            chains: ChainChoice::Explicit(Vec::new()),
        };
        let until_unix_s = SIGNED_UNIX_S + WRITE_LIFETIME_S;
        let terms = FileTerms { layout, end, until_unix_s, place: None }.encode().unwrap();
        Capability::sign(&ring(), ticket, INODE.0, terms, SIGNED_UNIX_S)
    }

    fn cached(ticket: &Ticket) -> Capabilities {
        let sealed = ticket.clone().seal(&ring()).unwrap();
        Capabilities::new(&Credentials::from(sealed))
    }

    /// Whether to renew, if a capability is valid `age_s` after it was received.
    fn renewal(all: &Capabilities, end: u64, age_s: u64) -> Option<bool> {
        let now = BootInstant::now().after(Duration::from_secs(age_s));
        all.get_at(INODE, end, now).map(|lookup| lookup.renew)
    }

    #[test]
    fn one_caller_renews_a_capability_after_half_of_its_lifetime() {
        let ticket = ticket(u64::MAX);
        let all = cached(&ticket);
        assert_eq!(renewal(&all, 0, 0), None);
        assert_eq!(all.keep(INODE, capability(&ticket, 100)), (100, None));
        assert_eq!(renewal(&all, 100, 0), Some(false));
        assert_eq!(renewal(&all, 101, 0), None, "beyond its end");
        let half_s = WRITE_LIFETIME_S / 2 + 1;
        assert_eq!(renewal(&all, 0, half_s), Some(false), "valid for reading for longer");
        assert_eq!(renewal(&all, 100, half_s), Some(true));
        assert_eq!(renewal(&all, 100, half_s), Some(false), "a renewal is in progress");
        all.renewal_failed(INODE);
        assert_eq!(renewal(&all, 100, half_s), Some(true));
        assert_eq!(renewal(&all, 100, WRITE_LIFETIME_S - 4), None, "it would arrive too late");
        all.keep(INODE, capability(&ticket, 50));
        assert_eq!(renewal(&all, 50, half_s), Some(true));
        all.keep(INODE, capability(&ticket, 50));
        assert_eq!(renewal(&all, 0, LIFE_S / 2 + 1), Some(true));
        assert_eq!(renewal(&all, 0, LIFE_S - 4), None);
    }

    #[test]
    fn a_capability_that_expires_with_its_ticket_is_not_renewed() {
        let ticket = ticket(SIGNED_UNIX_S + 200);
        let all = cached(&ticket);
        all.keep(INODE, capability(&ticket, 100));
        for age_s in [0, 200, WRITE_LIFETIME_S - 1] {
            assert_eq!(renewal(&all, 100, age_s), Some(false), "a new one would expire no later");
        }
        assert_eq!(renewal(&all, 100, WRITE_LIFETIME_S), None);
    }
}
