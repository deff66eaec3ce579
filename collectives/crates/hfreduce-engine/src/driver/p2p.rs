//! Point-to-point connections between two ranks, made on demand.
//!
//! There is one connection for each direction, dialed by the sender: two ranks that start at the
//! same time do not dial each other twice for one purpose, and neither waits for the other.
//! Modules:
//! - this one: the operations that use the connections, and what their messages wait for;
//! - `connect`: establishing connections;
//! - `send` and `receive`: frames and the end of a connection;
//! - `staging`: payloads between ranks of one node, which use the segment;
//! - `shutdown`: abort and close.

mod connect;
mod receive;
mod send;
mod shutdown;
mod staging;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::fault::Fault;
use super::node::Node;
use super::operations::Operations;
use crate::operation::{Operation, Transfer};
use crate::work::WorkState;
use hfreduce_core::Kind;
use hfreduce_core::error::ErrorKind;
use hfreduce_core::matching::{ANY_RANK, Envelope, PairAction, Pairs, TransferId};
use hfreduce_core::tree::Violation;
use hfreduce_shm::quota::Charge;
use hfreduce_transport::connection::Connection;
use hfreduce_transport::transport::Payload;
use hfreduce_transport::wire::{Frame, Head};

/// Poller tokens of connections that this rank has dialed, and of accepted ones, with the peer.
pub(super) const TOKEN_OUT: u64 = 4 << 32;
pub(super) const TOKEN_IN: u64 = 5 << 32;

fn token(peer: u32, inward: bool) -> u64 {
    (if inward { TOKEN_IN } else { TOKEN_OUT }) | u64::from(peer)
}

/// Dials a rank before the deadline. Blocking; it runs on one of a few threads for that.
pub type Dial = Arc<dyn Fn(u32, Instant) -> Result<TcpStream, (ErrorKind, String)> + Send + Sync>;

struct OutgoingMessage {
    message: u64,
    ticket: TransferId,
    sent_bytes: usize,
}

/// What the end of a frame completes, and the message slot that it frees.
#[derive(Debug, Default)]
struct Note {
    completes: Option<TransferId>,
    slot: Option<usize>,
}

#[derive(Default)]
struct Outgoing {
    connection: Option<Connection<Note>>,
    /// Counts the connection among its user's descriptors, as accepted ones do.
    _charge: Charge,
    dialing: bool,
    /// Frames that wait for the connection, and messages that wait for their turn.
    frames: VecDeque<(Head, Vec<u8>)>,
    messages: VecDeque<OutgoingMessage>,
    /// Message slots that the peer has not copied yet.
    staged: usize,
    wants_room: bool,
    peer_closed: bool,
}

struct Incoming {
    connection: Connection<Note>,
    _charge: Charge,
    receiving: Option<(u64, u64)>,
    /// The offer whose bytes are being received.
    eager: Option<(u64, Envelope)>,
    wants_room: bool,
    peer_closed: bool,
}

struct P2pOperation {
    operation: Operation,
    work: Arc<WorkState>,
    done: Vec<bool>,
}

impl P2pOperation {
    /// The transfers that are not complete.
    fn open(&self) -> impl Iterator<Item = &Transfer> {
        let transfers = self.operation.transfers.iter().zip(&self.done);
        transfers.filter(|(_, done)| !**done).map(|(transfer, _)| transfer)
    }
}

/// True for collective operations, which all ranks number alike.
fn is_collective(work: &WorkState) -> bool {
    !matches!(work.fingerprint.kind, Kind::Send | Kind::Recv)
}

/// All point-to-point connections and the operations that use them.
pub struct P2p {
    pairs: Pairs,
    operations: BTreeMap<u64, P2pOperation>,
    /// Sequence numbers of the collective operations.
    collectives: BTreeSet<u64>,
    next: u64,
    outgoing: BTreeMap<u32, Outgoing>,
    incoming: BTreeMap<u32, Incoming>,
    /// Unexpected messages: bytes of offers that no receive has matched, by peer and message.
    unexpected: BTreeMap<(u32, u64), Vec<u8>>,
    dialers: connect::Dialers,
    slots: staging::Slots,
}

impl P2p {
    /// Without connections.
    pub fn new(dial: Dial) -> Self {
        Self {
            pairs: Pairs::default(),
            operations: BTreeMap::new(),
            collectives: BTreeSet::new(),
            next: 0,
            outgoing: BTreeMap::new(),
            incoming: BTreeMap::new(),
            unexpected: BTreeMap::new(),
            dialers: connect::Dialers::new(dial),
            slots: staging::Slots::default(),
        }
    }

    /// True if there is a connection, or one is being established.
    pub(super) fn is_connected(&self) -> bool {
        !self.incoming.is_empty() || !self.outgoing.is_empty()
    }

    pub(super) fn is_busy(&self) -> bool {
        !self.operations.is_empty()
    }

    /// Adds an operation and returns its number.
    pub(super) fn adopt(&mut self, operation: Operation, work: Arc<WorkState>) -> u64 {
        let number = self.next;
        self.next += 1;
        if is_collective(&work) {
            self.collectives.insert(work.sequence);
        }
        let done = vec![false; operation.transfers.len()];
        self.operations.insert(number, P2pOperation { operation, work, done });
        number
    }

    pub(super) fn take_works(&mut self) -> Vec<Arc<WorkState>> {
        self.collectives.clear();
        std::mem::take(&mut self.operations).into_values().map(|o| o.work).collect()
    }

    pub(super) fn works(&self) -> impl Iterator<Item = &Arc<WorkState>> {
        self.operations.values().map(|operation| &operation.work)
    }

    pub(super) fn collectives(&self) -> impl Iterator<Item = &Arc<WorkState>> {
        self.works().filter(|work| is_collective(work))
    }

    /// The number of the oldest collective operation.
    pub(super) fn oldest_collective(&self) -> Option<u64> {
        self.collectives.first().copied()
    }

    /// What an operation waits for: a description, and the rank if known.
    pub(super) fn waiting_for(&self, work: &WorkState) -> Option<(String, Option<u32>)> {
        let operation = self.operations.values().find(|o| std::ptr::eq(&*o.work, work))?;
        let transfer = operation.open().next()?;
        if transfer.peer == ANY_RANK {
            return Some(("waiting for a message from any rank".to_owned(), None));
        }
        let what =
            if transfer.sends { "waiting for a receive of" } else { "waiting for a message from" };
        Some((format!("{what} rank {}", transfer.peer), Some(transfer.peer)))
    }

    /// The bytes of a short outgoing message.
    fn bytes_of(&self, ticket: TransferId) -> Vec<u8> {
        let Some(active) = self.operations.get(&ticket.operation) else { return vec![] };
        let Some(transfer) = active.operation.transfers.get(ticket.transfer) else { return vec![] };
        let mut bytes = Vec::with_capacity(transfer.bytes);
        for (memory, count) in active.operation.input.ranges(transfer.offset, transfer.bytes) {
            // SAFETY: inside the operation's input, which does not change until the operation ends.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(memory, count) });
        }
        bytes
    }

    /// Copies a short message to its destination; false if its length differs.
    fn place(&self, ticket: TransferId, bytes: &[u8]) -> bool {
        let Some(active) = self.operations.get(&ticket.operation) else { return false };
        let transfer = active.operation.transfers.get(ticket.transfer);
        let Some(transfer) = transfer.filter(|transfer| transfer.bytes == bytes.len()) else {
            return false;
        };
        let mut rest = bytes;
        for (memory, count) in active.operation.output.ranges(transfer.offset, transfer.bytes) {
            let Some((part, others)) = rest.split_at_checked(count) else { return false };
            // SAFETY: inside the operation's output, which is exclusive until the operation ends;
            // the bytes are local memory.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), memory, count) };
            rest = others;
        }
        rest.is_empty()
    }

    /// Records the sender that was matched with a receive from any rank.
    fn set_source(&mut self, ticket: TransferId, peer: u32) {
        let Some(active) = self.operations.get_mut(&ticket.operation) else { return };
        if let Some(transfer) = active.operation.transfers.get_mut(ticket.transfer)
            && transfer.peer == ANY_RANK
        {
            transfer.peer = peer;
            active.work.set_source(peer);
        }
    }

    pub(super) fn start(
        &mut self,
        node: &Node,
        operations: &mut Operations,
        operation: Operation,
        work: Arc<WorkState>,
    ) -> Result<(), Fault> {
        let fingerprint = operation.fingerprint;
        let transfers = operation.transfers.clone();
        node.shared.recorder.cut(work.flight, transfers.len() as u32);
        let number = self.adopt(operation, work);
        for (transfer, what) in transfers.iter().enumerate() {
            debug_assert!(what.peer != node.rank(), "copies to the own rank are made before");
            let ticket = TransferId { operation: number, transfer };
            let envelope = Envelope { tag: what.tag, bytes: what.bytes as u64, fingerprint };
            if what.sends {
                self.pairs.send(what.peer, ticket, envelope);
            } else {
                self.pairs
                    .receive(what.peer, ticket, envelope)
                    .map_err(|(peer, why)| node.violation(peer, why))?;
            }
        }
        if transfers.is_empty() {
            self.complete(node, operations, number);
        }
        self.act(node, operations)
    }

    /// Executes the actions of the core, in order.
    fn act(&mut self, node: &Node, operations: &mut Operations) -> Result<(), Fault> {
        while let Some(action) = self.pairs.poll() {
            match action {
                PairAction::Offer { peer, message, envelope, eager } => {
                    let Envelope { tag, bytes, fingerprint } = envelope;
                    let payload = eager.map_or(vec![], |ticket| self.bytes_of(ticket));
                    let head = Head::bare(Frame::Offer { message, tag, bytes, fingerprint });
                    let head = Head { payload_bytes: payload.len(), ..head };
                    node.shared.peer_bytes.count_sent(peer, payload.len());
                    self.send(node, peer, head, payload)?;
                }
                PairAction::Grant { peer, message, ticket } => {
                    self.set_source(ticket, peer);
                    if let Some(incoming) = self.incoming.get_mut(&peer) {
                        let grant = Head::bare(Frame::Grant { message });
                        incoming.connection.push(&grant, Payload::Owned(vec![]), Note::default());
                    }
                }
                PairAction::Take { peer, message, ticket } => {
                    let bytes = self.unexpected.remove(&(peer, message)).unwrap_or_default();
                    if !self.place(ticket, &bytes) {
                        let why = format!("the bytes of message {message} are missing");
                        return Err(node.violation(peer, Violation::Protocol(why)));
                    }
                }
                PairAction::Stream { peer, message, ticket } => {
                    let outgoing = self.outgoing.entry(peer).or_default();
                    outgoing.messages.push_back(OutgoingMessage { message, ticket, sent_bytes: 0 });
                }
                PairAction::Complete { ticket } => self.transferred(node, operations, ticket),
            }
        }
        Ok(())
    }

    fn connection(&mut self, peer: u32, inward: bool) -> Option<&mut Connection<Note>> {
        if inward {
            self.incoming.get_mut(&peer).map(|incoming| &mut incoming.connection)
        } else {
            self.outgoing.get_mut(&peer)?.connection.as_mut()
        }
    }

    fn transferred(&mut self, node: &Node, operations: &mut Operations, ticket: TransferId) {
        let Some(active) = self.operations.get_mut(&ticket.operation) else { return };
        if let Some(done) = active.done.get_mut(ticket.transfer) {
            *done = true;
            let through = active.done.iter().filter(|done| **done).count() as u32;
            node.shared.recorder.progress(active.work.flight, through, through);
        }
        if active.done.iter().all(|done| *done) {
            self.complete(node, operations, ticket.operation);
        }
    }

    fn complete(&mut self, node: &Node, operations: &mut Operations, number: u64) {
        let Some(done) = self.operations.remove(&number) else { return };
        node.shared.counters.operations.fetch_add(1, Ordering::Relaxed);
        node.shared.recorder.finished(done.work.flight, false, Instant::now());
        // A send or receive has the number of the collective that follows it.
        if is_collective(&done.work) {
            self.collectives.remove(&done.work.sequence);
            operations.publish_ended(node, self.oldest_collective());
        }
        done.work.complete();
        node.shared.waiters.wake_all();
    }
}
