//! Links along the trees, on ranks that own a channel. Their frames are carried by a [`Transport`].

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::io;
use std::sync::atomic::Ordering;

use super::peer_memory::is_read_in_place;
use super::pools::Pools;
use super::{Driver, TOKEN_TREE};
use hfreduce_core::credit::{CLASSES, Key};
use hfreduce_core::tree::Partial;
use hfreduce_core::{DataHead, Flows, Place, Stage, TreeCore};
use hfreduce_shm::peer_memory::{MappingListener, PeerMemory};
use hfreduce_transport::poller::{Poller, Ready};
use hfreduce_transport::transport::{DESCRIPTOR_SHIFT, Payload, Received, StableMemory, Transport};
use hfreduce_transport::wire::{Frame, Head};

/// The link to one tree neighbor.
pub struct TreeLink {
    pub(super) transport: Box<dyn Transport>,
    /// The rank at the other end.
    pub peer_rank: u32,
    pub(super) due: BTreeMap<(Key, Stage), usize>,
    /// The first operation that the peer will not start, once it has closed the communicator.
    pub left: Option<u64>,
    pub(super) closed: bool,
    heard_bytes: u64,
    /// The peer's last report: its oldest operation, and the rank that it waits for.
    pub peer_progress: Option<(u64, Option<u32>)>,
    /// Mapped segments of both ends.
    pub(super) peer_memory: PeerMemory,
}

/// All tree links, with their state machine.
pub struct TreeLinks {
    /// The state machine.
    pub core: TreeCore,
    /// By link number.
    pub links: Vec<TreeLink>,
    /// Owned chunks that wait for local contributions.
    pub unready: VecDeque<u64>,
    /// Owned chunks that the core has finished and that are not delivered here yet.
    pub finished: HashSet<u64>,
    pub(super) mapping_listener: MappingListener,
    pools: Pools,
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
            unready: VecDeque::new(),
            finished: HashSet::new(),
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
    pub fn watch(&mut self, poller: &Poller) -> io::Result<()> {
        for (at, link) in self.links.iter_mut().enumerate() {
            link.transport.watch(poller, TOKEN_TREE | at as u64)?;
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
}

impl TreeLink {
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }
}

impl Driver {
    pub(super) fn read_tree_link(&mut self, index: usize, event: Ready) {
        let (link, line) = (index & ((1 << DESCRIPTOR_SHIFT) - 1), index >> DESCRIPTOR_SHIFT);
        let Some(tree_links) = &mut self.tree_links else { return };
        let is_open = tree_links.links[link].transport.woken(line, event);
        if event.readable {
            while self.shared.broken.get().is_none() && self.read_one(link) {}
        }
        if is_open && self.shared.broken.get().is_none() {
            self.flush_link(link);
        }
    }

    /// Handles one arrival on a link; false if there is none.
    fn read_one(&mut self, at: usize) -> bool {
        let Some(tree_links) = &mut self.tree_links else { return false };
        let link = &mut tree_links.links[at];
        if link.closed {
            return false;
        }
        match link.transport.receive_next(&self.poller) {
            Ok(None) => return false,
            Ok(Some(Received::Head(head))) => {
                for key in link.transport.take_copied().into_iter().flatten() {
                    tree_links.core.sent(key);
                }
                self.read_head(at, &head);
            }
            Ok(Some(Received::Payload((head, place)))) => self.arrived(at, &head, place),
            Ok(Some(Received::Owned(bytes))) => {
                let rank = self.shared.identity.rank;
                self.fail(hfreduce_core::error::AbortReason::decode(&bytes, rank), Some(at));
            }
            Err(error) => {
                self.link_lost(at, &error);
                return false;
            }
        }
        true
    }

    fn arrived(&mut self, at: usize, head: &DataHead, place: Place) {
        let Some(tree_links) = &mut self.tree_links else { return };
        match tree_links.core.arrived(at, head, place) {
            Ok(()) => self.act(),
            Err(why) => self.violated_on(at, why),
        }
    }

    fn read_head(&mut self, at: usize, head: &Head) {
        let Some(tree_links) = &mut self.tree_links else { return };
        if head.credits != [0; CLASSES]
            && let Err(why) = tree_links.core.credits(at, head.credits)
        {
            self.violated_on(at, why);
            return;
        }
        match head.frame {
            Frame::Data(data) => self.read_data(at, data, head.mapped),
            Frame::Credit => {}
            Frame::Heartbeat { sequence, fingerprint, waiting_for } => {
                tree_links.links[at].peer_progress = Some((sequence, waiting_for));
                if let Err(why) = tree_links.core.compare(sequence, fingerprint) {
                    self.violated_on(at, why);
                }
            }
            Frame::Abort => tree_links.links[at].transport.body_owned(head.payload_bytes),
            // Frames of another stream were sent before its close frame, which is still to come.
            Frame::Close { next } if tree_links.links[at].transport.peer_closed() => {
                tree_links.links[at].left = Some(next);
                self.fail_if_peer_closed();
            }
            Frame::Close { .. } => {}
            Frame::MappingOffer { token } => self.map_peer_segment(at, token),
            Frame::MappingReady => tree_links.links[at].peer_memory.mapped(),
            Frame::Offer { .. } | Frame::Grant { .. } | Frame::Piece { .. } => {
                let why = "a point-to-point frame arrived at a tree link".to_owned();
                self.violated_on(at, hfreduce_core::tree::Violation::Protocol(why));
            }
        }
        self.act();
    }

    fn read_data(&mut self, at: usize, data: DataHead, mapped: Option<u64>) {
        let Some(tree_links) = &mut self.tree_links else { return };
        let place = match tree_links.core.place(at, &data) {
            Ok(place) => place,
            Err(why) => return self.violated_on(at, why),
        };
        let slot = match place {
            Place::Slot(slot) => {
                let class = hfreduce_core::credit::class(data.tree, data.stage);
                Some(Partial { link: at, class, slot })
            }
            Place::Direct => None,
        };
        if let Some(slot) = &slot {
            tree_links.links[at].peer_memory.forget_partial(slot);
        }
        if let (Some(offset), Some(slot), true) = (mapped, &slot, is_read_in_place(&data)) {
            if self.record_mapped_partial(slot, offset, data.bytes) {
                self.arrived(at, &data, place);
            }
            return;
        }
        let memory = match &slot {
            Some(slot) => tree_links.pools.place_mut(slot),
            None => match self.find_key((data.sequence, data.chunk)) {
                Some((op, chunk, number)) => self.place(number, op, &chunk),
                None => return,
            },
        };
        if let Some(offset) = mapped {
            // SAFETY: as below.
            if unsafe { self.copy_from_peer(at, offset, memory, data.bytes) } {
                self.arrived(at, &data, place);
            }
        } else if let Some(tree_links) = &mut self.tree_links {
            // SAFETY: a slot or result buffer that the core has given to this frame alone: both
            // hold a whole chunk and stay until the frame has arrived or the communicator is
            // aborted (then `fail` detaches the transport first).
            unsafe { tree_links.links[at].transport.body(memory, data.bytes, (data, place)) };
        }
    }

    /// Sends what is due, oldest chunk first.
    pub(super) fn flush_tree_links(&mut self) -> bool {
        let mut moved = false;
        for at in 0..self.tree_links.as_ref().map_or(0, TreeLinks::link_count) {
            while self.load(at) {
                moved = true;
                if !self.flush_link(at) {
                    break;
                }
            }
        }
        moved
    }

    /// Moves due chunks to a link's queue; true if anything was queued.
    fn load(&mut self, at: usize) -> bool {
        let mut loaded = false;
        loop {
            let Some(tree_links) = &mut self.tree_links else { return false };
            let link = &mut tree_links.links[at];
            if link.closed || !link.transport.takes_more() {
                break;
            }
            let Some(((key, stage), tree)) = link.due.pop_first() else { break };
            let Some((op, chunk, number)) = self.find_key(key) else { continue };
            let place = self.place_in(stage, number, op, &chunk);
            let bytes = chunk.bytes_in(stage);
            let fingerprint = self.active[op].operation.fingerprint;
            let Some(tree_links) = &mut self.tree_links else { return false };
            let data = DataHead { sequence: key.0, chunk: key.1, tree, stage, bytes, fingerprint };
            let mapped = tree_links.links[at].peer_memory.offset(&self.shm, place, bytes);
            let credits = tree_links.core.take_owed(at);
            let payload_bytes = bytes;
            let head = Head { credits, payload_bytes, mapped, ..Head::bare(Frame::Data(data)) };
            let payload = match mapped {
                Some(_) => {
                    let mapped = &self.shared.counters.mapped_bytes;
                    mapped.fetch_add(bytes as u64, Ordering::Relaxed);
                    if is_read_in_place(&data) {
                        Payload::MappedInPlace(bytes)
                    } else {
                        Payload::Mapped(bytes)
                    }
                }
                // SAFETY: a slot of the segment or a caller's output, which holds the chunk and is
                // neither written nor reused until the core learns that it is sent, or `fail` has
                // detached the transport.
                None => Payload::Memory(unsafe { StableMemory::new(place, bytes) }),
            };
            tree_links.links[at].transport.push(&head, payload, Some(key));
            loaded = true;
        }
        if let Some(tree_links) = &mut self.tree_links
            && !tree_links.links[at].closed
            && tree_links.links[at].transport.takes_more()
            && (tree_links.core.owes_much(at) || tree_links.links[at].transport.owes_acks())
        {
            let credits = tree_links.core.take_owed(at);
            let head = Head { credits, ..Head::bare(Frame::Credit) };
            tree_links.links[at].transport.push(&head, Payload::Owned(vec![]), None);
            loaded = true;
        }
        loaded
    }

    /// Sends as much as possible; false if the transport takes no more.
    pub(super) fn flush_link(&mut self, at: usize) -> bool {
        let Some(tree_links) = &mut self.tree_links else { return false };
        let link = &mut tree_links.links[at];
        let mut sent_keys = Vec::new();
        let before = link.transport.traffic().0;
        let flushed = link.transport.flush(&self.poller, &mut sent_keys);
        let sent = link.transport.traffic().0 - before;
        self.shared.counters.sent_bytes.fetch_add(sent, Ordering::Relaxed);
        let takes_more = link.transport.takes_more();
        for key in sent_keys.into_iter().flatten() {
            tree_links.core.sent(key);
        }
        self.act();
        if flushed.is_err() {
            // Frames that the peer had sent, including its close frame or reason, are handled
            // before the error.
            if let Some(tree_links) = &mut self.tree_links {
                tree_links.links[at].transport.look_again();
            }
            while self.shared.broken.get().is_none() && self.read_one(at) {}
            return false;
        }
        takes_more
    }

    /// Sends a heartbeat with the oldest operation over every idle link.
    pub(super) fn send_heartbeats(&mut self) {
        let head = self.heartbeat();
        for at in 0..self.tree_links.as_ref().map_or(0, TreeLinks::link_count) {
            if let Some(tree_links) = &mut self.tree_links {
                let link = &mut tree_links.links[at];
                if link.closed || !link.transport.is_idle() {
                    continue;
                }
                link.transport.beat(&Head { credits: tree_links.core.take_owed(at), ..head });
            }
            self.flush_link(at);
        }
    }

    /// The links that have received data since the last check.
    pub(super) fn heard_links(&mut self) -> Vec<bool> {
        let Some(tree_links) = &mut self.tree_links else { return Vec::new() };
        let mut heard = Vec::with_capacity(tree_links.links.len());
        for link in &mut tree_links.links {
            let (_, bytes) = link.transport.traffic();
            let new = bytes - link.heard_bytes;
            link.heard_bytes = bytes;
            self.shared.counters.received_bytes.fetch_add(new, Ordering::Relaxed);
            heard.push(link.transport.heard() || link.closed || link.left.is_some());
        }
        heard
    }
}
