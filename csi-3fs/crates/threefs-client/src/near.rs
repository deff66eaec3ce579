//! Preference of near replicas for reads. Any serving replica may answer a read, so that the choice
//! affects only speed and traffic.
//!
//! The nearest replica is preferred as long as it keeps up: not while it is slow or overloaded, or
//! has many reads of this client in progress. Without a preference, reads are spread evenly.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use threefs_core::ids::NodeId;
use threefs_core::location::{Level, Location};
use threefs_core::routing::RoutingInfo;

/// Reads of this client that a preferred replica answers at the same time; further ones are spread.
const PREFERRED_READS_MAX: u32 = 32;
/// How long a slow replica is not preferred.
const SLOW_PAUSE: Duration = Duration::from_secs(1);

/// Distance of a replica from its reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Distance {
    Host,
    Rack,
    Zone,
    Other,
}

impl Distance {
    /// The innermost domain that both are in. Outer parts that only one of them states do not
    /// matter: the name of a host identifies it.
    pub(crate) fn between(reader: &Location, node: &Location) -> Self {
        let part = |level| (reader.part(level), node.part(level));
        let mut distance = Self::Other;
        for (level, within) in
            [(Level::Zone, Self::Zone), (Level::Rack, Self::Rack), (Level::Host, Self::Host)]
        {
            let (of_reader, of_node) = part(level);
            if of_reader.is_empty() || of_node.is_empty() {
                continue;
            }
            if of_reader != of_node {
                return distance;
            }
            distance = within;
        }
        distance
    }
}

/// A replica that may answer a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub distance: Distance,
    /// Whether it does not keep up.
    pub busy: bool,
    /// Attempts of this read that it has had.
    pub tried: u32,
}

/// Index of the replica for the next attempt: of those with the fewest attempts the nearest ones, in
/// turn. A busy one is as good as any other far one.
pub(crate) fn choose(candidates: &[Candidate], turn: usize) -> Option<usize> {
    let key = |it: &Candidate| (it.tried, if it.busy { Distance::Other } else { it.distance });
    let best = candidates.iter().map(key).min()?;
    let group = candidates.iter().enumerate().filter(|(_, it)| key(it) == best);
    let group: Vec<usize> = group.map(|(index, _)| index).collect();
    group.get(turn % group.len().max(1)).copied()
}

/// Bytes that a client has read, by the distance of the replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReadBytes {
    /// From the host of the client.
    pub host: u64,
    /// From another host of its rack.
    pub rack: u64,
    /// From another rack of its zone.
    pub zone: u64,
    /// From other zones, or from nodes of unknown location.
    pub other: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Load {
    reads: u32,
    slow_until: Option<Instant>,
}

/// Location of a client, and how the storage services near it keep up.
#[derive(Debug)]
pub(crate) struct Near {
    location: Location,
    slow: Duration,
    loads: Mutex<HashMap<NodeId, Load>>,
    bytes: [AtomicU64; 4],
}

impl Near {
    /// `slow`: duration of a read after which a replica does not keep up.
    pub(crate) fn new(location: Location, slow: Duration) -> Self {
        let bytes = std::array::from_fn(|_| AtomicU64::new(0));
        Self { location, slow, loads: Mutex::default(), bytes }
    }

    /// Distance of a node.
    pub(crate) fn distance(&self, routing: &RoutingInfo, node: NodeId) -> Distance {
        let node = routing.nodes.get(&node).map(|node| &node.location);
        node.map_or(Distance::Other, |node| Distance::between(&self.location, node))
    }

    /// Whether a node does not keep up.
    pub(crate) fn is_busy(&self, node: NodeId) -> bool {
        let loads = self.loads();
        loads.get(&node).is_some_and(|load| {
            load.reads >= PREFERRED_READS_MAX
                || load.slow_until.is_some_and(|until| Instant::now() < until)
        })
    }

    /// Records the start of a read at a node nearer than others; its end is recorded when the result
    /// is dropped. No choice depends on how far nodes keep up.
    pub(crate) fn start(&self, node: NodeId, distance: Distance) -> Option<Reading<'_>> {
        if distance == Distance::Other {
            return None;
        }
        self.loads().entry(node).or_default().reads += 1;
        Some(Reading { near: self, node, started: Instant::now(), overloaded: false })
    }

    /// Counts bytes that were read.
    pub(crate) fn count(&self, distance: Distance, bytes: usize) {
        self.bytes[distance as usize].fetch_add(bytes as u64, Relaxed);
    }

    pub(crate) fn read_bytes(&self) -> ReadBytes {
        let [host, rack, zone, other] = [0, 1, 2, 3].map(|it: usize| self.bytes[it].load(Relaxed));
        ReadBytes { host, rack, zone, other }
    }

    fn loads(&self) -> MutexGuard<'_, HashMap<NodeId, Load>> {
        self.loads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A read in progress.
pub(crate) struct Reading<'a> {
    near: &'a Near,
    node: NodeId,
    started: Instant,
    /// Whether the node refused it because of overload.
    pub overloaded: bool,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let now = Instant::now();
        let is_slow = self.overloaded || now.duration_since(self.started) > self.near.slow;
        let mut loads = self.near.loads();
        let load = loads.entry(self.node).or_default();
        load.reads = load.reads.saturating_sub(1);
        if is_slow {
            load.slow_until = Some(now + SLOW_PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn location(text: &str) -> Location {
        Location::try_from(text.to_owned()).unwrap()
    }

    #[test]
    fn the_distance_is_that_of_the_innermost_common_domain() {
        let of = |reader, node| Distance::between(&location(reader), &location(node));
        assert_eq!(of("A/r1/h1", "A/r1/h1"), Distance::Host);
        assert_eq!(of("A/r1/h1", "A/r1/h2"), Distance::Rack);
        assert_eq!(of("A/r1/h1", "A/r2/h3"), Distance::Zone);
        assert_eq!(of("A/r1/h1", "B/r1/h1"), Distance::Other, "names repeat in other zones");
        assert_eq!(of("A//h1", "A/r2/h2"), Distance::Zone);
        assert_eq!(of("//h1", "A/r1/h1"), Distance::Host);
        assert_eq!(of("A/r1/h1", "//h1"), Distance::Host);
        for unknown in ["", "//", "A"] {
            assert_eq!(of(unknown, "B/r1/h1"), Distance::Other);
            assert_eq!(of("", unknown), Distance::Other);
        }
    }

    fn candidate() -> impl Strategy<Value = Candidate> {
        let distances = [Distance::Host, Distance::Rack, Distance::Zone, Distance::Other];
        (prop::sample::select(distances.to_vec()), any::<bool>(), 0..3u32)
            .prop_map(|(distance, busy, tried)| Candidate { distance, busy, tried })
    }

    proptest! {
        #[test]
        fn the_nearest_replicas_that_keep_up_are_chosen_equally(
            candidates in prop::collection::vec(candidate(), 1..7),
        ) {
            let candidates: Vec<Candidate> =
                candidates.into_iter().map(|it| Candidate { tried: 0, ..it }).collect();
            let mut counts = vec![0; candidates.len()];
            for turn in 0..840 {
                counts[choose(&candidates, turn).unwrap()] += 1;
            }
            let keeps_up = |it: &&Candidate| !it.busy && it.distance < Distance::Other;
            let nearest = candidates.iter().filter(keeps_up).map(|it| it.distance).min();
            let expected = |it: &Candidate| match nearest {
                Some(nearest) => !it.busy && it.distance == nearest,
                // As without locations: busy and far ones alike.
                None => true,
            };
            let share = 840 / candidates.iter().filter(|it| expected(it)).count();
            for (it, count) in candidates.iter().zip(counts) {
                prop_assert_eq!(count, if expected(it) { share } else { 0 });
            }
        }

        #[test]
        fn further_attempts_reach_every_replica(
            mut candidates in prop::collection::vec(candidate(), 1..7), turn: usize,
        ) {
            candidates.iter_mut().for_each(|it| it.tried = 0);
            for round in 1..4 {
                for _ in 0..candidates.len() {
                    let chosen = choose(&candidates, turn).unwrap();
                    candidates[chosen].tried += 1;
                }
                prop_assert!(candidates.iter().all(|it| it.tried == round));
            }
        }
    }

    #[test]
    fn a_node_that_is_slow_overloaded_or_has_many_reads_is_busy() {
        let node = NodeId(1);
        let near = Near::new(Location::default(), Duration::from_secs(60));
        let mut readings: Vec<Reading<'_>> =
            (0..PREFERRED_READS_MAX).filter_map(|_| near.start(node, Distance::Zone)).collect();
        assert!(near.is_busy(node) && !near.is_busy(NodeId(2)));
        drop(readings.pop());
        assert!(!near.is_busy(node));
        drop(readings);
        near.start(node, Distance::Host).unwrap().overloaded = true;
        assert!(near.is_busy(node));
        let near = Near::new(Location::default(), Duration::ZERO);
        drop(near.start(node, Distance::Other));
        assert!(!near.is_busy(node), "far ones are not counted");
        drop(near.start(node, Distance::Rack));
        assert!(near.is_busy(node), "slower than the limit");
    }
}
