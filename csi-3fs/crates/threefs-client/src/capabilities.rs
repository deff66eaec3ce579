//! Capabilities that a client with a ticket shows the storage services, asked of the metadata
//! service when a file's chunks are first used, and kept until they expire. The first request in the
//! second half of a capability's lifetime renews it in the background, while requests continue to use
//! the old one. Files that are idle are not renewed.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fabric::auth::capability::{Capability, LIFE_S};
use fabric::auth::credentials::{Credential, Credentials};
use fabric::boot_instant::BootInstant;
use fabric::rpc::decode;
use threefs_core::ids::InodeId;
use threefs_core::terms::{FileTerms, WRITE_LIFETIME_S};

/// Files with a capability at once: 10 MiB. Beyond it all are asked for again.
const KEPT_MAX: usize = 65_536;
/// Not used so shortly before the end: it has to arrive.
const MARGIN: Duration = Duration::from_secs(5);

pub(crate) struct Capabilities {
    credentials: Credentials,
    kept: Mutex<HashMap<InodeId, Kept>>,
}

struct Kept {
    capability: Capability,
    /// Bytes of the file below may be written.
    end: u64,
    /// When it came: the clock of the service that signed it may differ from this one's.
    came: BootInstant,
    /// It may be written until then, in seconds since 1970.
    until_unix_s: u64,
    /// A new one is being asked for.
    renewing: bool,
}

/// A kept capability.
#[derive(Debug)]
pub(crate) struct Found {
    pub capability: Capability,
    /// It is time for a new one, and the finder is the one to ask for it.
    pub renew: bool,
}

impl Capabilities {
    pub(crate) fn new(credentials: &Credentials) -> Self {
        Self { credentials: credentials.clone(), kept: Mutex::default() }
    }

    /// Whether this client holds a ticket, and so needs capabilities.
    pub(crate) fn needed(&self) -> bool {
        matches!(self.credentials.current(), Credential::Ticket(_))
    }

    /// One that is good for writing the bytes below `end`; with 0 for reading. A storage service that
    /// does not take it says so, and it is forgotten.
    pub(crate) fn get(&self, inode: InodeId, end: u64) -> Option<Found> {
        self.get_at(inode, end, BootInstant::now())
    }

    fn get_at(&self, inode: InodeId, end: u64, now: BootInstant) -> Option<Found> {
        let Credential::Ticket(sealed) = self.credentials.current() else { return None };
        let mut kept = self.lock();
        let known = kept.get_mut(&inode).filter(|known| known.end >= end)?;
        let (ends_unix_s, life_s) = match end {
            0 => (known.capability.expires_unix_s(), LIFE_S),
            _ => (known.until_unix_s, WRITE_LIFETIME_S),
        };
        let life = Duration::from_secs(life_s);
        let left = life.saturating_sub(now.since(known.came));
        // A new one would end no later.
        let is_last = ends_unix_s >= sealed.ticket().expires_unix_s;
        if left.is_zero() || (left <= MARGIN && !is_last) {
            return None;
        }
        let renew = left <= life / 2 && !is_last && !known.renewing;
        known.renewing |= renew;
        Some(Found { capability: known.capability.clone(), renew })
    }

    /// Keeps a capability; returns the end of the bytes that it allows to be written.
    pub(crate) fn keep(&self, inode: InodeId, capability: Capability) -> u64 {
        let ends = capability.expires_unix_s();
        // Storage says what is wrong with terms that cannot be read.
        let (end, until_unix_s) = decode(capability.terms())
            .map_or((u64::MAX, ends), |terms: FileTerms| (terms.end, terms.until_unix_s.min(ends)));
        let mut kept = self.lock();
        if kept.len() >= KEPT_MAX {
            kept.clear();
        }
        let came = BootInstant::now();
        kept.insert(inode, Kept { capability, end, came, until_unix_s, renewing: false });
        end
    }

    /// The one that was asked for did not come: the next who needs it asks again.
    pub(crate) fn not_renewed(&self, inode: InodeId) {
        if let Some(known) = self.lock().get_mut(&inode) {
            known.renewing = false;
        }
    }

    pub(crate) fn forget(&self, inode: InodeId) {
        self.lock().remove(&inode);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<InodeId, Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use fabric::auth::Key;
    use fabric::auth::keys::KeyRing;
    use fabric::auth::ticket::Ticket;
    use fabric::rpc::encode;
    use threefs_core::ids::{TableId, TableVersion};
    use threefs_core::layout::{ChainChoice, Layout};

    use super::*;

    const INODE: InodeId = InodeId(7);
    /// A clock that has nothing to do with this machine's.
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

    /// Up to where it lets write.
    fn capability(ticket: &Ticket, end: u64) -> Capability {
        let layout = Layout {
            table: TableId(1),
            table_version: TableVersion(1),
            chunk_bytes: 1 << 20,
            stripe: 1,
            chains: ChainChoice::Explicit(Vec::new()),
        };
        let until_unix_s = SIGNED_UNIX_S + WRITE_LIFETIME_S;
        let terms = encode(&FileTerms { layout, end, until_unix_s }).unwrap();
        Capability::sign(&ring(), ticket, INODE.0, terms.into(), SIGNED_UNIX_S)
    }

    fn kept(ticket: &Ticket) -> Capabilities {
        let sealed = ticket.clone().seal(&ring()).unwrap();
        Capabilities::new(&Credentials::from(sealed))
    }

    /// Whether to renew it, if one is good, so long after it came.
    fn found(all: &Capabilities, end: u64, age_s: u64) -> Option<bool> {
        let now = BootInstant::now().after(Duration::from_secs(age_s));
        all.get_at(INODE, end, now).map(|found| found.renew)
    }

    #[test]
    fn one_finder_renews_it_from_half_of_its_life_on_and_all_use_it_meanwhile() {
        let ticket = ticket(u64::MAX);
        let all = kept(&ticket);
        assert_eq!(found(&all, 0, 0), None);
        assert_eq!(all.keep(INODE, capability(&ticket, 100)), 100);
        assert_eq!(found(&all, 100, 0), Some(false));
        assert_eq!(found(&all, 101, 0), None, "it does not reach");
        let half_s = WRITE_LIFETIME_S / 2 + 1;
        assert_eq!(found(&all, 0, half_s), Some(false), "for reading it is good for long");
        assert_eq!(found(&all, 100, half_s), Some(true));
        assert_eq!(found(&all, 100, half_s), Some(false), "a renewal is under way");
        all.not_renewed(INODE);
        assert_eq!(found(&all, 100, half_s), Some(true));
        assert_eq!(found(&all, 100, WRITE_LIFETIME_S - 4), None, "it would come too late");
        all.keep(INODE, capability(&ticket, 50));
        assert_eq!(found(&all, 50, half_s), Some(true));
        all.keep(INODE, capability(&ticket, 50));
        assert_eq!(found(&all, 0, LIFE_S / 2 + 1), Some(true));
        assert_eq!(found(&all, 0, LIFE_S - 4), None);
    }

    #[test]
    fn one_that_ends_with_its_ticket_is_not_renewed() {
        let ticket = ticket(SIGNED_UNIX_S + 200);
        let all = kept(&ticket);
        all.keep(INODE, capability(&ticket, 100));
        for age_s in [0, 200, WRITE_LIFETIME_S - 1] {
            assert_eq!(found(&all, 100, age_s), Some(false), "a new one would end no later");
        }
        assert_eq!(found(&all, 100, WRITE_LIFETIME_S), None);
    }
}
