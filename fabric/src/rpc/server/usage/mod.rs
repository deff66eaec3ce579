//! Usage of a server by its callers, for an administrator who looks for the source of its load.

mod table;

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::auth::ticket::Grant;

pub(super) use self::table::{ConnectionUsage, UsageReader, UsageTable};

/// Class of the request for a report, which no service uses for its calls.
pub(in crate::rpc) const USAGE_CLASS: u8 = 255;
/// Content of that request. The class selects the report; an older server takes the request for a
/// call, and cannot decode this.
pub(in crate::rpc) const USAGE_REQUEST: [u8; 12] = [0xff; 12];
/// Maximum number of callers in a report; the callers with the least load are one sum.
pub const ROWS_MAX: usize = 256;
/// Maximum length of a path in a report, which has the end of a longer one.
const PATH_BYTES_MAX: usize = 128;

/// A caller: a volume on a node, or a holder of the cluster's key at an address.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Caller {
    /// Inode of the directory of the caller's ticket; `None` for a holder of the cluster's key.
    pub volume: Option<u64>,
    /// Path of that directory when the ticket was issued.
    pub path: String,
    /// The node of the ticket; otherwise the address of the caller.
    pub host: String,
}

impl Caller {
    pub(super) fn new(grant: &Grant, address: IpAddr) -> Self {
        let address = || address.to_string();
        match grant.ticket() {
            None => Self { volume: None, path: String::new(), host: address() },
            Some(ticket) => {
                let mut start = ticket.path.len().saturating_sub(PATH_BYTES_MAX);
                while !ticket.path.is_char_boundary(start) {
                    start += 1;
                }
                let path = ticket.path.get(start..).unwrap_or_default().to_owned();
                let host = if ticket.node.is_empty() { address() } else { ticket.node.clone() };
                Self { volume: Some(ticket.directory), path, host }
            }
        }
    }
}

/// Counters of one class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Count {
    /// Calls that the server has accepted.
    pub operations: u64,
    /// Bytes of their requests.
    pub received_bytes: u64,
    /// Bytes of their replies.
    pub sent_bytes: u64,
}

impl Count {
    fn add(&mut self, other: Self) {
        self.operations = self.operations.saturating_add(other.operations);
        self.received_bytes = self.received_bytes.saturating_add(other.received_bytes);
        self.sent_bytes = self.sent_bytes.saturating_add(other.sent_bytes);
    }

    fn since(self, before: Self) -> Self {
        Self {
            operations: self.operations.saturating_sub(before.operations),
            received_bytes: self.received_bytes.saturating_sub(before.received_bytes),
            sent_bytes: self.sent_bytes.saturating_sub(before.sent_bytes),
        }
    }

    /// Order of rows: a call costs about as much as 4 KiB.
    fn load(self) -> u64 {
        let bytes = self.received_bytes.saturating_add(self.sent_bytes);
        bytes.saturating_add(self.operations.saturating_mul(4096))
    }
}

/// Counters by class.
pub type Counts = BTreeMap<u8, Count>;

fn add_all(sum: &mut Counts, counts: &Counts) {
    for (class, count) in counts {
        sum.entry(*class).or_default().add(*count);
    }
}

/// The counters since `before`, without classes that did not change.
fn since(counts: &Counts, before: &Counts) -> Counts {
    let changes = counts.iter().map(|(class, count)| {
        (*class, count.since(before.get(class).copied().unwrap_or_default()))
    });
    changes.filter(|(_, count)| *count != Count::default()).collect()
}

fn load(counts: &Counts) -> u64 {
    counts.values().map(|it| it.load()).fold(0, u64::saturating_add)
}

/// Usage of a server since the previous report on the same connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Time since the previous report; `None` for the first one, which has no counters.
    pub elapsed_ms: Option<u64>,
    /// Active callers, the most load first.
    pub callers: Vec<(Caller, Counts)>,
    /// The sum of all other callers.
    pub other: Counts,
}
