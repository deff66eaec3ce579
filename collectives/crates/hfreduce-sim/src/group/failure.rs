//! Failure handling, with the driver's rules: detection, the abort reason and its propagation.

use hfreduce_core::DataHead;
use hfreduce_core::credit::CLASSES;
use hfreduce_core::error::{AbortReason, ErrorKind};
use hfreduce_core::tree::{Violation, Waiting};
use hfreduce_transport::wire::{Frame, Head};

use super::{EXIT_WITHIN, Event, Group, LOCAL_LATENCY, Life, Message, SLOT_BYTES, TICK};
use crate::cluster::allreduce_print;
use crate::event_queue::MILLISECOND;
use crate::scenario::{Bug, Fault, Garbage};
use crate::seed::Seed;

impl Group<'_> {
    pub(super) fn violated(&mut self, node: usize, link: usize, why: Violation) {
        let (owner, peer) = (self.owner(node), self.owner(self.nodes[node].ends[link].0));
        let cause = match why {
            Violation::Mismatch { .. } => self.blame(ErrorKind::Mismatch, owner, peer, ""),
            Violation::Protocol(why) => self.blame(ErrorKind::Protocol, owner, peer, &why),
        };
        self.fail(owner, cause, None);
    }

    pub(super) fn fail(&mut self, rank: usize, cause: AbortReason, from: Option<usize>) {
        if self.ranks[rank].ending.failed.is_some() {
            return;
        }
        let node = self.node_of(rank);
        let cause = self.nodes[node].abort.get_or_insert(cause).clone();
        let now = self.event_queue.now();
        self.ranks[rank].ending.failed = Some((now, cause.clone()));
        for other in self.locals(node).filter(|other| *other != rank) {
            self.event_queue.plan(now + LOCAL_LATENCY, Event::SeeAbort(other));
        }
        if self.is_owner(rank) {
            self.nodes[node].core.fail(&cause, from);
            if self.scenario.bug == Some(Bug::DropsAborts) && from.is_some() {
                while self.nodes[node].core.poll().is_some() {}
            }
            self.drain(node);
        }
        let exit = now + self.seed.below(EXIT_WITHIN);
        self.event_queue.plan(exit, Event::Exit(rank));
    }

    pub(super) fn see_abort(&mut self, rank: usize) {
        if let Some(cause) = self.nodes[self.node_of(rank)].abort.clone() {
            self.fail(rank, cause, None);
        }
    }

    pub(super) fn tick(&mut self, rank: usize) {
        let (now, node) = (self.event_queue.now(), self.node_of(rank));
        self.event_queue.plan(now + TICK, Event::Tick(rank));
        self.ranks[rank].beats += 1;
        self.see_abort(rank);
        if self.ranks[rank].ending.failed.is_some() {
            return;
        }
        if self.is_owner(rank) {
            let (sequence, fingerprint, waiting_for) = match self.oldest(rank) {
                Some(operation) => (
                    operation as u64,
                    self.fingerprints[operation],
                    self.waiting_for(rank, operation),
                ),
                None => (u64::MAX, allreduce_print(0), None),
            };
            let frame = Frame::Heartbeat {
                sequence,
                fingerprint,
                waiting_for: waiting_for.map(|rank| rank as u32),
            };
            for link in 0..self.nodes[node].ends.len() {
                let credits = self.nodes[node].core.take_returns(link);
                self.post(node, link, Message::Frame(Head { credits, ..Head::bare(frame) }), 0);
            }
        }
        if self.scenario.bug != Some(Bug::IgnoresHeartbeats) {
            self.check_heartbeats(rank);
        }
        self.check_deadline(rank);
    }

    fn check_heartbeats(&mut self, rank: usize) {
        let (now_ms, node, locals) =
            (self.event_queue.now() / MILLISECOND, self.node_of(rank), self.scenario.locals);
        for (at, other) in self.locals(node).enumerate() {
            let beats = self.ranks[other].beats;
            if other == rank || self.ranks[rank].seen_beats[at] != beats {
                self.ranks[rank].seen_beats[at] = beats;
                self.ranks[rank].live.record_message(at, now_ms);
            }
        }
        if self.is_owner(rank) {
            for (link, received) in self.nodes[node].received.iter_mut().enumerate() {
                if std::mem::take(received) {
                    self.ranks[rank].live.record_message(locals + link, now_ms);
                }
            }
        }
        let Some((peer, silent_ms)) = self.ranks[rank].live.look(now_ms) else { return };
        let culprit = match peer.checked_sub(locals) {
            None => self.owner(node) + peer,
            Some(link) => self.owner(self.nodes[node].ends[link].0),
        };
        let detail = format!("no heartbeat for {silent_ms} ms");
        self.fail(rank, self.blame(ErrorKind::PeerStalled, rank, culprit, &detail), None);
    }

    fn check_deadline(&mut self, rank: usize) {
        let Some(operation) = self.oldest(rank) else { return };
        let delay = if self.is_owner(rank) { 0 } else { 2 * TICK };
        if self.event_queue.now() < self.ranks[rank].called_at + self.scenario.timeout + delay {
            return;
        }
        let culprit = self.waiting_for(rank, operation).unwrap_or(rank);
        self.fail(rank, self.blame(ErrorKind::TimedOut, rank, culprit, "not done in time"), None);
    }

    /// The operation in progress on a rank.
    fn oldest(&self, rank: usize) -> Option<usize> {
        let rank = &self.ranks[rank];
        rank.calls.checked_sub(1).filter(|operation| rank.ending.completed <= *operation)
    }

    fn waiting_for(&self, rank: usize, operation: usize) -> Option<usize> {
        let node = self.node_of(rank);
        if let Some(absent) = self.locals(node).find(|other| self.ranks[*other].calls <= operation)
        {
            return Some(absent);
        }
        if !self.is_owner(rank) {
            return Some(self.owner(node));
        }
        match self.nodes[node].core.waiting()? {
            Waiting::Local(_) => None,
            Waiting::Frame(_, link, _) | Waiting::Peer(_, link) => {
                match self.nodes[node].reported[link] {
                    Some((peer_operation, Some(culprit)))
                        if peer_operation == operation as u64 && culprit as usize != rank =>
                    {
                        Some(culprit as usize)
                    }
                    _ => Some(self.owner(self.nodes[node].ends[link].0)),
                }
            }
        }
    }

    pub(super) fn accident(&mut self) {
        let (now, victim) = (self.event_queue.now(), self.scenario.victim);
        let node = self.node_of(victim);
        match self.scenario.fault {
            Fault::Killed => self.end_process(victim),
            Fault::Stopped(span) => {
                self.ranks[victim].life = Life::Stopped;
                if let Some(span) = span {
                    self.event_queue.plan(now + span, Event::Wake);
                }
            }
            Fault::Unplugged => {
                let ends = self.nodes[node].ends.clone();
                self.severed
                    .extend(ends.iter().map(|(peer, _)| (node.min(*peer), node.max(*peer))));
            }
            Fault::Cut(link) => {
                let peer = self.nodes[node].ends[link].0;
                self.severed.insert((node.min(peer), node.max(peer)));
            }
            Fault::Slow(_) => {}
            Fault::Garbage(link, garbage) => self.post(node, link, garbage.message(), 0),
        }
    }

    /// The kernel closes the connections of an exited process, after the bytes already sent.
    pub(super) fn end_process(&mut self, rank: usize) {
        let (now, node) = (self.event_queue.now(), self.node_of(rank));
        self.ranks[rank].life = Life::Gone;
        if self.is_owner(rank) {
            for link in 0..self.nodes[node].ends.len() {
                self.post(node, link, Message::End, 0);
            }
        }
        for other in self.locals(node).filter(|other| *other != rank) {
            self.event_queue.plan(now + LOCAL_LATENCY, Event::HangUp { rank: other, of: rank });
        }
    }

    pub(super) fn wake(&mut self) {
        let victim = self.scenario.victim;
        self.ranks[victim].life = Life::Running;
        // A driver that wakes up reads pending messages before it checks its timers.
        let missed = std::mem::take(&mut self.ranks[victim].missed);
        let (ticks, news): (Vec<Event>, Vec<Event>) =
            missed.into_iter().partition(|event| matches!(event, Event::Tick(_)));
        news.into_iter().chain(ticks).for_each(|event| self.handle(event));
    }
}

impl Garbage {
    fn message(self) -> Message {
        let empty = allreduce_print(0);
        let data = DataHead {
            sequence: 0,
            chunk: 0,
            tree: 0,
            stage: hfreduce_core::Stage::Up,
            bytes: 0,
            fingerprint: empty,
        };
        Message::Raw(match self {
            Garbage::Noise(seed) => {
                let mut seed = Seed(seed);
                std::array::from_fn(|_| seed.below(256) as u8)
            }
            Garbage::Credits => {
                Head { credits: [255; CLASSES], ..Head::bare(Frame::Credit) }.encode()
            }
            Garbage::Oversize => {
                Head { payload_bytes: SLOT_BYTES + 1, ..Head::bare(Frame::Data(data)) }.encode()
            }
            Garbage::Tree => Head::bare(Frame::Data(DataHead { tree: 7, ..data })).encode(),
            Garbage::Stray => Head::bare(Frame::Grant { message: 1 }).encode(),
        })
    }
}
