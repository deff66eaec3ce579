//! The links along the trees, on ranks that own a channel. What carries their frames is behind
//! [`Transport`].

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::io;
use std::sync::atomic::Ordering;

use super::peer_memory::{MappingListener, PeerMemory, is_read_in_place};
use super::poller::{Poller, Ready};
use super::pools::Pools;
use super::transport::{DESCRIPTOR_SHIFT, Payload, Received, StableMemory, Transport};
use super::wire::{Frame, Head};
use super::{Driver, TOKEN_TREE};
use crate::core::credit::{CLASSES, Key};
use crate::core::tree::Partial;
use crate::core::{DataHead, Flows, Place, Stage, TreeCore};

/// What connects us with one tree neighbour.
pub struct TreeLink {
    pub(super) transport: Box<dyn Transport>,
    /// The rank at the other end.
    pub peer_rank: u32,
    pub(super) due: BTreeMap<(Key, Stage), usize>,
    /// The peer took leave and will not begin this operation.
    pub left: Option<u64>,
    pub(super) closed: bool,
    heard_bytes: u64,
    /// The peer's last word: its oldest operation, and whom it waits for.
    pub peer_progress: Option<(u64, Option<u32>)>,
    /// What this end and the other lend each other.
    pub(super) peer_memory: PeerMemory,
}

/// All of them, with the core that they serve.
pub struct TreeLinks {
    /// The state machine.
    pub core: TreeCore,
    /// By link number.
    pub links: Vec<TreeLink>,
    /// Owned chunks that wait for local contributions.
    pub unready: VecDeque<u64>,
    /// Owned chunks that the core is done with and that are not delivered here yet.
    pub finished: HashSet<u64>,
    pub(super) mapping_listener: MappingListener,
    pools: Pools,
}

impl TreeLinks {
    /// For connected neighbours: (rank, what carries frames, loan) in the order of `flows.peers()`.
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

    /// Links.
    pub fn len(&self) -> usize {
        self.links.len()
    }

    /// Registers what the links wait for, and lends our segment to the neighbours that can see it.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn watch(&mut self, poller: &Poller) -> io::Result<()> {
        for (at, link) in self.links.iter_mut().enumerate() {
            link.transport.watch(poller, TOKEN_TREE | at as u64)?;
            if let Some(token) = link.peer_memory.offered {
                let head = Head::bare(Frame::MappingOffer { token });
                link.transport.push(&head, Payload::Owned(vec![]), None);
                // A peer that is gone already is named by whoever reads from it first.
                let _ = link.transport.flush(poller, &mut Vec::new());
            }
        }
        Ok(())
    }

    /// TCP connections along the trees.
    pub fn streams(&self) -> usize {
        self.links.iter().map(|link| link.transport.streams()).sum()
    }

    /// Where a partial sum lies: in its slot, or in the segment of the neighbour that made it.
    pub fn partial(&self, partial: &Partial) -> *const u8 {
        let mapped_partials = self.links[partial.link].peer_memory.mapped_partials(partial);
        mapped_partials.unwrap_or_else(|| self.pools.place(partial))
    }

    /// The core wants a chunk sent.
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
        let goes_on = tree_links.links[link].transport.woken(line, event);
        if event.readable {
            while self.shared.broken.get().is_none() && self.read_one(link) {}
        }
        if goes_on && self.shared.broken.get().is_none() {
            self.flush_link(link);
        }
    }

    /// One arrival on a link; false when there is none.
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
                self.fail(crate::error::AbortReason::decode(&bytes, rank), Some(at));
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
            // What comes over another stream was said before the farewell that is still to come there.
            Frame::Close { next } if tree_links.links[at].transport.peer_closed() => {
                tree_links.links[at].left = Some(next);
                self.fail_if_peer_closed();
            }
            Frame::Close { .. } => {}
            Frame::MappingOffer { token } => self.map_peer_segment(at, token),
            Frame::MappingReady => tree_links.links[at].peer_memory.mapped(),
            Frame::Offer { .. } | Frame::Grant { .. } | Frame::Piece { .. } => {
                let why = "a frame between two ranks came along a tree".to_owned();
                self.violated_on(at, crate::core::tree::Violation::Protocol(why));
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
                let class = crate::core::credit::class(data.tree, data.stage);
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
            // SAFETY: a slot or a result place that the core has given to this frame alone: both
            // hold a whole chunk and stay until the frame has arrived or everything has ended
            // (then `fail` detaches the transport first).
            unsafe { tree_links.links[at].transport.body(memory, data.bytes, (data, place)) };
        }
    }

    /// Sends what is due, oldest chunk first.
    pub(super) fn flush_tree_links(&mut self) -> bool {
        let mut moved = false;
        for at in 0..self.tree_links.as_ref().map_or(0, TreeLinks::len) {
            while self.load(at) {
                moved = true;
                if !self.flush_link(at) {
                    break;
                }
            }
        }
        moved
    }

    /// Hands due chunks to a link's queue; true if it has something to send and may.
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
                // neither written nor given away until the core hears that it is sent, or `fail` has
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

    /// Sends what can go; false if nothing more would.
    pub(super) fn flush_link(&mut self, at: usize) -> bool {
        let Some(tree_links) = &mut self.tree_links else { return false };
        let link = &mut tree_links.links[at];
        let mut gone = Vec::new();
        let before = link.transport.traffic().0;
        let flushed = link.transport.flush(&self.poller, &mut gone);
        let sent = link.transport.traffic().0 - before;
        self.shared.counters.sent_bytes.fetch_add(sent, Ordering::Relaxed);
        let takes_more = link.transport.takes_more();
        for key in gone.into_iter().flatten() {
            tree_links.core.sent(key);
        }
        self.act();
        if flushed.is_err() {
            // What the peer said before it went may still be there to read, its farewell or its
            // reason among it: it speaks before the error does.
            if let Some(tree_links) = &mut self.tree_links {
                tree_links.links[at].transport.look_again();
            }
            while self.shared.broken.get().is_none() && self.read_one(at) {}
            return false;
        }
        takes_more
    }

    /// Signs of life, with what we are at, on every link that takes them.
    pub(super) fn send_heartbeats(&mut self) {
        let head = self.heartbeat();
        for at in 0..self.tree_links.as_ref().map_or(0, TreeLinks::len) {
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

    /// Which links have been heard since the last look.
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
