//! Credits for the bytes of one class of calls: fair scheduling of requests. Pure.
//!
//! Holders of the cluster's key are scheduled round-robin by connection, holders of tickets by
//! volume, and within a volume by connection. A connection with a thousand requests therefore
//! delays another one with a single request by at most one request, and a volume gets no additional
//! turns for additional connections. Within a connection the order is first in, first out.
//!
//! A connection that holds credits is limited to its share. A volume is limited to its share over
//! all its connections, unless at least as much stays free as it would then hold: a single volume
//! may have half. All volumes together leave a part to services. A request that waits for its own
//! share does not delay others. A request that waits for free bytes is never overtaken, so that
//! small requests cannot starve a large one.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

use super::call_slots::volume_limit;

/// Id of a request for credits until it is granted or withdrawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CreditRequest(pub u64);

/// Unit of round-robin scheduling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Holder<K> {
    Service(K),
    Volume(u64),
}

/// Credits of one class, in bytes.
#[derive(Debug)]
pub struct Credits<K> {
    free: usize,
    bytes_max: usize,
    share: usize,
    /// Bytes that volumes hold in total.
    held_by_volumes: usize,
    next_request: u64,
    peers: HashMap<K, Peer<K>>,
    holders: HashMap<Holder<K>, HolderQueue<K>>,
    /// Holders whose connections can be scheduled, the next one first.
    ready: VecDeque<Holder<K>>,
}

#[derive(Debug)]
struct Peer<K> {
    holder: Holder<K>,
    held_bytes: usize,
    waiting: VecDeque<(CreditRequest, usize)>,
    /// The connection waits for its own share and is not scheduled until it returns credits.
    parked: bool,
}

/// The connections of a holder.
#[derive(Debug)]
struct HolderQueue<K> {
    held_bytes: usize,
    /// Connections with waiting requests that are not parked, the next one first.
    ready: VecDeque<K>,
}

/// Limit that blocks a holder's next request.
enum Next<K> {
    Grant(K, usize),
    /// None of its connections can be scheduled.
    NoneReady,
    /// The share of each of its connections.
    ConnectionShare,
    /// The share of the volume itself.
    VolumeShare,
    /// The limit of all volumes.
    AllVolumes,
    /// The total.
    FreeBytes,
}

impl<K> Peer<K> {
    /// True if the next request is within the share, or no credits are held.
    fn fits(&self, share: usize) -> bool {
        self.waiting
            .front()
            .is_some_and(|(_, bytes)| self.held_bytes == 0 || self.held_bytes + bytes <= share)
    }
}

impl<K: Copy + Eq + Hash> Credits<K> {
    /// `share`: maximum bytes that one connection or volume holds at once; a single larger request
    /// may exceed it.
    #[must_use]
    pub fn new(bytes_max: usize, share: usize) -> Self {
        let bytes_max = bytes_max.max(1);
        Self {
            free: bytes_max,
            bytes_max,
            share: share.clamp(1, bytes_max),
            held_by_volumes: 0,
            next_request: 0,
            peers: HashMap::new(),
            holders: HashMap::new(),
            ready: VecDeque::new(),
        }
    }

    /// Number of bytes that a request counts as: at most the total, and at least one, so that every
    /// request holds something to return.
    #[must_use]
    pub fn credits_of(&self, bytes: usize) -> usize {
        bytes.clamp(1, self.bytes_max)
    }

    /// Queues a request of a connection, for `volume` or for a service; [`Credits::grant`] returns
    /// it when it may proceed.
    #[must_use]
    pub fn request(&mut self, peer: K, volume: Option<u64>, bytes: usize) -> CreditRequest {
        self.next_request += 1;
        let (request, bytes) = (CreditRequest(self.next_request), self.credits_of(bytes));
        let holder = volume.map_or(Holder::Service(peer), Holder::Volume);
        let new = || Peer { holder, held_bytes: 0, waiting: VecDeque::new(), parked: false };
        let entry = self.peers.entry(peer).or_insert_with(new);
        let first = entry.waiting.is_empty();
        entry.waiting.push_back((request, bytes));
        if first {
            self.enqueue(peer, holder);
        }
        request
    }

    /// Schedules a connection behind the others of its holder.
    fn enqueue(&mut self, peer: K, holder: Holder<K>) {
        let queue = self.holders.entry(holder);
        let queue = queue.or_insert_with(|| HolderQueue { held_bytes: 0, ready: VecDeque::new() });
        if queue.ready.is_empty() {
            self.ready.push_back(holder);
        }
        queue.ready.push_back(peer);
    }

    /// Parks connections, from the first one on, whose own share has no room.
    fn park(&mut self, holder: Holder<K>) {
        let Some(queue) = self.holders.get_mut(&holder) else { return };
        while let Some(peer) = queue.ready.front() {
            match self.peers.get_mut(peer) {
                Some(entry) if entry.fits(self.share) => return,
                Some(entry) => entry.parked = true,
                None => {}
            }
            queue.ready.pop_front();
        }
    }

    /// Schedules a parked connection again: its share has more room, or its next request changed.
    fn unpark(&mut self, peer: K) {
        let Some(entry) = self.peers.get_mut(&peer) else { return };
        if std::mem::take(&mut entry.parked) && !entry.waiting.is_empty() {
            let holder = entry.holder;
            self.enqueue(peer, holder);
        }
    }

    /// Grants the requests that may proceed now; each holds its credits from now on.
    #[must_use]
    pub fn grant(&mut self) -> Vec<CreditRequest> {
        let mut grants = Vec::new();
        let mut at = 0;
        let mut volumes_wait = false;
        while let Some(&holder) = self.ready.get(at) {
            self.park(holder);
            match self.next_of(holder) {
                Next::NoneReady => drop(self.ready.remove(at)),
                // A volume that waits for the limit of all volumes is not overtaken by other
                // volumes.
                _ if volumes_wait && matches!(holder, Holder::Volume(_)) => at += 1,
                // The next holder then moves to this position.
                Next::Grant(peer, bytes) => grants.extend(self.take(at, holder, peer, bytes)),
                Next::FreeBytes => break,
                // Does not delay other holders.
                Next::ConnectionShare | Next::VolumeShare => at += 1,
                Next::AllVolumes => {
                    volumes_wait = true;
                    at += 1;
                }
            }
        }
        grants
    }

    /// The next request of a holder, or the limit that blocks it.
    fn next_of(&self, holder: Holder<K>) -> Next<K> {
        let Some(queue) = self.holders.get(&holder) else { return Next::NoneReady };
        let Some(&peer) = queue.ready.front() else { return Next::NoneReady };
        let entry = self.peers.get(&peer).filter(|entry| entry.fits(self.share));
        let Some(&(_, bytes)) = entry.and_then(|entry| entry.waiting.front()) else {
            return Next::ConnectionShare;
        };
        if matches!(holder, Holder::Volume(_)) {
            let share = self.share.max(self.free.saturating_sub(bytes));
            if queue.held_bytes > 0 && queue.held_bytes + bytes > share {
                return Next::VolumeShare;
            }
            if self.held_by_volumes > 0
                && self.held_by_volumes + bytes > volume_limit(self.bytes_max)
            {
                return Next::AllVolumes;
            }
        }
        if bytes > self.free { Next::FreeBytes } else { Next::Grant(peer, bytes) }
    }

    /// Grants the next request of a holder's connection; `at` is the position of the holder.
    fn take(
        &mut self,
        at: usize,
        holder: Holder<K>,
        peer: K,
        bytes: usize,
    ) -> Option<CreditRequest> {
        let (entry, queue) = (self.peers.get_mut(&peer)?, self.holders.get_mut(&holder)?);
        let (request, _) = entry.waiting.pop_front()?;
        entry.held_bytes += bytes;
        queue.held_bytes += bytes;
        self.free -= bytes;
        if matches!(holder, Holder::Volume(_)) {
            self.held_by_volumes += bytes;
        }
        queue.ready.pop_front();
        if !entry.waiting.is_empty() {
            queue.ready.push_back(peer);
        }
        self.ready.remove(at);
        if !queue.ready.is_empty() {
            self.ready.push_back(holder);
        }
        Some(request)
    }

    /// Withdraws a request that has not been granted.
    pub fn cancel(&mut self, peer: K, request: CreditRequest) {
        let Some(entry) = self.peers.get_mut(&peer) else { return };
        entry.waiting.retain(|(waiting, _)| *waiting != request);
        let holder = entry.holder;
        if entry.parked {
            // The request behind it may be smaller.
            self.unpark(peer);
        } else if entry.waiting.is_empty()
            && let Some(queue) = self.holders.get_mut(&holder)
        {
            queue.ready.retain(|it| *it != peer);
            if queue.ready.is_empty() {
                self.ready.retain(|it| *it != holder);
            }
        }
        self.drop_if_idle(peer);
    }

    /// Returns the credits of a granted request, or a part of them.
    pub fn release(&mut self, peer: K, bytes: usize) {
        self.free += bytes;
        if let Some(entry) = self.peers.get_mut(&peer) {
            entry.held_bytes = entry.held_bytes.saturating_sub(bytes);
            if let Some(queue) = self.holders.get_mut(&entry.holder) {
                queue.held_bytes = queue.held_bytes.saturating_sub(bytes);
            }
            if matches!(entry.holder, Holder::Volume(_)) {
                self.held_by_volumes = self.held_by_volumes.saturating_sub(bytes);
            }
        }
        self.unpark(peer);
        self.drop_if_idle(peer);
    }

    /// True if a request waits for memory that a connection of a service, or of this volume, may
    /// hold: it is not blocked by its own share or by the share of another volume.
    #[must_use]
    pub fn is_short(&self, volume: Option<u64>) -> bool {
        let short = |holder: &Holder<K>| match self.next_of(*holder) {
            Next::FreeBytes | Next::AllVolumes => true,
            Next::VolumeShare => volume.is_some_and(|volume| *holder == Holder::Volume(volume)),
            Next::Grant(..) | Next::ConnectionShare | Next::NoneReady => false,
        };
        self.ready.iter().any(short)
    }

    /// True if no credits are held and no request waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.free == self.bytes_max && self.peers.is_empty() && self.holders.is_empty()
    }

    fn drop_if_idle(&mut self, peer: K) {
        let Some(entry) = self.peers.get(&peer) else { return };
        if entry.held_bytes > 0 || !entry.waiting.is_empty() {
            return;
        }
        let holder = entry.holder;
        self.peers.remove(&peer);
        if self.holders.get(&holder).is_some_and(|it| it.held_bytes == 0 && it.ready.is_empty()) {
            self.holders.remove(&holder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn connections_take_turns() {
        let mut credits = Credits::new(2, 2);
        let greedy: Vec<CreditRequest> = (0..100).map(|_| credits.request('a', None, 1)).collect();
        assert_eq!(credits.grant(), greedy[..2]);
        let modest = credits.request('b', None, 1);
        credits.release('a', 1);
        assert_eq!(credits.grant(), [modest], "whose own share is used up has no turn");
        credits.release('a', 1);
        assert_eq!(credits.grant(), [greedy[2]]);
    }

    #[test]
    fn a_connection_is_limited_to_its_share_and_a_large_request_to_the_total() {
        let mut credits = Credits::new(100, 25);
        let first = credits.request('a', None, 20);
        let second = credits.request('a', None, 20);
        let other = credits.request('b', None, 60);
        assert_eq!(credits.grant(), [first, other], "60 is over the share of b, which has nothing");
        assert!(!credits.is_short(None), "what waits, waits for its own share");
        credits.release('a', 20);
        assert_eq!(credits.grant(), [second]);
        let whole = credits.request('c', None, 1_000);
        assert_eq!(credits.grant(), []);
        assert!(credits.is_short(None));
        credits.release('a', 20);
        credits.release('b', 60);
        assert_eq!(credits.grant(), [whole]);
        credits.release('c', credits.credits_of(1_000));
        assert!(credits.is_idle() && credits.ready.is_empty());
    }

    #[test]
    fn a_large_request_is_not_starved_by_small_ones() {
        let mut credits = Credits::new(10, 10);
        let first = credits.request('a', None, 4);
        let large = credits.request('b', None, 8);
        let small = credits.request('c', None, 1);
        assert_eq!(credits.grant(), [first]);
        credits.release('a', 4);
        assert_eq!(credits.grant(), [large, small]);
    }

    /// Total credits of the requests of `of` if each of them requests as much as it may.
    fn grants_of(credits: &mut Credits<(u64, u8)>, of: u64, connections: u8) -> Vec<(u64, u8)> {
        let mut peer_of_request = HashMap::new();
        for connection in 0..connections {
            let peer = (of, connection);
            for _ in 0..100 {
                peer_of_request.insert(credits.request(peer, (of > 0).then_some(of), 1), peer);
            }
        }
        let peers: Vec<_> =
            credits.grant().iter().map(|it| peer_of_request.remove(it).unwrap()).collect();
        for (request, peer) in peer_of_request {
            credits.cancel(peer, request);
        }
        peers
    }

    /// A grant examines no connection that waits for its own share, whatever their number.
    #[test]
    fn connections_at_their_share_have_no_turn_until_they_release_memory() {
        let mut credits = Credits::new(1_000, 10);
        for peer in 0..50 {
            let _ = (credits.request(peer, Some(1), 1), credits.request(peer, Some(1), 100));
        }
        assert_eq!(credits.grant().len(), 50);
        assert!(credits.ready.is_empty() && credits.holders[&Holder::Volume(1)].ready.is_empty());
        credits.release(7, 1);
        assert_eq!(credits.grant(), [CreditRequest(16)], "it holds nothing");
        let small = credits.request(8, Some(1), 1);
        assert_eq!(credits.grant(), [], "behind the large one of its connection");
        credits.cancel(8, CreditRequest(18));
        assert_eq!(credits.grant(), [small]);
    }

    #[test]
    fn a_volumes_share_does_not_depend_on_its_number_of_connections() {
        let mut credits = Credits::new(64, 8);
        let alone = grants_of(&mut credits, 1, 50);
        assert_eq!(alone.len(), 32, "as much stays free");
        let one = grants_of(&mut credits, 2, 1);
        assert_eq!(one.len(), 8, "a connection has its share");
        let many = grants_of(&mut credits, 3, 50);
        assert_eq!(many.len(), 8, "all volumes leave a quarter to services");
        let services = grants_of(&mut credits, 0, 50);
        assert_eq!(services.len(), 16);
        for peer in [alone, one, many, services].concat() {
            credits.release(peer, 1);
        }
        assert!(credits.is_idle() && credits.ready.is_empty());
    }

    #[test]
    fn a_volume_at_its_share_waits_for_memory_of_its_connections() {
        let mut credits = Credits::new(64, 8);
        let _ = (
            credits.request(0, None, 48),
            credits.request(1, Some(1), 8),
            credits.request(2, Some(1), 1),
        );
        assert_eq!(credits.grant().len(), 2);
        assert!(credits.is_short(Some(1)));
        assert!(!credits.is_short(Some(2)) && !credits.is_short(None), "others have no part in it");
    }

    #[test]
    fn volumes_take_turns_however_many_connections_they_have() {
        let mut credits = Credits::new(4, 4);
        let all: Vec<CreditRequest> = (0..4).map(|_| credits.request(0, None, 1)).collect();
        assert_eq!(credits.grant(), all);
        let many: Vec<CreditRequest> =
            (1..=50).map(|peer| credits.request(peer, Some(1), 1)).collect();
        let one: Vec<CreditRequest> = (0..2).map(|_| credits.request(99, Some(2), 1)).collect();
        let mut grants = Vec::new();
        for _ in 0..3 {
            credits.release(0, 1);
            grants.extend(credits.grant());
        }
        assert_eq!(grants, [many[0], one[0], many[1]]);
        credits.release(1, 1);
        assert_eq!(credits.grant(), [one[1]]);
    }

    #[test]
    fn a_waiting_volume_is_overtaken_by_services_but_not_by_other_volumes() {
        let mut credits = Credits::new(16, 8);
        let first = credits.request(1, Some(1), 8);
        assert_eq!(credits.grant(), [first]);
        let large = credits.request(2, Some(2), 6);
        let small = credits.request(3, Some(3), 1);
        let service = credits.request(4, None, 4);
        assert_eq!(credits.grant(), [service]);
        assert!(credits.is_short(None));
        credits.release(1, 8);
        assert_eq!(credits.grant(), [large, small]);
    }

    proptest! {
        /// No credits are lost in any sequence, and every request is granted once others return
        /// theirs.
        #[test]
        fn all_waiters_are_served(steps in prop::collection::vec((0_u8..5, 0_usize..40, 0_u8..3), 1..200)) {
            let mut credits = Credits::new(32, 8);
            // Two services, and two volumes, one with two connections.
            let volume = |peer: u8| (peer > 1).then_some(u64::from(peer / 2));
            let mut waiting: Vec<(CreditRequest, u8, usize)> = Vec::new();
            let mut grants: Vec<(CreditRequest, u8, usize)> = Vec::new();
            let settle = |credits: &mut Credits<u8>, waiting: &mut Vec<(CreditRequest, u8, usize)>, grants: &mut Vec<_>| {
                for request in credits.grant() {
                    let at = waiting.iter().position(|it| it.0 == request).unwrap();
                    grants.push(waiting.remove(at));
                }
            };
            for (peer, bytes, what) in steps {
                match what {
                    0 => {
                        let request = credits.request(peer, volume(peer), bytes);
                        waiting.push((request, peer, credits.credits_of(bytes)));
                    }
                    1 if !grants.is_empty() => {
                        let (_, peer, bytes) = grants.remove(bytes % grants.len());
                        credits.release(peer, bytes);
                    }
                    2 if !waiting.is_empty() => {
                        let (request, peer, _) = waiting.remove(bytes % waiting.len());
                        credits.cancel(peer, request);
                    }
                    _ => {}
                }
                settle(&mut credits, &mut waiting, &mut grants);
                let sum: usize = grants.iter().map(|it| it.2).sum();
                prop_assert_eq!(credits.free + sum, 32);
            }
            while !(grants.is_empty() && waiting.is_empty()) {
                let before = grants.len() + waiting.len();
                if let Some((_, peer, bytes)) = grants.pop() {
                    credits.release(peer, bytes);
                }
                settle(&mut credits, &mut waiting, &mut grants);
                prop_assert!(grants.len() + waiting.len() < before, "nothing moves any more");
            }
            prop_assert!(credits.is_idle());
        }
    }
}
