//! Credits for the bytes of one class of calls: fair scheduling of requests. Pure.
//!
//! Holders of the cluster's key are scheduled by connection, holders of tickets by volume, and
//! within a volume by connection. The next one is the one that holds the fewest bytes, and of
//! several the one that has waited longest (max-min fairness): peers that hold theirs equally long
//! take turns, and a slow peer, which holds them longer, gets no part of what a fast one returns. A
//! connection with a thousand requests therefore delays another one with a single request by at
//! most one request, and a volume gets no additional turns for additional connections. Within a
//! connection the order is first in, first out.
//!
//! A connection that holds credits is limited to its share. A volume is limited to its share over
//! all its connections, unless at least as much stays free as it would then hold: a single volume
//! may have half. All volumes together leave a part to services. A request that waits for its own
//! share does not delay others. A request that waits for free bytes is overtaken only by peers that
//! hold less, and by none once its own peer holds nothing, so small requests cannot starve a large
//! one.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

use super::call_slots::volume_limit;
use super::turns::{Turn, Turns};

/// Id of a request for credits until it is granted or withdrawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CreditRequest(pub u64);

/// Unit of scheduling.
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
    /// Holders whose connections can be scheduled.
    ready: Turns<Holder<K>>,
}

#[derive(Debug)]
struct Peer<K> {
    holder: Holder<K>,
    held_bytes: usize,
    waiting: VecDeque<(CreditRequest, usize)>,
    /// Its turn, if it has requests and is not parked.
    turn: Option<Turn>,
    /// The connection waits for its own share and is not scheduled until it returns credits.
    parked: bool,
}

/// The connections of a holder.
#[derive(Debug)]
struct HolderQueue<K> {
    held_bytes: usize,
    /// Its turn, if it has connections that can be scheduled.
    turn: Option<Turn>,
    /// Connections with waiting requests that are not parked.
    ready: Turns<K>,
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
            ready: Turns::default(),
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
        let entry = self.peers.entry(peer).or_insert_with(|| Peer {
            holder,
            held_bytes: 0,
            waiting: VecDeque::new(),
            turn: None,
            parked: false,
        });
        let first = entry.waiting.is_empty();
        entry.waiting.push_back((request, bytes));
        if first {
            self.enqueue(peer, holder);
        }
        request
    }

    /// Schedules a connection behind the others of its holder that hold as much.
    fn enqueue(&mut self, peer: K, holder: Holder<K>) {
        let Some(entry) = self.peers.get_mut(&peer) else { return };
        let queue = self.holders.entry(holder).or_insert_with(|| HolderQueue {
            held_bytes: 0,
            turn: None,
            ready: Turns::default(),
        });
        entry.turn = Some(queue.ready.push(peer, entry.held_bytes));
        if queue.turn.is_none() {
            queue.turn = Some(self.ready.push(holder, queue.held_bytes));
        }
    }

    /// Parks connections, from the first one on, whose own share has no room.
    fn park(&mut self, holder: Holder<K>) {
        let Some(queue) = self.holders.get_mut(&holder) else { return };
        while let Some((turn, peer)) = queue.ready.first() {
            if let Some(entry) = self.peers.get_mut(&peer) {
                if entry.fits(self.share) {
                    return;
                }
                entry.parked = true;
                entry.turn = None;
            }
            queue.ready.remove(turn);
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
        let mut next = self.ready.first();
        let mut volumes_wait = false;
        while let Some((turn, holder)) = next {
            self.park(holder);
            match self.next_of(holder) {
                Next::NoneReady => self.drop_turn(holder),
                // A volume that waits for the limit of all volumes is not overtaken by other
                // volumes.
                _ if volumes_wait && matches!(holder, Holder::Volume(_)) => {}
                Next::Grant(peer, bytes) => grants.extend(self.take(holder, peer, bytes)),
                Next::FreeBytes => break,
                // Does not delay other holders.
                Next::ConnectionShare | Next::VolumeShare => {}
                Next::AllVolumes => volumes_wait = true,
            }
            // A holder with a grant moves behind this turn: it holds more.
            next = self.ready.after(turn);
        }
        grants
    }

    /// Removes the turn of a holder without connections that can be scheduled.
    fn drop_turn(&mut self, holder: Holder<K>) {
        let turn = self.holders.get_mut(&holder).and_then(|queue| queue.turn.take());
        if let Some(turn) = turn {
            self.ready.remove(turn);
        }
    }

    /// The next request of a holder, or the limit that blocks it.
    fn next_of(&self, holder: Holder<K>) -> Next<K> {
        let Some(queue) = self.holders.get(&holder) else { return Next::NoneReady };
        let Some((_, peer)) = queue.ready.first() else { return Next::NoneReady };
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

    /// Grants the next request of a holder's connection.
    fn take(&mut self, holder: Holder<K>, peer: K, bytes: usize) -> Option<CreditRequest> {
        let (entry, queue) = (self.peers.get_mut(&peer)?, self.holders.get_mut(&holder)?);
        let (request, _) = entry.waiting.pop_front()?;
        entry.held_bytes += bytes;
        queue.held_bytes += bytes;
        self.free -= bytes;
        if matches!(holder, Holder::Volume(_)) {
            self.held_by_volumes += bytes;
        }
        if let Some(turn) = entry.turn.take() {
            queue.ready.remove(turn);
        }
        if !entry.waiting.is_empty() {
            entry.turn = Some(queue.ready.push(peer, entry.held_bytes));
        }
        if let Some(turn) = queue.turn.take() {
            self.ready.remove(turn);
        }
        if !queue.ready.is_empty() {
            queue.turn = Some(self.ready.push(holder, queue.held_bytes));
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
            && let Some(turn) = entry.turn.take()
            && let Some(queue) = self.holders.get_mut(&holder)
        {
            queue.ready.remove(turn);
            if queue.ready.is_empty() {
                self.drop_turn(holder);
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
                // Their turns come earlier, since they hold less.
                entry.turn = entry.turn.map(|turn| queue.ready.move_to(turn, entry.held_bytes));
                queue.turn = queue.turn.map(|turn| self.ready.move_to(turn, queue.held_bytes));
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
        self.ready.iter().any(|holder| short(&holder))
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

    /// Bytes that no request holds.
    #[cfg(test)]
    pub(super) fn free_bytes(&self) -> usize {
        self.free
    }

    /// True if no holder has a turn.
    #[cfg(test)]
    pub(super) fn nothing_ready(&self) -> bool {
        self.ready.is_empty() && self.holders.values().all(|queue| queue.ready.is_empty())
    }
}
