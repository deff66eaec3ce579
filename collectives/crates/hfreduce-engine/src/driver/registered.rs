//! Registered memory of the ranks of a node: the owner of a chunk reads and writes it in place,
//! without copies.
//!
//! This module publishes the memory of this rank, resolves that of others, and ensures that no rank
//! accesses it after an operation has failed:
//!
//! ```text
//! owner of a chunk                      rank whose memory it accesses, after an abort
//! accessing = 1, fence                  record the abort, fence
//! aborted? then accessing = 0, stop     accessing = 0, or the owner's process has ended:
//! read, write                               the owner does not access the memory any more
//! accessing = 0                         still 1 after 200 ms (the owner is stopped in between):
//!                                           revoke the memory, which gets separate pages
//! ```

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::fault::Fault;
use super::node::Node;
use super::operations::Active;
use crate::operation::{Buffer, Operation};
use hfreduce_core::error::ErrorKind;
use hfreduce_core::{Fingerprint, Kind};
use hfreduce_shm::arenas::{Arenas, PeerArena};
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

/// Called after an abort was recorded, before callers get their memory back: waits until no other
/// rank accesses it, or makes such accesses ineffective.
pub(super) fn wait_for_peer_access(node: &Node, active: &VecDeque<Active>) {
    let own = node.local();
    node.shm.end_peer_access(own); // A panic may have left it set; this thread accesses nothing.
    let none = Registered::default();
    let registered = |active: &&Active| active.registered != none;
    if !active.iter().any(|active| registered(&active)) {
        return;
    }
    let until = Instant::now() + QUIET_WITHIN;
    let owners = node.identity().channels.min(node.locals());
    let peer_access = || (0..owners).any(|o| o != own && node.shm.is_accessing_peers(o));
    while peer_access() && Instant::now() < until {
        std::thread::sleep(LOOK_EVERY);
        node.clear_ended_peers();
    }
    if !peer_access() {
        return;
    }
    let Some(arena) = &node.arenas.own else { return };
    for active in active.iter().filter(registered) {
        let Some(offset) = active.registered.output else { continue };
        if let Err(error) = arena.revoke(offset, active.operation.output.bytes()) {
            let sequence = active.work.sequence;
            tracing::error!(%error, sequence, "cannot reclaim registered memory from a peer");
        }
    }
}

/// Another rank of the node has registered invalid memory.
pub(super) fn invalid_memory(node: &Node, local: usize) -> Fault {
    let rank = node.identity().locals()[local];
    let peer = node.arenas.others.get(local).and_then(Option::as_ref);
    let (kind, detail) = match peer.map(PeerArena::mapped) {
        Some(Err(why)) => (ErrorKind::Io, why.to_owned()),
        _ => (ErrorKind::Protocol, "it registered memory outside its arena".to_owned()),
    };
    node.fault(kind, rank, detail)
}
