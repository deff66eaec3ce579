//! Usage of a server by its callers, for an administrator who looks for the source of its load.
//!
//! The counters of a connection belong to it, so that a call costs a few additions and no lock. A
//! report adds up the connections of each caller. Callers are many and may be hostile: connections
//! are bounded by the server, and of those that have ended only the latest callers are kept; the
//! rest is one sum.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use serde::{Deserialize, Serialize};

use crate::auth::ticket::Grant;

/// Class of the request for a report, which no service uses for its calls.
pub const USAGE_CLASS: u8 = 255;
/// Rows of a report; the callers with the least load are one sum.
pub const ROWS_MAX: usize = 256;
/// Callers whose connections have all ended, with their counters.
const ENDED_MAX: usize = 256;
/// Maximum length of a path in a report: the end of a longer one.
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
    /// Calls.
    pub operations: u64,
    /// Bytes of requests.
    pub received_bytes: u64,
    /// Bytes of replies.
    pub sent_bytes: u64,
}

impl Count {
    fn add(&mut self, other: Self) {
        self.operations = self.operations.saturating_add(other.operations);
        self.received_bytes = self.received_bytes.saturating_add(other.received_bytes);
        self.sent_bytes = self.sent_bytes.saturating_add(other.sent_bytes);
    }

    /// Order of rows: a call costs about as much as 4 KiB.
    fn load(self) -> u64 {
        let bytes = self.received_bytes.saturating_add(self.sent_bytes);
        bytes.saturating_add(self.operations.saturating_mul(4096))
    }
}

/// Counters by class, since the server started.
pub type Counts = BTreeMap<u8, Count>;

/// Usage of a server since it started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// A number of this run of the server: counters of two runs are not comparable.
    pub run: u64,
    /// Callers with their counters, the most load first.
    pub callers: Vec<(Caller, Counts)>,
    /// The sum of all other callers.
    pub other: Counts,
}

/// Counters of one connection.
#[derive(Debug)]
pub(super) struct ConnectionUsage {
    caller: Caller,
    classes: Vec<[AtomicU64; 3]>,
    table: Weak<UsageTable>,
}

impl ConnectionUsage {
    /// Counts a call. An unknown class counts as the first one, as in the budgets.
    pub(super) fn call(&self, class: u8, received_bytes: usize) {
        let [operations, received, _] = self.class(class);
        operations.fetch_add(1, Relaxed);
        received.fetch_add(received_bytes as u64, Relaxed);
    }

    /// Counts a reply to a call.
    pub(super) fn reply(&self, class: u8, sent_bytes: usize) {
        self.class(class)[2].fetch_add(sent_bytes as u64, Relaxed);
    }

    fn class(&self, class: u8) -> &[AtomicU64; 3] {
        // Every server has a class.
        self.classes.get(usize::from(class)).unwrap_or(&self.classes[0])
    }

    fn add_to(&self, counts: &mut Counts) {
        for (class, counters) in self.classes.iter().enumerate() {
            let [operations, received_bytes, sent_bytes] =
                [0, 1, 2].map(|index: usize| counters[index].load(Relaxed));
            let count = Count { operations, received_bytes, sent_bytes };
            if count != Count::default() {
                counts.entry(class as u8).or_default().add(count);
            }
        }
    }
}

impl Drop for ConnectionUsage {
    fn drop(&mut self) {
        if let Some(table) = self.table.upgrade() {
            table.lock().end(self);
        }
    }
}

/// All connections of a server.
#[derive(Debug)]
pub(super) struct UsageTable {
    run: u64,
    classes: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// Each removes itself when it ends.
    connections: HashMap<usize, Weak<ConnectionUsage>>,
    /// Callers with ended connections, and when the last one ended.
    ended: HashMap<Caller, (u64, Counts)>,
    other: Counts,
}

impl UsageTable {
    pub(super) fn new(classes: usize) -> Arc<Self> {
        Arc::new(Self { run: rand::random(), classes: classes.max(1), state: Mutex::default() })
    }

    /// Counters of a new connection.
    pub(super) fn start(self: &Arc<Self>, caller: Caller) -> Arc<ConnectionUsage> {
        let classes = std::iter::repeat_with(Default::default).take(self.classes).collect();
        let usage = Arc::new(ConnectionUsage { caller, classes, table: Arc::downgrade(self) });
        let key = Arc::as_ptr(&usage).addr();
        self.lock().connections.insert(key, Arc::downgrade(&usage));
        usage
    }

    /// The sums of all callers.
    pub(super) fn report(&self) -> Usage {
        let (connections, mut callers, mut other) = {
            let state = self.lock();
            let ended =
                state.ended.iter().map(|(caller, (_, counts))| (caller.clone(), counts.clone()));
            let connections: Vec<_> =
                state.connections.values().filter_map(Weak::upgrade).collect();
            (connections, ended.collect::<HashMap<_, _>>(), state.other.clone())
        };
        for connection in &connections {
            connection.add_to(callers.entry(connection.caller.clone()).or_default());
        }
        let mut callers: Vec<_> = callers.into_iter().collect();
        let load =
            |counts: &Counts| counts.values().map(|it| it.load()).fold(0, u64::saturating_add);
        callers.sort_by_cached_key(|(caller, counts)| (u64::MAX - load(counts), caller.clone()));
        for (_, counts) in callers.drain(ROWS_MAX.min(callers.len())..) {
            add_all(&mut other, &counts);
        }
        Usage { run: self.run, callers, other }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn end(&mut self, connection: &ConnectionUsage) {
        self.connections.remove(&std::ptr::from_ref(connection).addr());
        self.next += 1;
        let (ended_at, counts) = self.ended.entry(connection.caller.clone()).or_default();
        *ended_at = self.next;
        connection.add_to(counts);
        if self.ended.len() <= ENDED_MAX {
            return;
        }
        let oldest = self.ended.iter().min_by_key(|(_, (ended_at, _))| *ended_at);
        if let Some(caller) = oldest.map(|(caller, _)| caller.clone())
            && let Some((_, counts)) = self.ended.remove(&caller)
        {
            add_all(&mut self.other, &counts);
        }
    }
}

fn add_all(sum: &mut Counts, counts: &Counts) {
    for (class, count) in counts {
        sum.entry(*class).or_default().add(*count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(number: u64) -> Caller {
        Caller { volume: Some(number), path: format!("/v/{number}"), host: "node".into() }
    }

    fn operations(counts: &Counts) -> u64 {
        counts.values().map(|it| it.operations).sum()
    }

    fn total(usage: &Usage) -> u64 {
        usage.callers.iter().map(|(_, counts)| operations(counts)).sum::<u64>()
            + operations(&usage.other)
    }

    #[test]
    fn the_connections_of_a_caller_are_one_row_and_the_most_load_is_first() {
        let table = UsageTable::new(2);
        let connections: Vec<_> = [1, 2, 2].map(|number| table.start(caller(number))).into();
        connections[0].call(0, 10);
        connections[1].call(1, 5);
        connections[2].call(9, 5);
        connections[2].reply(1, 1 << 20);
        let before = table.report();
        assert_eq!(
            before.callers.iter().map(|it| it.0.volume).collect::<Vec<_>>(),
            [Some(2), Some(1)]
        );
        let read = Count { operations: 1, received_bytes: 5, sent_bytes: 1 << 20 };
        let update = Count { operations: 1, received_bytes: 5, sent_bytes: 0 };
        assert_eq!(before.callers[0].1, Counts::from([(0, update), (1, read)]));
        // Counters outlive their connections.
        drop(connections);
        assert_eq!(table.report(), before);
    }

    #[test]
    fn any_number_of_callers_is_bounded_and_loses_no_call() {
        let table = UsageTable::new(1);
        let steady = table.start(caller(0));
        for number in 1..=100_000 {
            let connection = table.start(caller(number));
            connection.call(0, 0);
            steady.call(0, 1 << 10);
        }
        let state = table.lock();
        assert_eq!((state.connections.len(), state.ended.len()), (1, ENDED_MAX));
        drop(state);
        let usage = table.report();
        assert_eq!(usage.callers.len(), ROWS_MAX);
        assert_eq!(usage.callers[0].0, caller(0));
        assert_eq!(total(&usage), 200_000);
    }
}
