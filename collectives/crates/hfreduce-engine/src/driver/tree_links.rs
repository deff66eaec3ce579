//! Links along the trees, on ranks that own a channel: frames of chunks to the neighbors, and
//! (`receive`) from them. They are carried by a [`Transport`] and accounted by the state machine of
//! the channel, [`TreeCore`].

mod receive;

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::Ordering;

use super::fault::Fault;
use super::node::Node;
use super::operations::Operations;
use hfreduce_core::credit::{CLASSES, Key};
use hfreduce_core::error::AbortReason;
use hfreduce_core::tree::{Partial, Violation};
use hfreduce_core::{DataHead, Flows, Kind, Stage, TreeCore};
use hfreduce_shm::peer_memory::{MappingListener, PeerMemory};
use hfreduce_transport::poller::{Poller, Ready};
use hfreduce_transport::transport::{Payload, StableMemory, Transport};
use hfreduce_transport::wire::{Frame, Head};

/// The link to one tree neighbor.
pub(super) struct TreeLink {
    transport: Box<dyn Transport>,
    /// The rank at the other end.
    pub peer_rank: u32,
    due: BTreeMap<(Key, Stage), usize>,
    /// The first operation that the peer will not start, once it has closed the communicator.
    pub end_sequence: Option<u64>,
    closed: bool,
    counted_bytes: u64,
    /// The peer's last report: its oldest operation, and the rank that it waits for.
    pub peer_progress: Option<(u64, Option<u32>)>,
    /// Mapped segments of both ends.
    peer_memory: PeerMemory,
}

/// All tree links, with the state machine of the channel.
pub struct TreeLinks {
    /// The state machine.
    pub(super) core: TreeCore,
    /// By link number.
    pub(super) links: Vec<TreeLink>,
    /// A neighbor has closed the communicator since the last check.
    pub(super) peer_closed: bool,
    mapping_listener: MappingListener,
    pools: Pools,
}

/// Result of sending what a link has queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flushed {
    /// The transport takes more frames.
    TakesMore,
    Full,
    /// The connection has failed: frames that the peer had sent are still to be received.
    Failed,
}

impl TreeLinks {
    /// For connected neighbors: (rank, transport, peer memory) in the order of `flows.peers()`.
    pub fn new(
        flows: Flows,
        channel: (usize, usize),
        window: u32,
        slot_bytes: usize,
        peers: Vec<(u32, Box<dyn Transport>, PeerMemory)>,
        mapping_listener: MappingListener,
    ) -> Self {
        let link = |(peer_rank, transport, peer_memory)| TreeLink {
            transport,
            peer_rank,
            due: BTreeMap::new(),
            end_sequence: None,
            closed: false,
            counted_bytes: 0,
            peer_progress: None,
            peer_memory,
        };
        let links: Vec<TreeLink> = peers.into_iter().map(link).collect();
        let pools = Pools::new(links.len(), window, slot_bytes);
        Self {
            core: TreeCore::new(flows, channel, window),
            links,
            peer_closed: false,
            mapping_listener,
            pools,
        }
    }

    /// Number of links.
    pub fn link_count(&self) -> usize {
        self.links.len()
    }

    /// Watches the links, and offers this rank's segment to the neighbors that can map it.
    ///
    /// # Errors
    /// A system call failed.
    pub fn watch(&mut self, poller: &Poller, token: u64) -> io::Result<()> {
        for (at, link) in self.links.iter_mut().enumerate() {
            link.transport.watch(poller, token | at as u64)?;
            if let Some(token) = link.peer_memory.offered {
                let head = Head::bare(Frame::MappingOffer { token });
                link.transport.push(&head, Payload::Owned(vec![]), None);
                // A peer that has exited is detected by the next reader.
                let _ = link.transport.flush(poller, &mut Vec::new());
            }
        }
        Ok(())
    }

    /// TCP connections along the trees.
    pub fn streams(&self) -> usize {
        self.links.iter().map(|link| link.transport.streams()).sum()
    }

    /// Address of a partial sum: in its slot, or in the neighbor's segment.
    pub fn partial(&self, partial: &Partial) -> *const u8 {
        let mapped = self.links[partial.link].peer_memory.mapped_partial(partial);
        mapped.unwrap_or_else(|| self.pools.place(partial))
    }

    /// Queues a chunk for the core.
    pub fn due(&mut self, link: usize, key: Key, tree: usize, stage: Stage) {
        self.links[link].due.insert((key, stage), tree);
    }

    /// Handles an event of a descriptor of a link; true if queued frames may be sent now.
    pub(super) fn woken(&mut self, at: usize, line: usize, event: Ready) -> bool {
        self.links[at].transport.woken(line, event)
    }

    /// The neighbor at a link violates the protocol, or is in another operation.
    pub(super) fn violation(&self, node: &Node, at: usize, why: Violation) -> Fault {
        node.violation(self.links[at].peer_rank, why)
    }

    /// Moves due chunks to a link's queue, oldest first; true if anything was queued.
    pub(super) fn load(&mut self, node: &Node, at: usize, operations: &Operations) -> bool {
        let mut loaded = false;
        let link = &mut self.links[at];
        while !link.closed && link.transport.takes_more() {
            let Some(((key, stage), tree)) = link.due.pop_first() else { break };
            let Some((op, chunk, number)) = operations.find_key(key) else { continue };
            let active = &operations.active[op];
            let place = active.place_in(stage, node, number, &chunk);
            let bytes = chunk.bytes_in(stage);
            let fingerprint = active.operation.fingerprint;
            let data = DataHead { sequence: key.0, chunk: key.1, tree, stage, bytes, fingerprint };
            let mapped = link.peer_memory.offset(&node.shm, place, bytes);
            let credits = self.core.take_returns(at);
            let payload_bytes = bytes;
            let head = Head { credits, payload_bytes, mapped, ..Head::bare(Frame::Data(data)) };
            let payload = match mapped {
                Some(_) => {
                    let mapped = &node.shared.counters.mapped_bytes;
                    mapped.fetch_add(bytes as u64, Ordering::Relaxed);
                    if is_read_in_place(&data) {
                        Payload::MappedInPlace(bytes)
                    } else {
                        Payload::Mapped(bytes)
                    }
                }
                // SAFETY: a slot of the segment or a caller's output, which holds the chunk and is
                // neither written nor reused until the core is notified that it is sent, or `abort`
                // has detached the transport.
                None => Payload::Memory(unsafe { StableMemory::new(place, bytes) }),
            };
            link.transport.push(&head, payload, Some(key));
            node.shared.peer_bytes.count_sent(link.peer_rank, bytes);
            loaded = true;
        }
        if !link.closed
            && link.transport.takes_more()
            && (self.core.should_return(at) || link.transport.has_unacked())
        {
            let credits = self.core.take_returns(at);
            let head = Head { credits, ..Head::bare(Frame::Credit) };
            link.transport.push(&head, Payload::Owned(vec![]), None);
            loaded = true;
        }
        loaded
    }

    /// Sends as much as possible.
    pub(super) fn flush(&mut self, node: &Node, at: usize) -> Flushed {
        let link = &mut self.links[at];
        let mut sent_keys = Vec::new();
        let before = link.transport.traffic().0;
        let flushed = link.transport.flush(&node.poller, &mut sent_keys);
        let sent_bytes = link.transport.traffic().0 - before;
        node.shared.counters.sent_bytes.fetch_add(sent_bytes, Ordering::Relaxed);
        for key in sent_keys.into_iter().flatten() {
            self.core.sent(key);
        }
        if flushed.is_err() {
            link.transport.look_again();
            return Flushed::Failed;
        }
        if link.transport.takes_more() { Flushed::TakesMore } else { Flushed::Full }
    }

    /// Queues a heartbeat with the oldest operation at a link, if it is idle; false if it is not.
    pub(super) fn beat(&mut self, at: usize, head: &Head) -> bool {
        let link = &mut self.links[at];
        let idle = !link.closed && link.transport.is_idle();
        if idle {
            link.transport.beat(&Head { credits: self.core.take_returns(at), ..*head });
        }
        idle
    }

    /// The links that have received data since the last check.
    pub(super) fn poll_received(&mut self, node: &Node) -> Vec<bool> {
        let mut received = Vec::with_capacity(self.links.len());
        for link in &mut self.links {
            let (_, bytes) = link.transport.traffic();
            let new = bytes - link.counted_bytes;
            link.counted_bytes = bytes;
            node.shared.counters.received_bytes.fetch_add(new, Ordering::Relaxed);
            let closed = link.closed || link.end_sequence.is_some();
            received.push(link.transport.poll_received() || closed);
        }
        received
    }

    /// Aborts the links: memory of callers is not accessed after this; neighbors receive the
    /// reason.
    pub(super) fn abort(&mut self, node: &Node, cause: &AbortReason, from: Option<usize>) {
        let payload = cause.encode();
        for (at, link) in self.links.iter_mut().enumerate() {
            link.due.clear();
            link.transport.detach();
            link.transport.forget(&node.poller);
            // One of several streams may be lost; the others are still used.
            if Some(at) != from {
                let head = Head { payload_bytes: payload.len(), ..Head::bare(Frame::Abort) };
                link.transport.push_final(&head, &payload);
            }
        }
        self.core.fail(cause, from);
    }

    /// Queues the final frame at all links.
    pub(super) fn close(&mut self, next: u64) {
        for link in &mut self.links {
            link.transport.push_final(&Head::bare(Frame::Close { next }), &[]);
        }
    }

    /// Sends final frames; true once all are sent or the peers have disconnected.
    pub(super) fn flush_final_frames(&mut self, node: &Node) -> bool {
        let mut all_sent = true;
        for link in &mut self.links {
            // A failed link is not waited for.
            let _ = link.transport.flush(&node.poller, &mut Vec::new());
            all_sent &= link.transport.is_flushed();
        }
        all_sent
    }

    /// Bytes that the neighbors' machines have not acknowledged.
    pub(super) fn unsent_bytes(&self) -> usize {
        self.links.iter().map(|link| link.transport.unsent_bytes()).sum()
    }
}

impl TreeLink {
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }
}

/// True for a frame whose mapped payload is read in place. Both ends decide alike.
fn is_read_in_place(data: &DataHead) -> bool {
    data.stage == Stage::Up && data.fingerprint.kind == Kind::Allreduce
}

/// Partial sums received from neighbors: by link and class, as many slots as a window has frames.
#[derive(Debug)]
struct Pools {
    memory: Vec<[Vec<u8>; CLASSES]>,
    slot_bytes: usize,
}

impl Pools {
    fn new(links: usize, window: u32, slot_bytes: usize) -> Self {
        // Zeroed memory of this size is not touched until it is used.
        let pool = |_| vec![0; window as usize * slot_bytes];
        let memory = (0..links).map(|_| std::array::from_fn(pool)).collect();
        Self { memory, slot_bytes }
    }

    /// Address of a slot, to read. Connections write and kernels read, never at the same time: the
    /// core's accounting of slots guarantees that.
    fn place(&self, partial: &Partial) -> *const u8 {
        let at = self.offset(partial);
        self.memory[partial.link][partial.class].as_ptr().wrapping_add(at)
    }

    /// The same, to write.
    fn place_mut(&mut self, partial: &Partial) -> *mut u8 {
        let at = self.offset(partial);
        self.memory[partial.link][partial.class].as_mut_ptr().wrapping_add(at)
    }

    fn offset(&self, partial: &Partial) -> usize {
        let at = partial.slot as usize * self.slot_bytes;
        let pool = self.memory[partial.link][partial.class].len();
        assert!(at + self.slot_bytes <= pool, "slot {} of a pool of {pool} bytes", partial.slot);
        at
    }
}
