//! Failure handling: detects failures, names the rank that caused them, and reports the first one
//! to all ranks, where it ends every wait.
//!
//! The abort reason is sent along every tree edge and recorded in the segment of every node. Every
//! connected part of the survivors contains a neighbor of a dead rank, which detects its death and
//! reports it. Point-to-point connections carry the reason too, so that the end of one is not taken
//! for the cause.

use std::time::{Duration, Instant};

use super::fault::Fault;
use super::registered::wait_for_peer_access;
use super::{Driver, TICK, lock};
use hfreduce_core::error::{AbortReason, ErrorKind};
use hfreduce_shm::segment::{Aborted, WAIT_ABORT};

/// Time in which final frames must have been sent.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

impl Driver {
    /// Aborts the communicator because of the fault of a part; its result otherwise.
    pub(super) fn check<T: Default>(&mut self, outcome: Result<T, Fault>) -> T {
        outcome.unwrap_or_else(|fault| {
            match fault {
                Fault::Detected(cause) => self.abort(*cause, None),
                Fault::Reported(cause, link) => self.abort(*cause, Some(link)),
                Fault::Recorded => self.check_abort_record(),
            }
            T::default()
        })
    }

    /// Aborts the communicator, unless it is aborted already. `from`: the link that reported the
    /// reason.
    pub(super) fn abort(&mut self, cause: AbortReason, from: Option<usize>) {
        if !self.node.is_broken() {
            self.deliver_complete(cause.sequence);
            self.abort_at_once(cause, from);
        }
    }

    /// Ends operations before number `below` (negative: all) whose results are here. A rank that has
    /// passed a barrier may abort before another one has looked for the result of that barrier: it
    /// has succeeded on both. Results are in slots of the segment, which stay as they are after an
    /// abort. An operation with more chunks left than slots is left out: it would delay the abort.
    fn deliver_complete(&mut self, below: i64) {
        let Self { node, operations, local, channel, p2p, .. } = self;
        let mut finished =
            |number| channel.as_mut().is_some_and(|channel| channel.finished.remove(&number));
        while let Some(oldest) = operations.active.front()
            && (below < 0 || (oldest.work.sequence as i64) < below)
            && oldest.end() - local.delivered <= node.shm.shape().slots as u64
            // A fault here is not the first one.
            && let Ok(true) = local.deliver(node, operations, &mut finished)
        {
            operations.complete(node, p2p.oldest_collective());
        }
    }

    /// As `abort`, but no operation ends in success: after a panic, their state is not used.
    pub(super) fn abort_at_once(&mut self, mut cause: AbortReason, from: Option<usize>) {
        if self.node.is_broken() {
            return;
        }
        let (phase, waited) = self.waiting_for();
        self.record_waiting(&phase, waited);
        if cause.sequence < 0
            && let Some((sequence, fingerprint)) = self.oldest()
        {
            cause = cause.during(&fingerprint.describe(), sequence as i64, &phase);
        }
        // Another rank of this node may have been first: then its reason counts.
        let local = self.node.local();
        if !self.node.shm.abort(local, &cause.encode())
            && let Some(first) = self.node.shm.aborted()
        {
            cause = self.recorded_reason(first);
        }
        let encoded = cause.encode();
        tracing::error!(rank = self.node.rank(), cause = ?cause, "communicator broken");
        // The order matters: first the connections are detached from callers' memory, then the
        // callers get it back.
        if let Some(channel) = &mut self.channel {
            channel.abort(&self.node, &cause, from);
        }
        self.p2p.detach(&self.node.poller);
        self.p2p.send_reason(&encoded);
        let _ = self.node.shared.broken.set(cause);
        self.node.wake_all(WAIT_ABORT);
        self.start_drain();
        self.flush_drain();
        // The neighbors have the reason. Next are the callers of this rank, whose errors contain
        // the path of the record.
        self.node.shared.recorder.broke(&encoded);
        wait_for_peer_access(&self.node, &self.operations.active);
        self.fail_works(&phase);
        self.node.shared.waiters.wake_all();
    }

    fn fail_works(&mut self, phase: &str) {
        let shared = &self.node.shared;
        let active = std::mem::take(&mut self.operations.active);
        let calls = std::mem::take(&mut *lock(&shared.submissions));
        let waiting = std::mem::take(&mut self.operations.waiting);
        let works = active.into_iter().map(|active| active.work);
        let calls = waiting.into_iter().chain(calls).map(|call| call.work);
        let works = works.chain(self.p2p.take_works()).chain(calls);
        let works: Vec<_> = works.collect();
        let oldest = works.iter().map(|work| work.sequence).min();
        let now = Instant::now();
        for work in works {
            let phase = if Some(work.sequence) == oldest { phase } else { "waiting for its turn" };
            if let Some(error) = shared.error(Some(&work), phase) {
                shared.recorder.finished(work.flight, true, now);
                shared.record_unended(&work);
                work.fail(error);
            }
        }
    }

    /// Starts to drain final frames.
    pub(super) fn start_drain(&mut self) {
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

    fn flush_final_frames(&mut self) -> bool {
        let p2p_flushed = self.p2p.flush_final_frames();
        let channel = self.channel.as_mut();
        channel.is_none_or(|channel| channel.tree.flush_final_frames(&self.node)) && p2p_flushed
    }

    /// Handles an abort that another rank of this node has recorded.
    pub(super) fn check_abort_record(&mut self) {
        if self.node.shm.is_aborted()
            && !self.node.is_broken()
            && let Some(record) = self.node.shm.aborted()
        {
            self.abort(self.recorded_reason(record), None);
        }
    }

    /// The reason in the node's abort record. If its writer was killed, that is the reason.
    fn recorded_reason(&self, record: Aborted) -> AbortReason {
        match record {
            Aborted::Reason(bytes) => AbortReason::decode(&bytes, self.node.rank()),
            Aborted::Unfinished(local) => {
                // The number is read from shared memory: an unknown one is replaced by this rank.
                let identity = self.node.identity();
                let rank = identity.locals().get(local).copied().unwrap_or(identity.rank);
                let detail = "died while it recorded the abort reason; its log may have details";
                self.node.reason(ErrorKind::PeerDied, rank, detail.to_owned())
            }
        }
    }

    /// Sends and checks heartbeats; checks deadlines and mismatches.
    pub(super) fn tick(&mut self, now: Instant) {
        self.node.shm.beat(self.node.local());
        self.record_tick(now);
        self.check_abort_record();
        if self.node.is_broken() {
            self.flush_drain();
            return;
        }
        let outcome = self.check_peers(now);
        self.check(outcome);
        self.check_closed_links();
    }

    fn check_peers(&mut self, now: Instant) -> Result<(), Fault> {
        let head = self.heartbeat();
        if let Some(channel) = &mut self.channel {
            channel.beat(&self.node, &head, &mut self.operations)?;
        }
        let tree = self.channel.as_mut().map(|channel| &mut channel.tree);
        self.heartbeats.check(&self.node, tree, now)?;
        self.check_deadlines(now)?;
        self.compare_with_locals()
    }

    fn check_deadlines(&self, now: Instant) -> Result<(), Fault> {
        // Owners of a channel can detect the cause: other ranks report two ticks later.
        let delay = if self.channel.is_some() { Duration::ZERO } else { TICK * 2 };
        let active = self.operations.active.iter().map(|active| &active.work);
        let waiting = self.operations.waiting.iter().map(|call| &call.work);
        let late = active
            .chain(self.p2p.works())
            .chain(waiting)
            .filter(|work| now >= work.deadline + delay)
            .min_by_key(|work| work.sequence);
        let Some(late) = late else { return Ok(()) };
        let (phase, peer) = self.p2p.waiting_for(late).unwrap_or_else(|| self.waiting_for());
        let detail = format!("not done within the timeout of {:.1} s", late.timeout.as_secs_f64());
        let cause = match peer {
            Some(rank) => self.node.reason(ErrorKind::TimedOut, rank, detail),
            None => AbortReason::new(ErrorKind::TimedOut, self.node.rank(), detail),
        };
        Err(cause.during(&late.fingerprint.describe(), late.sequence as i64, &phase).into())
    }

    /// Ranks of a node that run different operations may wait without exchanging a byte.
    fn compare_with_locals(&self) -> Result<(), Fault> {
        let Some((sequence, fingerprint)) = self.oldest() else { return Ok(()) };
        for local in 0..self.node.locals() {
            if let Some(other) = self.node.shm.fingerprint(local, sequence)
                && other != fingerprint
            {
                return Err(self.node.local_mismatch(local, sequence, fingerprint, other));
            }
        }
        Ok(())
    }

    /// Handles a hang-up of the socket of a local rank, or the end of its process.
    pub(super) fn local_hang_up(&mut self, local: usize) {
        self.check_abort_record();
        self.node.forget(local);
        self.node.shm.end_peer_access(local);
        if self.node.shm.closed_at(local).is_some() {
            self.abort_if_peer_closed();
            return;
        }
        let rank = self.node.identity().locals()[local];
        self.abort(self.node.reason(ErrorKind::PeerDied, rank, "its process ended".into()), None);
    }

    /// Aborts if a started operation needs a neighbor that has closed the communicator since the
    /// last check.
    pub(super) fn check_closed_links(&mut self) {
        let tree = self.channel.as_mut().map(|channel| &mut channel.tree);
        if tree.is_some_and(|tree| std::mem::take(&mut tree.peer_closed)) {
            self.abort_if_peer_closed();
        }
    }

    /// Aborts if a started operation needs a rank that has closed the communicator.
    pub(super) fn abort_if_peer_closed(&mut self) {
        let newest = self.operations.active.back().map(|active| &active.work).into_iter();
        let newest = newest.chain(self.operations.waiting.back().map(|call| &call.work));
        let newest = newest.chain(self.p2p.collectives()).map(|work| work.sequence).max();
        let Some(newest) = newest else { return };
        let locals = self.node.identity().locals();
        let is_over = |end: Option<u64>| end.is_some_and(|end| newest >= end);
        let local = (0..locals.len())
            .find(|local| is_over(self.node.shm.closed_at(*local)))
            .map(|local| locals[local]);
        let linked = self.channel.as_ref().and_then(|channel| {
            let link = channel.tree.links.iter().find(|link| is_over(link.end_sequence));
            link.map(|link| link.peer_rank)
        });
        if let Some(rank) = local.or(linked) {
            let detail = "it closed the communicator before this operation".into();
            self.abort(self.node.reason(ErrorKind::PeerLeft, rank, detail), None);
        }
    }

    /// Closes the communicator: the end of this rank is not a failure. Waits until `until` for sent
    /// frames to leave this machine, but not for an answer.
    pub(super) fn close_connections(&mut self, next: u64, until: Instant) {
        self.node.shm.mark_closed(self.node.local(), next);
        if let Some(channel) = &mut self.channel {
            channel.tree.close(next);
        }
        self.flush_final_frames();
        self.p2p.close(next);
        while self.unsent_bytes() > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
            self.flush_final_frames();
        }
    }

    /// Bytes that the peers' machines have not acknowledged.
    fn unsent_bytes(&mut self) -> usize {
        let tree = self.channel.as_ref().map_or(0, |channel| channel.tree.unsent_bytes());
        tree + self.p2p.unsent_bytes()
    }
}
