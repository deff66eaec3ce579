//! Links along the trees, on ranks that own a channel: frames of chunks, in and out. They are carried
//! by a [`Transport`] and accounted by the state machine of the channel, [`TreeCore`].

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::Ordering;

use super::fault::Fault;
use super::node::Node;
use super::operations::Operations;
use super::peer_memory::{self, is_read_in_place};
use super::pools::Pools;
use hfreduce_core::credit::{CLASSES, Key};
use hfreduce_core::error::AbortReason;
use hfreduce_core::tree::{Partial, Violation};
use hfreduce_core::{DataHead, Flows, Place, Stage, TreeCore};
use hfreduce_shm::peer_memory::{MappingListener, PeerMemory};
use hfreduce_transport::poller::{Poller, Ready};
use hfreduce_transport::transport::{Payload, Received, StableMemory, Transport};
use hfreduce_transport::wire::{Frame, Head};

/// The link to one tree neighbor.
pub(super) struct TreeLink {
    transport: Box<dyn Transport>,
    /// The rank at the other end.
    pub peer_rank: u32,
    due: BTreeMap<(Key, Stage), usize>,
    /// The first operation that the peer will not start, once it has closed the communicator.
    pub left: Option<u64>,
    closed: bool,
    heard_bytes: u64,
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
            left: None,
            closed: false,
            heard_bytes: 0,
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

    /// Queues a chunk that the core wants to send.
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

    /// Handles one arrival on a link; false if there is none.
    pub(super) fn receive(
        &mut self,
        node: &Node,
        at: usize,
        operations: &Operations,
    ) -> Result<bool, Fault> {
        let link = &mut self.links[at];
        if link.closed {
            return Ok(false);
        }
        match link.transport.receive_next(&node.poller) {
            Ok(None) => return Ok(false),
            Ok(Some(Received::Head(head))) => {
                for key in link.transport.take_copied().into_iter().flatten() {
                    self.core.sent(key);
                }
                self.receive_head(node, at, &head, operations)?;
            }
            Ok(Some(Received::Payload((head, place)))) => self.arrived(node, at, &head, place)?,
            Ok(Some(Received::Owned(bytes))) => {
                let cause = AbortReason::decode(&bytes, node.rank());
                return Err(Fault::Reported(Box::new(cause), at));
            }
            Err(error) => {
                self.retire(node, at, &error)?;
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Retires a link that has ended: a fault unless the peer had closed it.
    fn retire(&mut self, node: &Node, at: usize, error: &io::Error) -> Result<(), Fault> {
        if node.shm.is_aborted() {
            return Err(Fault::Recorded);
        }
        let link = &mut self.links[at];
        link.transport.forget(&node.poller);
        link.closed = true;
        link.due.clear();
        if !link.transport.peer_closed() {
            return Err(node.lost_peer(link.peer_rank, error));
        }
        self.peer_closed = true;
        Ok(())
    }

    fn arrived(
        &mut self,
        node: &Node,
        at: usize,
        head: &DataHead,
        place: Place,
    ) -> Result<(), Fault> {
        self.core.arrived(at, head, place).map_err(|why| self.violation(node, at, why))
    }

    fn receive_head(
        &mut self,
        node: &Node,
        at: usize,
        head: &Head,
        operations: &Operations,
    ) -> Result<(), Fault> {
        if head.credits != [0; CLASSES] {
            self.core.credits(at, head.credits).map_err(|why| self.violation(node, at, why))?;
        }
        let link = &mut self.links[at];
        match head.frame {
            Frame::Data(data) => self.receive_data(node, at, data, head.mapped, operations)?,
            Frame::Credit => {}
            Frame::Heartbeat { sequence, fingerprint, waiting_for } => {
                link.peer_progress = Some((sequence, waiting_for));
                self.core
                    .compare(sequence, fingerprint)
                    .map_err(|why| self.violation(node, at, why))?;
            }
            Frame::Abort => link.transport.body_owned(head.payload_bytes),
            // Frames of another stream were sent before its close frame, which is still to come.
            Frame::Close { next } if link.transport.peer_closed() => {
                link.left = Some(next);
                self.peer_closed = true;
            }
            Frame::Close { .. } => {}
            Frame::MappingOffer { token } => {
                let rank = link.peer_rank;
                let listener = &mut self.mapping_listener;
                if peer_memory::map(&mut link.peer_memory, listener, token, rank) {
                    let ready = Head::bare(Frame::MappingReady);
                    link.transport.push(&ready, Payload::Owned(vec![]), None);
                    // If it fails, the next reader of the link detects it.
                    self.flush(node, at);
                }
            }
            Frame::MappingReady => link.peer_memory.mapped(),
            Frame::Offer { .. } | Frame::Grant { .. } | Frame::Piece { .. } => {
                let why = "a point-to-point frame arrived at a tree link".to_owned();
                return Err(self.violation(node, at, Violation::Protocol(why)));
            }
        }
        Ok(())
    }

    fn receive_data(
        &mut self,
        node: &Node,
        at: usize,
        data: DataHead,
        mapped: Option<u64>,
        operations: &Operations,
    ) -> Result<(), Fault> {
        let place = self.core.place(at, &data).map_err(|why| self.violation(node, at, why))?;
        let slot = match place {
            Place::Slot(slot) => {
                let class = hfreduce_core::credit::class(data.tree, data.stage);
                Some(Partial { link: at, class, slot })
            }
            Place::Direct => None,
        };
        let link = &mut self.links[at];
        if let Some(slot) = &slot {
            link.peer_memory.forget_partial(slot);
        }
        if let (Some(offset), Some(slot), true) = (mapped, &slot, is_read_in_place(&data)) {
            peer_memory::record_partial(&mut link.peer_memory, slot, offset, data.bytes)
                .map_err(|why| node.violation(link.peer_rank, why))?;
            link.transport.read_in_place(data.bytes);
            return self.arrived(node, at, &data, place);
        }
        let memory = match &slot {
            Some(slot) => self.pools.place_mut(slot),
            None => match operations.find_key((data.sequence, data.chunk)) {
                Some((op, chunk, number)) => operations.active[op].place(node, number, &chunk),
                None => return Ok(()),
            },
        };
        let Some(offset) = mapped else {
            // SAFETY: a slot or result buffer that the core has given to this frame alone: both
            // hold a whole chunk and stay until the frame has arrived or the communicator is
            // aborted (then `abort` detaches the transport first).
            unsafe { link.transport.body(memory, data.bytes, (data, place)) };
            return Ok(());
        };
        // SAFETY: as above.
        unsafe { peer_memory::copy(&link.peer_memory, offset, memory, data.bytes) }
            .map_err(|why| node.violation(link.peer_rank, why))?;
        link.transport.copied(data.bytes);
        self.arrived(node, at, &data, place)
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
            let credits = self.core.take_owed(at);
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
                // neither written nor reused until the core learns that it is sent, or `abort` has
                // detached the transport.
                None => Payload::Memory(unsafe { StableMemory::new(place, bytes) }),
            };
            link.transport.push(&head, payload, Some(key));
            loaded = true;
        }
        if !link.closed
            && link.transport.takes_more()
            && (self.core.owes_much(at) || link.transport.owes_acks())
        {
            let credits = self.core.take_owed(at);
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
        let sent = link.transport.traffic().0 - before;
        node.shared.counters.sent_bytes.fetch_add(sent, Ordering::Relaxed);
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
            link.transport.beat(&Head { credits: self.core.take_owed(at), ..*head });
        }
        idle
    }

    /// The links that have received data since the last check.
    pub(super) fn heard(&mut self, node: &Node) -> Vec<bool> {
        let mut heard = Vec::with_capacity(self.links.len());
        for link in &mut self.links {
            let (_, bytes) = link.transport.traffic();
            let new = bytes - link.heard_bytes;
            link.heard_bytes = bytes;
            node.shared.counters.received_bytes.fetch_add(new, Ordering::Relaxed);
            heard.push(link.transport.heard() || link.closed || link.left.is_some());
        }
        heard
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

    /// Sends final frames; true once all are sent or the peers are gone.
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
