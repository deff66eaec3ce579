//! The links along the trees, on ranks that own a channel. What carries their frames is behind
//! [`Transport`].

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::io;
use std::sync::atomic::Ordering;

use super::lending::{Counter, Loan, is_shown};
use super::poller::{Poller, Ready};
use super::pools::Pools;
use super::transport::{LINE_SHIFT, Lasting, Payload, Received, Transport};
use super::wire::{Frame, Head};
use super::{Driver, TOKEN_TRUNK};
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
    pub told: Option<(u64, Option<u32>)>,
    /// What this end and the other lend each other.
    pub(super) loan: Loan,
}

/// All of them, with the core that they serve.
pub struct Trunk {
    /// The state machine.
    pub core: TreeCore,
    /// By link number.
    pub links: Vec<TreeLink>,
    /// Owned chunks that wait for local contributions.
    pub unready: VecDeque<u64>,
    /// Owned chunks that the core is done with and that are not delivered here yet.
    pub finished: HashSet<u64>,
    pub(super) counter: Counter,
    pools: Pools,
}

impl Trunk {
    /// For connected neighbours: (rank, what carries frames, loan) in the order of `flows.peers()`.
    pub fn new(
        flows: Flows,
        channel: (usize, usize),
        window: u32,
        slot_bytes: usize,
        peers: Vec<(u32, Box<dyn Transport>, Loan)>,
        counter: Counter,
    ) -> Self {
        let link = |(peer_rank, transport, loan)| TreeLink {
            transport,
            peer_rank,
            due: BTreeMap::new(),
            left: None,
            closed: false,
            heard_bytes: 0,
            told: None,
            loan,
        };
        let links: Vec<TreeLink> = peers.into_iter().map(link).collect();
        let pools = Pools::new(links.len(), window, slot_bytes);
        Self {
            core: TreeCore::new(flows, channel, window),
            links,
            unready: VecDeque::new(),
            finished: HashSet::new(),
            counter,
            pools,
        }
    }

    /// Links.
    pub fn len(&self) -> usize {
        self.links.len()
    }

    /// Registers what the links wait for, and lends our board to the neighbours that can see it.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn watch(&mut self, poller: &Poller) -> io::Result<()> {
        for (at, link) in self.links.iter_mut().enumerate() {
            link.transport.watch(poller, TOKEN_TRUNK | at as u64)?;
            if let Some(token) = link.loan.offered {
                let head = Head::bare(Frame::Lend { token });
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

    /// Where a partial sum lies: in its slot, or in the board of the neighbour that made it.
    pub fn partial(&self, partial: &Partial) -> *const u8 {
        let shown = self.links[partial.link].loan.shown(partial);
        shown.unwrap_or_else(|| self.pools.place(partial))
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
    pub(super) fn read_trunk(&mut self, index: usize, event: Ready) {
        let (link, line) = (index & ((1 << LINE_SHIFT) - 1), index >> LINE_SHIFT);
        let Some(trunk) = &mut self.trunk else { return };
        let goes_on = trunk.links[link].transport.woken(line, event);
        if event.readable {
            while self.shared.broken.get().is_none() && self.read_one(link) {}
        }
        if goes_on && self.shared.broken.get().is_none() {
            self.flush_link(link);
        }
    }

    /// One arrival on a link; false when there is none.
    fn read_one(&mut self, at: usize) -> bool {
        let Some(trunk) = &mut self.trunk else { return false };
        let link = &mut trunk.links[at];
        if link.closed {
            return false;
        }
        match link.transport.receive_next(&self.poller) {
            Ok(None) => return false,
            Ok(Some(Received::Head(head))) => {
                for key in link.transport.take_returned().into_iter().flatten() {
                    trunk.core.sent(key);
                }
                self.read_head(at, &head);
            }
            Ok(Some(Received::Payload((head, place)))) => self.arrived(at, &head, place),
            Ok(Some(Received::Owned(bytes))) => {
                let rank = self.shared.identity.rank;
                self.fail(crate::cause::Cause::decode(&bytes, rank), Some(at));
            }
            Err(error) => {
                self.link_lost(at, &error);
                return false;
            }
        }
        true
    }

    fn arrived(&mut self, at: usize, head: &DataHead, place: Place) {
        let Some(trunk) = &mut self.trunk else { return };
        match trunk.core.arrived(at, head, place) {
            Ok(()) => self.act(),
            Err(why) => self.violated_on(at, why),
        }
    }

    fn read_head(&mut self, at: usize, head: &Head) {
        let Some(trunk) = &mut self.trunk else { return };
        if head.credits != [0; CLASSES]
            && let Err(why) = trunk.core.credits(at, head.credits)
        {
            self.violated_on(at, why);
            return;
        }
        match head.frame {
            Frame::Data(data) => self.read_data(at, data, head.lent),
            Frame::Credit => {}
            Frame::Heartbeat { sequence, print, waiting_for } => {
                trunk.links[at].told = Some((sequence, waiting_for));
                if let Err(why) = trunk.core.compare(sequence, print) {
                    self.violated_on(at, why);
                }
            }
            Frame::Abort => trunk.links[at].transport.body_owned(head.payload_bytes),
            // What comes over another stream was said before the farewell that is still to come there.
            Frame::Bye { next } if trunk.links[at].transport.has_left() => {
                trunk.links[at].left = Some(next);
                self.refuse_the_departed();
            }
            Frame::Bye { .. } => {}
            Frame::Lend { token } => self.borrow_board(at, token),
            Frame::Mapped => trunk.links[at].loan.mapped(),
            Frame::Offer { .. } | Frame::Grant { .. } | Frame::Piece { .. } => {
                let why = "a frame between two ranks came along a tree".to_owned();
                self.violated_on(at, crate::core::tree::Violation::Protocol(why));
            }
        }
        self.act();
    }

    fn read_data(&mut self, at: usize, data: DataHead, lent: Option<u64>) {
        let Some(trunk) = &mut self.trunk else { return };
        let place = match trunk.core.place(at, &data) {
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
            trunk.links[at].loan.hide(slot);
        }
        if let (Some(offset), Some(slot), true) = (lent, &slot, is_shown(&data)) {
            if self.look_at(slot, offset, data.bytes) {
                self.arrived(at, &data, place);
            }
            return;
        }
        let memory = match &slot {
            Some(slot) => trunk.pools.place_mut(slot),
            None => match self.find_key((data.sequence, data.chunk)) {
                Some((op, chunk, number)) => self.place(number, op, &chunk),
                None => return,
            },
        };
        if let Some(offset) = lent {
            // SAFETY: as below.
            if unsafe { self.copy_lent(at, offset, memory, data.bytes) } {
                self.arrived(at, &data, place);
            }
        } else if let Some(trunk) = &mut self.trunk {
            // SAFETY: a slot or a result place that the core has given to this frame alone: both
            // hold a whole chunk and stay until the frame has arrived or everything has ended
            // (then `fail` detaches the transport first).
            unsafe { trunk.links[at].transport.body(memory, data.bytes, (data, place)) };
        }
    }

    /// Sends what is due, oldest chunk first.
    pub(super) fn flush_trunk(&mut self) -> bool {
        let mut moved = false;
        for at in 0..self.trunk.as_ref().map_or(0, Trunk::len) {
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
            let Some(trunk) = &mut self.trunk else { return false };
            let link = &mut trunk.links[at];
            if link.closed || !link.transport.takes_more() {
                break;
            }
            let Some(((key, stage), tree)) = link.due.pop_first() else { break };
            let Some((op, chunk, number)) = self.find_key(key) else { continue };
            let place = self.place_in(stage, number, op, &chunk);
            let bytes = chunk.bytes_in(stage);
            let print = self.active[op].operation.print;
            let Some(trunk) = &mut self.trunk else { return false };
            let data = DataHead { sequence: key.0, chunk: key.1, tree, stage, bytes, print };
            let lent = trunk.links[at].loan.offset(&self.board, place, bytes);
            let credits = trunk.core.take_owed(at);
            let payload_bytes = bytes;
            let head = Head { credits, payload_bytes, lent, ..Head::bare(Frame::Data(data)) };
            let payload = match lent {
                Some(_) => {
                    let lent = &self.shared.counters.lent_bytes;
                    lent.fetch_add(bytes as u64, Ordering::Relaxed);
                    if is_shown(&data) { Payload::Shown(bytes) } else { Payload::Lent(bytes) }
                }
                // SAFETY: a slot of the board or a caller's output, which holds the chunk and is
                // neither written nor given away until the core hears that it is sent, or `fail` has
                // detached the transport.
                None => Payload::Memory(unsafe { Lasting::new(place, bytes) }),
            };
            trunk.links[at].transport.push(&head, payload, Some(key));
            loaded = true;
        }
        if let Some(trunk) = &mut self.trunk
            && !trunk.links[at].closed
            && trunk.links[at].transport.takes_more()
            && (trunk.core.owes_much(at) || trunk.links[at].transport.owes_returns())
        {
            let credits = trunk.core.take_owed(at);
            let head = Head { credits, ..Head::bare(Frame::Credit) };
            trunk.links[at].transport.push(&head, Payload::Owned(vec![]), None);
            loaded = true;
        }
        loaded
    }

    /// Sends what can go; false if nothing more would.
    pub(super) fn flush_link(&mut self, at: usize) -> bool {
        let Some(trunk) = &mut self.trunk else { return false };
        let link = &mut trunk.links[at];
        let mut gone = Vec::new();
        let before = link.transport.traffic().0;
        let flushed = link.transport.flush(&self.poller, &mut gone);
        let sent = link.transport.traffic().0 - before;
        self.shared.counters.sent_bytes.fetch_add(sent, Ordering::Relaxed);
        let takes_more = link.transport.takes_more();
        for key in gone.into_iter().flatten() {
            trunk.core.sent(key);
        }
        self.act();
        if flushed.is_err() {
            // What the peer said before it went may still be there to read, its farewell or its
            // reason among it: it speaks before the error does.
            if let Some(trunk) = &mut self.trunk {
                trunk.links[at].transport.look_again();
            }
            while self.shared.broken.get().is_none() && self.read_one(at) {}
            return false;
        }
        takes_more
    }

    /// Signs of life, with what we are at, on every link that takes them.
    pub(super) fn send_heartbeats(&mut self) {
        let head = self.heartbeat();
        for at in 0..self.trunk.as_ref().map_or(0, Trunk::len) {
            if let Some(trunk) = &mut self.trunk {
                let link = &mut trunk.links[at];
                if link.closed || !link.transport.is_idle() {
                    continue;
                }
                link.transport.beat(&Head { credits: trunk.core.take_owed(at), ..head });
            }
            self.flush_link(at);
        }
    }

    /// Which links have been heard since the last look.
    pub(super) fn heard_links(&mut self) -> Vec<bool> {
        let Some(trunk) = &mut self.trunk else { return Vec::new() };
        let mut heard = Vec::with_capacity(trunk.links.len());
        for link in &mut trunk.links {
            let (_, bytes) = link.transport.traffic();
            let new = bytes - link.heard_bytes;
            link.heard_bytes = bytes;
            self.shared.counters.received_bytes.fetch_add(new, Ordering::Relaxed);
            heard.push(link.transport.heard() || link.closed || link.left.is_some());
        }
        heard
    }
}
