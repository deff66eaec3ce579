//! Failure handling: detects failures, names the rank that caused them, and reports the first one
//! to all ranks, where it ends every wait.
//!
//! The abort reason is sent along every tree edge and recorded in the segment of every node. Every
//! connected part of the survivors contains a neighbor of a dead rank, which detects its death and
//! reports it. Point-to-point connections carry the reason too, so that the end of one is not taken
//! for the cause.

use std::io;
use std::time::{Duration, Instant};

use super::{Driver, ReduceAlgorithm, TICK, lock};
use crate::work::WorkState;
use hfreduce_core::error::{AbortReason, ErrorKind};
use hfreduce_core::tree::{Violation, Waiting};
use hfreduce_core::{Fingerprint, Kind, Ranks, Stage};
use hfreduce_shm::segment::{Aborted, WAIT_ABORT};
use hfreduce_transport::wire::{Frame, Head};

/// Time in which final frames must have been sent.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

impl Driver {
    /// Aborts the communicator, unless it is aborted already. `from`: the link that reported the
    /// reason.
    pub(super) fn fail(&mut self, cause: AbortReason, from: Option<usize>) {
        if self.shared.broken.get().is_some() {
            return;
        }
        let (phase, waited) = self.waiting_for();
        self.record_waiting(&phase, waited);
        let mut cause = cause;
        if cause.sequence < 0
            && let Some((sequence, fingerprint)) = self.oldest()
        {
            cause = cause.during(&fingerprint.describe(), sequence as i64, &phase);
        }
        // Another rank of this node may have been first: then its reason counts.
        if !self.shm.abort(self.shared.identity.local(), &cause.encode())
            && let Some(first) = self.shm.aborted()
        {
            cause = self.recorded_reason(first);
        }
        let encoded = cause.encode();
        tracing::error!(rank = self.shared.identity.rank, cause = ?cause, "communicator broken");
        // The order matters: first the connections are detached from callers' memory, then the
        // callers get it back.
        self.flood(&encoded, from);
        self.p2p.detach(&self.poller);
        self.p2p.send_reason(&encoded);
        if let Some(tree_links) = &mut self.tree_links {
            tree_links.core.fail(&cause, from);
        }
        let _ = self.shared.broken.set(cause);
        self.wake_all(WAIT_ABORT);
        self.begin_drain();
        self.flush_drain();
        // The neighbors know; now the callers of this rank, whose errors have the path of the
        // record.
        self.shared.recorder.broke(&encoded);
        self.wait_for_peer_access();
        self.fail_works(&phase);
        self.shared.waiters.wake_all();
    }

    fn fail_works(&mut self, phase: &str) {
        let active = std::mem::take(&mut self.active);
        let calls = std::mem::take(&mut *lock(&self.shared.submissions));
        let held = std::mem::take(&mut self.held);
        let works = active.into_iter().map(|active| active.work);
        let calls = held.into_iter().chain(calls).map(|call| call.work);
        let works = works.chain(self.p2p.take_works()).chain(calls);
        let works: Vec<_> = works.collect();
        let oldest = works.iter().map(|work| work.sequence).min();
        let now = Instant::now();
        for work in works {
            let phase = if Some(work.sequence) == oldest { phase } else { "waiting for its turn" };
            if let Some(error) = self.shared.error(Some(&work), phase) {
                self.shared.recorder.finished(work.flight, true, now);
                self.shared.record_unended(&work);
                work.fail(error);
            }
        }
    }

    /// Starts to drain final frames.
    pub(super) fn begin_drain(&mut self) {
        self.drain_until = Some(Instant::now() + DRAIN_TIMEOUT);
    }

    /// Sends final frames, until all are sent or the time has passed.
    pub(super) fn flush_drain(&mut self) {
        if let Some(until) = self.drain_until
            && (self.flush_final_frames() || Instant::now() >= until)
        {
            self.drain_until = None;
        }
    }

    /// Handles an abort that another rank of this node has recorded.
    pub(super) fn check_abort_record(&mut self) {
        if self.shm.is_aborted()
            && self.shared.broken.get().is_none()
            && let Some(record) = self.shm.aborted()
        {
            self.fail(self.recorded_reason(record), None);
        }
    }

    /// The reason in the node's abort record. If its writer was killed, that is the reason.
    fn recorded_reason(&self, record: Aborted) -> AbortReason {
        match record {
            Aborted::Reason(bytes) => AbortReason::decode(&bytes, self.shared.identity.rank),
            Aborted::Unfinished(local) => {
                // The number comes from shared memory: an unknown one is replaced by this rank.
                let identity = &self.shared.identity;
                let rank = identity.locals().get(local).copied().unwrap_or(identity.rank);
                let detail = "died while it recorded the abort reason; its log may have details";
                self.reason_for(ErrorKind::PeerDied, rank, detail.to_owned())
            }
        }
    }

    /// Sends and checks heartbeats; checks deadlines and mismatches.
    pub(super) fn tick(&mut self, now: Instant) {
        let own = self.shared.identity.local();
        self.shm.beat(own);
        self.record_tick(now);
        self.check_abort_record();
        if self.shared.broken.get().is_some() {
            self.flush_drain();
            return;
        }
        self.send_heartbeats();
        self.check_liveness(now);
        self.check_deadlines(now);
        self.compare_with_locals();
    }

    fn check_liveness(&mut self, now: Instant) {
        let now_ms = self.now_ms(now);
        let locals = self.shared.identity.locals().len();
        for local in 0..locals {
            let beats = self.shm.beats(local);
            let own = local == self.shared.identity.local();
            if beats != self.beats[local] || own || self.shm.closed_at(local).is_some() {
                self.beats[local] = beats;
                self.live.heard(local, now_ms);
            }
        }
        for (link, heard) in self.heard_links().into_iter().enumerate() {
            if heard || !self.liveness_active {
                self.live.heard(locals + link, now_ms);
            }
        }
        let Some((peer, silent_ms)) = self.live.look(now_ms) else { return };
        if !self.liveness_active || self.shared.broken.get().is_some() {
            return;
        }
        let rank = match peer.checked_sub(locals) {
            None => self.shared.identity.locals()[peer],
            Some(link) => match &self.tree_links {
                Some(tree_links) => tree_links.links[link].peer_rank,
                None => return,
            },
        };
        let detail = format!(
            "no heartbeat for {:.1} s; the process is stopped, or the machine or its link is down",
            silent_ms as f64 / 1000.0
        );
        self.fail(self.reason_for(ErrorKind::PeerStalled, rank, detail), None);
    }

    fn check_deadlines(&mut self, now: Instant) {
        // An owner of a channel knows more: the other ranks give it two ticks to name the cause.
        let patience = if self.tree_links.is_some() { Duration::ZERO } else { TICK * 2 };
        let works = self.active.iter().map(|active| &active.work).chain(self.p2p.works());
        let works = works.chain(self.held.iter().map(|call| &call.work));
        let late = works
            .filter(|work| now >= work.deadline + patience)
            .min_by_key(|work| work.sequence)
            .cloned();
        let Some(late) = late else { return };
        let (sequence, fingerprint, timeout) = (late.sequence, late.fingerprint, late.timeout);
        let (phase, peer) = match self.p2p.waiting_for(&late) {
            Some(waiting) => waiting,
            None => self.waiting_for(),
        };
        let detail = format!("not done within the timeout of {:.1} s", timeout.as_secs_f64());
        let cause = match peer {
            Some(rank) => self.reason_for(ErrorKind::TimedOut, rank, detail),
            None => AbortReason::new(ErrorKind::TimedOut, self.shared.identity.rank, detail),
        };
        self.fail(cause.during(&fingerprint.describe(), sequence as i64, &phase), None);
    }

    /// Ranks of a node that run different operations may wait without exchanging a byte.
    fn compare_with_locals(&mut self) {
        let Some((sequence, ours)) = self.oldest() else { return };
        for local in 0..self.shm.shape().locals {
            if let Some(theirs) = self.shm.fingerprint(local, sequence)
                && theirs != ours
            {
                self.local_mismatch(local, sequence, ours, theirs);
                return;
            }
        }
    }

    pub(super) fn local_mismatch(
        &mut self,
        local: usize,
        sequence: u64,
        ours: Fingerprint,
        theirs: Fingerprint,
    ) {
        let rank = self.shared.identity.locals()[local];
        let detail = self.disagreement(rank, sequence, ours, theirs);
        self.fail(self.reason_for(ErrorKind::Mismatch, rank, detail), None);
    }

    /// Fails because `local` has contributed to a chunk of an operation that it has not started:
    /// the ranks number their chunks differently.
    pub(super) fn local_absent(
        &mut self,
        local: usize,
        (sequence, ours): (u64, Fingerprint),
        latest: Option<(u64, Fingerprint)>,
    ) {
        let rank = self.shared.identity.locals()[local];
        let theirs = latest.map_or_else(
            || "has not called any operation".to_owned(),
            |(at, fingerprint)| {
                format!("called {} as operation #{at} and none after it", fingerprint.describe())
            },
        );
        let own = self.shared.identity.rank;
        let detail = format!(
            "rank {rank} {theirs}, and rank {own} called {} as operation #{sequence}",
            ours.describe()
        );
        self.fail(self.reason_for(ErrorKind::Mismatch, rank, detail), None);
    }

    fn disagreement(&self, rank: u32, seq: u64, ours: Fingerprint, theirs: Fingerprint) -> String {
        // Sends and receives are identified by their tag.
        let name = match ours.kind {
            Kind::Send | Kind::Recv => "with tag ",
            _ => "as operation #",
        };
        format!(
            "{name}{seq} rank {rank} called {} and rank {} called {}",
            theirs.describe(),
            self.shared.identity.rank,
            ours.describe()
        )
    }

    pub(super) fn violated_on(&mut self, link: usize, why: Violation) {
        let Some(tree_links) = &self.tree_links else { return };
        let rank = tree_links.links[link].peer_rank;
        self.violated(rank, why);
    }

    pub(super) fn violated(&mut self, rank: u32, why: Violation) {
        let (kind, detail) = match why {
            Violation::Mismatch { sequence, ours, theirs } => {
                (ErrorKind::Mismatch, self.disagreement(rank, sequence, ours, theirs))
            }
            Violation::Protocol(why) => (ErrorKind::Protocol, why),
        };
        self.fail(self.reason_for(kind, rank, detail), None);
    }

    /// Handles the end of a tree connection.
    pub(super) fn link_lost(&mut self, link: usize, error: &io::Error) {
        self.check_abort_record();
        if self.retire_link(link) {
            self.fail_if_peer_closed();
            return;
        }
        let Some(rank) =
            self.tree_links.as_ref().map(|tree_links| tree_links.links[link].peer_rank)
        else {
            return;
        };
        self.peer_lost(rank, error);
    }

    pub(super) fn peer_lost(&mut self, rank: u32, error: &io::Error) {
        let (kind, detail) = match error.kind() {
            io::ErrorKind::InvalidData => (ErrorKind::Protocol, error.to_string()),
            io::ErrorKind::UnexpectedEof => {
                (ErrorKind::PeerDied, "its connection was closed unexpectedly".into())
            }
            _ => (ErrorKind::PeerDied, format!("its connection failed: {error}")),
        };
        self.fail(self.reason_for(kind, rank, detail), None);
    }

    /// Handles a hang-up of the socket of a local rank, or the end of its process.
    pub(super) fn local_hang_up(&mut self, local: usize) {
        self.check_abort_record();
        self.node_peers.watched.iter().filter(|(at, ..)| *at == local).for_each(
            |(_, socket, process)| {
                self.poller.forget(socket);
                if let Some(process) = process {
                    self.poller.forget(process);
                }
            },
        );
        self.shm.end_peer_access(local);
        if self.shm.closed_at(local).is_some() {
            self.fail_if_peer_closed();
            return;
        }
        let rank = self.shared.identity.locals()[local];
        self.fail(self.reason_for(ErrorKind::PeerDied, rank, "its process ended".into()), None);
    }

    /// Fails if a started operation needs a rank that has closed the communicator.
    pub(super) fn fail_if_peer_closed(&mut self) {
        let newest = self.active.back().map(|active| &active.work).into_iter();
        let newest = newest.chain(self.held.back().map(|call| &call.work));
        let newest = newest.chain(self.p2p.collectives()).map(|work| work.sequence).max();
        let Some(newest) = newest else { return };
        let locals = self.shared.identity.locals();
        let local = (0..locals.len())
            .find(|local| self.shm.closed_at(*local).is_some_and(|next| newest >= next))
            .map(|local| locals[local]);
        let linked = self.tree_links.as_ref().and_then(|tree_links| {
            let is_over = |left: Option<u64>| left.is_some_and(|next| newest >= next);
            tree_links.links.iter().find(|link| is_over(link.left)).map(|link| link.peer_rank)
        });
        if let Some(rank) = local.or(linked) {
            let detail = "it closed the communicator before this operation".into();
            self.fail(self.reason_for(ErrorKind::PeerLeft, rank, detail), None);
        }
    }

    pub(super) fn reason_for(&self, kind: ErrorKind, rank: u32, detail: String) -> AbortReason {
        let identity = &self.shared.identity;
        let process = matches!(kind, ErrorKind::PeerDied | ErrorKind::PeerStalled);
        let served = process && identity.served.get(rank as usize) == Some(&true);
        let detail =
            if served { format!("hfreduced, which serves it there: {detail}") } else { detail };
        AbortReason::new(kind, identity.rank, detail)
            .with_peer(rank, identity.placement.node_name(rank))
    }

    /// Fails after a thread panicked while it held the driver: its state is not used any further.
    pub fn fail_after_panic(&mut self) {
        self.fail(self.io_reason("the engine's thread panicked: a bug in the engine".into()), None);
    }

    pub(super) fn io_reason(&self, detail: String) -> AbortReason {
        self.reason_for(ErrorKind::Io, self.shared.identity.rank, detail)
    }

    /// The oldest collective operation in progress at this rank.
    fn oldest(&self) -> Option<(u64, Fingerprint)> {
        let tree = self.active.front().map(|active| &active.work);
        let oldest = |work: &&std::sync::Arc<WorkState>| work.sequence;
        tree.into_iter()
            .chain(self.p2p.collectives())
            .min_by_key(oldest)
            .map(|w| (w.sequence, w.fingerprint))
    }

    pub(super) fn heartbeat(&self) -> Head {
        match self.oldest() {
            None => Head::idle(),
            Some((sequence, fingerprint)) => {
                let waiting_for = self.waiting_for().1;
                Head::bare(Frame::Heartbeat { sequence, fingerprint, waiting_for })
            }
        }
    }

    /// What the oldest operation along the trees waits for: a description, and the rank.
    pub(super) fn waiting_for(&self) -> (String, Option<u32>) {
        let Some(active) = self.active.front() else {
            let oldest = self.p2p.works().min_by_key(|work| work.sequence);
            let waiting = oldest.and_then(|work| self.p2p.waiting_for(work));
            return waiting.or_else(|| self.waiting_for_window()).unwrap_or_default();
        };
        let identity = &self.shared.identity;
        let sequence = active.work.sequence;
        // Of several, one that is held back by the window is not the cause.
        let absent = (0..identity.locals().len())
            .filter(|local| self.shm.entered(*local) <= sequence)
            .min_by_key(|local| self.shm.ended(*local));
        if let Some(absent) = absent {
            let rank = identity.locals()[absent];
            return (format!("waiting for rank {rank} to call it"), Some(rank));
        }
        if self.lacks_its_input() {
            return ("waiting for its own input to arrive".to_owned(), Some(identity.rank));
        }
        match active.algorithm {
            ReduceAlgorithm::Ring => return self.waiting_for_ring(),
            ReduceAlgorithm::LastArriver => return self.waiting_for_last_arriver(),
            ReduceAlgorithm::Owner | ReduceAlgorithm::Undecided => {}
        }
        let Some(waiting) =
            self.tree_links.as_ref().and_then(|tree_links| tree_links.core.waiting())
        else {
            let chunk = (self.next_deliver - active.first.min(self.next_deliver)) as u32;
            let rank = identity.locals()[identity.owner_of(chunk)];
            return (format!("waiting for the result from rank {rank}"), Some(rank));
        };
        match waiting {
            Waiting::Local(key) => self.waiting_for_local(key),
            Waiting::Frame(_, link, stage) => {
                let what = if stage == Stage::Up { "a partial sum" } else { "the result" };
                self.waiting_for_link(sequence, link, &format!("waiting for {what} from"))
            }
            Waiting::Peer(_, link) => self.waiting_for_link(sequence, link, "sending to"),
        }
    }

    /// True if the oldest operation waits for this rank's own input.
    fn lacks_its_input(&self) -> bool {
        self.find(self.next_stage).is_some_and(|(at, chunk)| {
            let input = &self.active[at].operation.input;
            at == 0
                && chunk.source.includes(self.shared.identity.rank)
                && !input.has_arrived(chunk.input_offset + chunk.bytes)
        })
    }

    fn waiting_for_local(&self, key: (u64, u32)) -> (String, Option<u32>) {
        let Some((_, chunk, number)) = self.find_key(key) else { return (String::new(), None) };
        let identity = &self.shared.identity;
        let late = identity.locals().iter().enumerate().find(|(local, rank)| {
            chunk.source.includes(**rank) && self.shm.staged(*local) <= number
        });
        let rank = late.map(|(_, rank)| *rank).or(match chunk.source {
            Ranks::One(rank) => Some(rank),
            Ranks::All => None,
        });
        (
            format!(
                "waiting for the input of {}",
                rank.map_or("a rank".into(), |r| format!("rank {r}"))
            ),
            rank,
        )
    }

    fn waiting_for_link(&self, sequence: u64, link: usize, what: &str) -> (String, Option<u32>) {
        let Some(tree_links) = &self.tree_links else { return (String::new(), None) };
        let link = &tree_links.links[link];
        let node = self.shared.identity.placement.node_name(link.peer_rank);
        let phase = format!("{what} rank {} on node {node}", link.peer_rank);
        match link.peer_progress {
            // The neighbor is in the same operation and knows which rank the group waits for.
            Some((theirs, Some(rank)))
                if theirs == sequence && rank != self.shared.identity.rank =>
            {
                (phase, Some(rank))
            }
            _ => (phase, Some(link.peer_rank)),
        }
    }
}
