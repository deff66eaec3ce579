//! Counters of all connections, and what the readers of reports have seen.
//!
//! The counters of a connection belong to it, so that a call costs a few additions and no lock. A
//! report adds up the connections of each caller and subtracts what its reader has seen, so that
//! its rows are the callers with the most load now, not since the start of the server. Callers are
//! many and may be hostile: connections are bounded by the server, and of those that have ended
//! only the latest callers are kept; the rest is one sum.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::{Caller, Count, Counts, ROWS_MAX, Usage, add_all, load, since};

/// Callers whose connections have all ended, with their counters.
const ENDED_MAX: usize = 256;

/// Counters of one connection, until all its calls have ended.
#[derive(Debug)]
pub(crate) struct ConnectionUsage {
    number: u64,
    counters: Arc<Counters>,
    table: Arc<UsageTable>,
}

#[derive(Debug)]
struct Counters {
    caller: Arc<Caller>,
    /// Operations, received and sent bytes.
    classes: Vec<[AtomicU64; 3]>,
}

impl ConnectionUsage {
    /// Counts a call. An unknown class counts as the first one, as in the budgets.
    pub(crate) fn call(&self, class: u8, received_bytes: usize) {
        let [operations, received, _] = self.counters.class(class);
        operations.fetch_add(1, Relaxed);
        received.fetch_add(received_bytes as u64, Relaxed);
    }

    /// Counts a reply to a call.
    pub(crate) fn reply(&self, class: u8, sent_bytes: usize) {
        self.counters.class(class)[2].fetch_add(sent_bytes as u64, Relaxed);
    }
}

impl Counters {
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
        self.table.lock().end(self.number);
    }
}

/// All connections of a server.
#[derive(Debug)]
pub(crate) struct UsageTable {
    classes: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    connections: HashMap<u64, Arc<Counters>>,
    ended: HashMap<Arc<Caller>, Ended>,
    /// The counters of callers that have left `ended`.
    other: Counts,
}

#[derive(Debug, Default)]
struct Ended {
    /// Order of the ends: the number of the last connection when this one ended.
    at: u64,
    counts: Counts,
}

type Sums = HashMap<Arc<Caller>, Counts>;

/// What the connection of a reader of reports has seen. A few hundred bytes for each caller.
#[derive(Debug, Default)]
pub(crate) struct UsageReader(Option<Seen>);

#[derive(Debug)]
struct Seen {
    at: Instant,
    callers: Sums,
    total: Counts,
}

impl UsageTable {
    pub(crate) fn new(classes: usize) -> Arc<Self> {
        Arc::new(Self { classes: classes.max(1), state: Mutex::default() })
    }

    /// Counters of a new connection.
    pub(crate) fn start(self: &Arc<Self>, caller: Caller) -> ConnectionUsage {
        let classes = std::iter::repeat_with(Default::default).take(self.classes).collect();
        let counters = Arc::new(Counters { caller: Arc::new(caller), classes });
        let mut state = self.lock();
        state.next += 1;
        let number = state.next;
        state.connections.insert(number, Arc::clone(&counters));
        drop(state);
        ConnectionUsage { number, counters, table: Arc::clone(self) }
    }

    /// Usage since the previous report for this reader.
    pub(crate) fn report(&self, reader: &mut UsageReader) -> Usage {
        let (callers, total) = self.sums();
        let seen = Seen { at: Instant::now(), callers, total };
        let usage = reader.0.as_ref().map(|before| seen.since(before)).unwrap_or_default();
        reader.0 = Some(seen);
        usage
    }

    /// The sums of each caller, and of all callers. Of all callers they never decrease; of one they
    /// do only when it has left `ended`.
    fn sums(&self) -> (Sums, Counts) {
        // At one moment: a connection is open or has ended, never both and never neither.
        let (connections, mut callers, mut total) = {
            let state = self.lock();
            let connections: Vec<_> = state.connections.values().cloned().collect();
            let ended =
                state.ended.iter().map(|(it, ended)| (Arc::clone(it), ended.counts.clone()));
            (connections, ended.collect::<Sums>(), state.other.clone())
        };
        for connection in &connections {
            connection.add_to(callers.entry(Arc::clone(&connection.caller)).or_default());
        }
        callers.values().for_each(|counts| add_all(&mut total, counts));
        (callers, total)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seen {
    fn since(&self, before: &Self) -> Usage {
        let none = Counts::default();
        let mut active: Vec<(&Arc<Caller>, Counts)> = Vec::new();
        for (caller, counts) in &self.callers {
            let counts_before = before.callers.get(caller).unwrap_or(&none);
            // A caller that has left `ended` meanwhile counts from zero.
            let reset = counts_before.iter().any(|(class, before)| {
                let now = counts.get(class).copied().unwrap_or_default();
                before.since(now) != Count::default()
            });
            let delta = since(counts, if reset { &none } else { counts_before });
            if !delta.is_empty() {
                active.push((caller, delta));
            }
        }
        active.sort_by_cached_key(|(caller, delta)| (u64::MAX - load(delta), Arc::clone(caller)));
        active.truncate(ROWS_MAX);
        // Includes callers that have left `ended` since.
        let mut shown = Counts::default();
        active.iter().for_each(|(_, delta)| add_all(&mut shown, delta));
        let elapsed_ms = (self.at - before.at).as_millis() as u64;
        let callers = active.into_iter().map(|(caller, delta)| (Caller::clone(caller), delta));
        Usage {
            elapsed_ms: Some(elapsed_ms),
            callers: callers.collect(),
            other: since(&since(&self.total, &before.total), &shown),
        }
    }
}

impl State {
    fn end(&mut self, number: u64) {
        let Some(counters) = self.connections.remove(&number) else { return };
        self.next += 1;
        let ended = self.ended.entry(Arc::clone(&counters.caller)).or_default();
        ended.at = self.next;
        counters.add_to(&mut ended.counts);
        if self.ended.len() <= ENDED_MAX {
            return;
        }
        let oldest = self.ended.iter().min_by_key(|(_, ended)| ended.at);
        if let Some(caller) = oldest.map(|(caller, _)| Arc::clone(caller))
            && let Some(ended) = self.ended.remove(&caller)
        {
            add_all(&mut self.other, &ended.counts);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(number: u64) -> Caller {
        Caller { volume: Some(number), path: format!("/v/{number}"), host: "node".into() }
    }

    fn volumes(usage: &Usage) -> Vec<Option<u64>> {
        usage.callers.iter().map(|(caller, _)| caller.volume).collect()
    }

    fn operations(counts: &Counts) -> u64 {
        counts.values().map(|it| it.operations).sum()
    }

    fn total(usage: &Usage) -> u64 {
        let rows = usage.callers.iter().map(|(_, counts)| operations(counts));
        rows.sum::<u64>() + operations(&usage.other)
    }

    /// A reader that has seen everything so far.
    fn reader(table: &UsageTable) -> UsageReader {
        let mut reader = UsageReader::default();
        let first = table.report(&mut reader);
        assert_eq!(first, Usage::default(), "the first report has no counters");
        reader
    }

    #[test]
    fn the_connections_of_a_caller_are_one_row_and_the_most_load_is_first() {
        let table = UsageTable::new(2);
        let connections: Vec<_> = [1, 2, 2].map(|number| table.start(caller(number))).into();
        let mut reader = reader(&table);
        connections[0].call(0, 10);
        connections[1].call(1, 5);
        connections[2].call(9, 5);
        connections[2].reply(1, 1 << 20);
        let usage = table.report(&mut reader);
        assert_eq!(volumes(&usage), [Some(2), Some(1)]);
        let read = Count { operations: 1, received_bytes: 5, sent_bytes: 1 << 20 };
        let update = Count { operations: 1, received_bytes: 5, sent_bytes: 0 };
        assert_eq!(usage.callers[0].1, Counts::from([(0, update), (1, read)]));
        // The end of a connection neither repeats nor loses its counters.
        connections[0].call(0, 10);
        drop(connections);
        let usage = table.report(&mut reader);
        assert_eq!((volumes(&usage), total(&usage)), (vec![Some(1)], 1));
        assert_eq!(total(&table.report(&mut reader)), 0);
    }

    #[test]
    fn any_number_of_callers_is_bounded_and_loses_no_call() {
        let table = UsageTable::new(1);
        let steady = table.start(caller(0));
        let mut reader = reader(&table);
        for number in 1..=100_000 {
            let connection = table.start(caller(number));
            connection.call(0, 0);
            steady.call(0, 1 << 10);
        }
        let state = table.lock();
        assert_eq!((state.connections.len(), state.ended.len()), (1, ENDED_MAX));
        drop(state);
        let usage = table.report(&mut reader);
        assert_eq!(usage.callers.len(), ROWS_MAX);
        assert_eq!(usage.callers[0].0, caller(0));
        assert_eq!(total(&usage), 200_000);
        assert_eq!(reader.0.unwrap().callers.len(), ENDED_MAX + 1);
    }

    /// A sum of the least active callers since the start would contain the load of former rows.
    #[test]
    fn a_caller_that_was_quiet_is_first_as_soon_as_it_is_busy() {
        let table = UsageTable::new(1);
        let former: Vec<_> = (1..=1000).map(|number| table.start(caller(number))).collect();
        former.iter().for_each(|it| it.call(0, 1 << 40));
        let mut reader = reader(&table);
        former[0].call(0, 1);
        let newcomer = table.start(caller(0));
        newcomer.call(0, 100);
        let usage = table.report(&mut reader);
        assert_eq!(volumes(&usage), [Some(0), Some(1)]);
        assert_eq!(usage.other, Counts::default());
    }

    #[test]
    fn a_caller_that_was_forgotten_and_returns_counts_from_zero() {
        let table = UsageTable::new(1);
        let call = |number, times| {
            let connection = table.start(caller(number));
            (0..times).for_each(|_| connection.call(0, 0));
        };
        call(0, 1000);
        let mut reader = reader(&table);
        (1..=ENDED_MAX as u64).for_each(|number| call(number, 1));
        call(0, 7);
        let usage = table.report(&mut reader);
        let of_first = usage.callers.iter().find(|it| it.0 == caller(0)).unwrap();
        assert_eq!(operations(&of_first.1), 7);
        assert_eq!(total(&usage), ENDED_MAX as u64 + 7);
    }

    /// While calls and ends of connections are concurrent with reports, no call is lost or repeated.
    #[test]
    fn reports_add_up_while_connections_end() {
        const THREADS: u64 = 4;
        const CONNECTIONS: u64 = 10_000;
        let table = UsageTable::new(1);
        let mut reader = reader(&table);
        let mut sum = 0;
        let call = |number| {
            for _ in 0..CONNECTIONS {
                let connection = table.start(caller(number));
                connection.call(0, 0);
            }
        };
        std::thread::scope(|scope| {
            let calls: Vec<_> =
                (0..THREADS).map(|number| scope.spawn(move || call(number))).collect();
            while calls.iter().any(|it| !it.is_finished()) {
                sum += total(&table.report(&mut reader));
            }
        });
        assert_eq!(sum + total(&table.report(&mut reader)), THREADS * CONNECTIONS);
    }
}
