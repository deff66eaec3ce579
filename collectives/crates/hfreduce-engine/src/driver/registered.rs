//! Registered memory of the ranks of a node: the owner of a chunk reads and writes it in place,
//! without copies.
//!
//! This module publishes the memory of this rank, resolves that of others, and ensures that no rank
//! accesses it after an operation has failed:
//!
//! ```text
//! owner of a chunk                      rank whose memory it is, when all ends
//! touching = 1, fence                   abort recorded, fence
//! aborted? then touching = 0, stop      touching = 0? it reads and writes nothing more
//! read, write                           its process has ended? neither (its leader says so)
//! touching = 0                          still 1 after a while: it stands still in the middle of it;
//!                                       revoke: our memory gets separate pages
//! ```

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use hfreduce_shm::arenas::{Arenas, PeerArena};

use super::{Active, Driver};
use crate::operation::{Buffer, Operation};
use hfreduce_core::error::ErrorKind;
use hfreduce_core::{Fingerprint, Kind};
use hfreduce_shm::segment::Registered;

/// Time in which a running owner finishes one chunk, on a busy machine.
const QUIET_WITHIN: Duration = Duration::from_millis(200);
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// The buffers of an operation that other ranks may access in place. Only for reductions: every
/// rank has published its memory before any result is computed.
pub(super) fn registered_buffers(arenas: &Arenas, operation: &Operation, rank: u32) -> Registered {
    let fingerprint = &operation.fingerprint;
    let Some(arena) = arenas.own.as_ref().filter(|_| fingerprint.kind.reduces()) else {
        return Registered::default();
    };
    let (input, output) = (&operation.input, &operation.output);
    let sinks = fingerprint.kind != Kind::Reduce || fingerprint.root == rank;
    if fingerprint.kind == Kind::ReduceScatter && !keep_apart(fingerprint, input, output, rank) {
        return Registered::default();
    }
    let find = |buffer: &Buffer| {
        let place = buffer.contiguous(0, buffer.bytes()).filter(|_| !buffer.is_pipelined())?;
        arena.find(place, buffer.bytes())
    };
    let region = if sinks { find(output).filter(|region| region.whole_pages) } else { None };
    Registered {
        input: find(input).map(|region| region.offset),
        output: region.map(|region| region.offset),
    }
}

/// True if writing the output of a reduce-scatter does not change another chunk's input.
fn keep_apart(fingerprint: &Fingerprint, input: &Buffer, output: &Buffer, rank: u32) -> bool {
    let block = fingerprint.count as usize * usize::from(fingerprint.element_bytes);
    let (Some(from), Some(to)) =
        (input.contiguous(0, input.bytes()), output.contiguous(0, output.bytes()))
    else {
        return false;
    };
    let (from, to) = (from.addr(), to.addr());
    to == from + rank as usize * block || to >= from + input.bytes() || from >= to + output.bytes()
}

impl Active {
    /// True if this rank handles no result but the last: all are written in place.
    pub(super) fn is_made_in_place(&self, rank: u32) -> bool {
        let fingerprint = &self.operation.fingerprint;
        let sinks = fingerprint.kind != Kind::Reduce || fingerprint.root == rank;
        self.registered.input.is_some() && (self.registered.output.is_some() || !sinks)
    }
}

impl Driver {
    /// Called after an abort was recorded, before callers get their memory back: waits until no
    /// other rank accesses it, or makes such accesses ineffective.
    pub(super) fn wait_for_peer_access(&mut self) {
        let own = self.shared.identity.local();
        self.shm.end_peer_access(own); // A panic may have left it set; this thread accesses nothing.
        let none = Registered::default();
        let registered = |active: &&Active| active.registered != none;
        if !self.active.iter().any(|active| registered(&active)) {
            return;
        }
        let until = Instant::now() + QUIET_WITHIN;
        let owners = self.shared.identity.channels.min(self.shm.shape().locals);
        let peer_access =
            |driver: &Self| (0..owners).any(|o| o != own && driver.shm.is_accessing_peers(o));
        while peer_access(self) && Instant::now() < until {
            std::thread::sleep(LOOK_EVERY);
            self.clear_ended_peers();
        }
        if !peer_access(self) {
            return;
        }
        let Some(arena) = &self.arenas.own else { return };
        for active in self.active.iter().filter(registered) {
            let Some(offset) = active.registered.output else { continue };
            if let Err(error) = arena.revoke(offset, active.operation.output.bytes()) {
                let sequence = active.work.sequence;
                tracing::error!(%error, sequence, "cannot reclaim registered memory from a peer");
            }
        }
    }

    /// Clears the access flag of ranks whose process has ended.
    fn clear_ended_peers(&self) {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        for (local, socket, process) in &self.node_peers.watched {
            let mut end = match process {
                Some(process) => [PollFd::new(process, PollFlags::IN)],
                None => [PollFd::new(socket, PollFlags::HUP)],
            };
            if poll(&mut end, Some(&now)).is_ok_and(|ended| ended > 0) {
                self.shm.end_peer_access(*local);
            }
        }
    }

    /// Fails because another rank of the node has registered invalid memory.
    pub(super) fn cannot_find(&mut self, local: usize) {
        let rank = self.shared.identity.locals()[local];
        let peer = self.arenas.others.get(local).and_then(Option::as_ref);
        let (kind, detail) = match peer.map(PeerArena::mapped) {
            Some(Err(why)) => (ErrorKind::Io, why.to_owned()),
            _ => (ErrorKind::Protocol, "it registered memory outside its arena".to_owned()),
        };
        self.fail(self.reason_for(kind, rank, detail), None);
    }
}
