//! Credits for the bytes of one class of calls, pure: who may send now, in which order.
//!
//! Connections take turns, so one connection with a thousand requests does not delay another one
//! with a single request by more than one request. Within a connection the order is first in,
//! first out. No connection holds more than its share while it has something, and the connection
//! whose turn it is is never overtaken: a large request cannot be starved by small ones.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// Names a request for credits until it is granted or forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Credits of one class, in bytes.
#[derive(Debug)]
pub struct Credits<K> {
    free: usize,
    bytes_max: usize,
    share: usize,
    next_ticket: u64,
    peers: HashMap<K, Peer>,
    /// Connections with waiting requests, the next one to be served first.
    turn: VecDeque<K>,
}

#[derive(Debug, Default)]
struct Peer {
    held: usize,
    waiting: VecDeque<(Ticket, usize)>,
}

impl<K: Copy + Eq + Hash> Credits<K> {
    /// `share`: what one connection may hold at once; a single larger request may exceed it.
    #[must_use]
    pub fn new(bytes_max: usize, share: usize) -> Self {
        let bytes_max = bytes_max.max(1);
        Self {
            free: bytes_max,
            bytes_max,
            share: share.clamp(1, bytes_max),
            next_ticket: 0,
            peers: HashMap::new(),
            turn: VecDeque::new(),
        }
    }

    /// What a request of `bytes` is counted as: one that is larger than everything takes all.
    #[must_use]
    pub fn counted(&self, bytes: usize) -> usize {
        bytes.min(self.bytes_max)
    }

    /// Queues a request; [`Credits::grant`] says when it may go ahead.
    #[must_use]
    pub fn ask(&mut self, peer: K, bytes: usize) -> Ticket {
        self.next_ticket += 1;
        let (ticket, bytes) = (Ticket(self.next_ticket), self.counted(bytes));
        let entry = self.peers.entry(peer).or_default();
        if entry.waiting.is_empty() {
            self.turn.push_back(peer);
        }
        entry.waiting.push_back((ticket, bytes));
        ticket
    }

    /// The requests that may go ahead now, each with what it holds from now on.
    #[must_use]
    pub fn grant(&mut self) -> Vec<Ticket> {
        let mut granted = Vec::new();
        let mut skipped = 0;
        while skipped < self.turn.len() {
            let Some(&peer) = self.turn.front() else { break };
            let Some(entry) = self.peers.get_mut(&peer) else {
                self.turn.pop_front();
                continue;
            };
            let Some(&(ticket, bytes)) = entry.waiting.front() else {
                self.turn.pop_front();
                continue;
            };
            if entry.held > 0 && entry.held + bytes > self.share {
                // Its own share is used up: that is no reason for others to wait.
                self.turn.rotate_left(1);
                skipped += 1;
                continue;
            }
            if bytes > self.free {
                break;
            }
            entry.waiting.pop_front();
            entry.held += bytes;
            self.free -= bytes;
            self.turn.pop_front();
            if !entry.waiting.is_empty() {
                self.turn.push_back(peer);
            }
            granted.push(ticket);
            skipped = 0;
        }
        granted
    }

    /// Takes a request back that was not granted yet.
    pub fn forget(&mut self, peer: K, ticket: Ticket) {
        let Some(entry) = self.peers.get_mut(&peer) else { return };
        entry.waiting.retain(|(waiting, _)| *waiting != ticket);
        if entry.waiting.is_empty() {
            self.turn.retain(|it| *it != peer);
        }
        self.drop_if_idle(peer);
    }

    /// Gives back what a granted request holds, or a part of it.
    pub fn give_back(&mut self, peer: K, bytes: usize) {
        self.free += bytes;
        if let Some(entry) = self.peers.get_mut(&peer) {
            entry.held = entry.held.saturating_sub(bytes);
        }
        self.drop_if_idle(peer);
    }

    /// Whether a request waits because others hold the memory, not because of its own share.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.turn.iter().any(|peer| {
            self.peers.get(peer).is_some_and(|entry| {
                entry.waiting.front().is_some_and(|&(_, bytes)| {
                    bytes > self.free && (entry.held == 0 || entry.held + bytes <= self.share)
                })
            })
        })
    }

    /// Nothing is held and nothing waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.free == self.bytes_max && self.peers.is_empty()
    }

    fn drop_if_idle(&mut self, peer: K) {
        if self.peers.get(&peer).is_some_and(|it| it.held == 0 && it.waiting.is_empty()) {
            self.peers.remove(&peer);
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
        let greedy: Vec<Ticket> = (0..100).map(|_| credits.ask('a', 1)).collect();
        assert_eq!(credits.grant(), greedy[..2]);
        let modest = credits.ask('b', 1);
        credits.give_back('a', 1);
        assert_eq!(credits.grant(), [greedy[2]], "its turn had come before the other one asked");
        credits.give_back('a', 1);
        assert_eq!(credits.grant(), [modest]);
    }

    #[test]
    fn a_connection_keeps_to_its_share_and_a_large_request_to_all() {
        let mut credits = Credits::new(100, 25);
        let first = credits.ask('a', 20);
        let second = credits.ask('a', 20);
        let other = credits.ask('b', 60);
        assert_eq!(credits.grant(), [first, other], "60 is over the share of b, which has nothing");
        assert!(!credits.is_short(), "what waits, waits for its own share");
        credits.give_back('a', 20);
        assert_eq!(credits.grant(), [second]);
        let whole = credits.ask('c', 1_000);
        assert_eq!(credits.grant(), []);
        assert!(credits.is_short());
        credits.give_back('a', 20);
        credits.give_back('b', 60);
        assert_eq!(credits.grant(), [whole]);
        credits.give_back('c', credits.counted(1_000));
        assert!(credits.is_idle() && credits.turn.is_empty());
    }

    #[test]
    fn a_large_request_is_not_starved_by_small_ones() {
        let mut credits = Credits::new(10, 10);
        let held = credits.ask('a', 4);
        let large = credits.ask('b', 8);
        let small = credits.ask('c', 1);
        assert_eq!(credits.grant(), [held]);
        credits.give_back('a', 4);
        assert_eq!(credits.grant(), [large, small]);
    }

    proptest! {
        /// Whatever happens, nothing is lost, and everything is granted once others give back.
        #[test]
        fn all_are_served_in_the_end(steps in prop::collection::vec((0_u8..5, 0_usize..40, 0_u8..3), 1..200)) {
            let mut credits = Credits::new(32, 8);
            let mut waiting: Vec<(Ticket, u8, usize)> = Vec::new();
            let mut held: Vec<(Ticket, u8, usize)> = Vec::new();
            let settle = |credits: &mut Credits<u8>, waiting: &mut Vec<(Ticket, u8, usize)>, held: &mut Vec<_>| {
                for ticket in credits.grant() {
                    let at = waiting.iter().position(|it| it.0 == ticket).unwrap();
                    held.push(waiting.remove(at));
                }
            };
            for (peer, bytes, what) in steps {
                match what {
                    0 => {
                        let ticket = credits.ask(peer, bytes);
                        waiting.push((ticket, peer, credits.counted(bytes)));
                    }
                    1 if !held.is_empty() => {
                        let (_, peer, bytes) = held.remove(bytes % held.len());
                        credits.give_back(peer, bytes);
                    }
                    2 if !waiting.is_empty() => {
                        let (ticket, peer, _) = waiting.remove(bytes % waiting.len());
                        credits.forget(peer, ticket);
                    }
                    _ => {}
                }
                settle(&mut credits, &mut waiting, &mut held);
                let sum: usize = held.iter().map(|it| it.2).sum();
                prop_assert_eq!(credits.free + sum, 32);
            }
            while !(held.is_empty() && waiting.is_empty()) {
                let before = held.len() + waiting.len();
                if let Some((_, peer, bytes)) = held.pop() {
                    credits.give_back(peer, bytes);
                }
                settle(&mut credits, &mut waiting, &mut held);
                prop_assert!(held.len() + waiting.len() < before, "nothing moves any more");
            }
            prop_assert!(credits.is_idle());
        }
    }
}
