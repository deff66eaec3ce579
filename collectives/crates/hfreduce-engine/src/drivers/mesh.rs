//! Direct connections between two ranks, made when they are first needed.
//!
//! One connection for each direction, dialled by the sender: so two ranks that begin at once do
//! not dial each other twice for one purpose, and nobody has to wait for the other's turn.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use super::connection::{Arrival, Connection, Payload};
use super::poller::Ready;
use super::wire::{Frame, Head, PIECE_BYTES_MAX};
use super::{Driver, TOKEN_MESH_IN, TOKEN_MESH_OUT, lock};
use crate::cause::{Cause, CauseKind};
use crate::core::Kind;
use crate::core::pair::{Letter, PairAction, Pairs, Ticket};
use crate::core::tree::Violation;
use crate::operation::{Operation, Transfer};
use crate::work::WorkState;

/// How this rank reaches the others: gives a connection to a rank, before the deadline. Blocking;
/// it runs on a thread of its own.
pub type Dial = Arc<dyn Fn(u32, Instant) -> Result<TcpStream, (CauseKind, String)> + Send + Sync>;

/// Pieces handed to a socket at a time.
const QUEUED_MAX: usize = 2;

struct Stream {
    message: u64,
    ticket: Ticket,
    sent: usize,
}

/// What a frame that is gone completes.
type Note = Option<Ticket>;

#[derive(Default)]
struct Outgoing {
    connection: Option<Connection<Note>>,
    dialling: bool,
    /// Frames that wait for the connection, and messages that wait for their turn.
    words: VecDeque<Head>,
    streams: VecDeque<Stream>,
    wants_room: bool,
    left: bool,
}

struct Incoming {
    connection: Connection<Note>,
    receiving: Option<(u64, u64)>,
    wants_room: bool,
    left: bool,
}

struct MeshOperation {
    operation: Operation,
    work: Arc<WorkState>,
    done: Vec<bool>,
}

impl MeshOperation {
    /// The transfers that are not complete.
    fn open(&self) -> impl Iterator<Item = &Transfer> {
        let transfers = self.operation.transfers.iter().zip(&self.done);
        transfers.filter(|(_, done)| !**done).map(|(transfer, _)| transfer)
    }
}

/// All of them.
pub struct Mesh {
    pairs: Pairs,
    operations: BTreeMap<u64, MeshOperation>,
    next: u64,
    outgoing: BTreeMap<u32, Outgoing>,
    incoming: BTreeMap<u32, Incoming>,
    dial: Dial,
}

impl Mesh {
    /// With no connection yet.
    pub fn new(dial: Dial) -> Self {
        Self {
            pairs: Pairs::default(),
            operations: BTreeMap::new(),
            next: 0,
            outgoing: BTreeMap::new(),
            incoming: BTreeMap::new(),
            dial,
        }
    }

    pub(super) fn is_busy(&self) -> bool {
        !self.operations.is_empty()
    }

    /// Counts an operation among ours.
    pub(super) fn adopt(&mut self, operation: Operation, work: Arc<WorkState>) -> u64 {
        let number = self.next;
        self.next += 1;
        let done = vec![false; operation.transfers.len()];
        self.operations.insert(number, MeshOperation { operation, work, done });
        number
    }

    /// No connection points into callers' memory after this.
    pub(super) fn detach(&mut self) {
        for outgoing in self.outgoing.values_mut() {
            outgoing.streams.clear();
            outgoing.words.clear();
            if let Some(connection) = &mut outgoing.connection {
                connection.detach();
            }
        }
        for incoming in self.incoming.values_mut() {
            incoming.receiving = None;
            incoming.connection.detach();
        }
    }

    pub(super) fn take_works(&mut self) -> Vec<Arc<WorkState>> {
        std::mem::take(&mut self.operations).into_values().map(|o| o.work).collect()
    }

    pub(super) fn works(&self) -> impl Iterator<Item = &Arc<WorkState>> {
        self.operations.values().map(|operation| &operation.work)
    }

    pub(super) fn collectives(&self) -> impl Iterator<Item = &Arc<WorkState>> {
        self.works().filter(|work| !matches!(work.print.kind, Kind::Send | Kind::Recv))
    }

    /// What this operation waits for.
    pub(super) fn waiting_for(&self, work: &WorkState) -> Option<(String, u32)> {
        let found = self.operations.values().find(|o| std::ptr::eq(&*o.work, work))?;
        let transfer = found.open().next()?;
        let what =
            if transfer.sends { "waiting for a receive of" } else { "waiting for a message from" };
        Some((format!("{what} rank {}", transfer.peer), transfer.peer))
    }

    /// Bytes that the peers' machines have not taken yet.
    pub(super) fn unsent_bytes(&self) -> usize {
        let outgoing = self.outgoing.values().filter_map(|o| o.connection.as_ref());
        let all = outgoing.chain(self.incoming.values().map(|incoming| &incoming.connection));
        all.map(Connection::unsent_bytes).sum()
    }

    pub(super) fn leave(&mut self, next: u64) {
        let bye = Head::bare(Frame::Bye { next });
        let outgoing = self.outgoing.values_mut().filter_map(|o| o.connection.as_mut());
        for connection in outgoing.chain(self.incoming.values_mut().map(|i| &mut i.connection)) {
            connection.push(&bye, Payload::Owned(vec![]), None);
            let _ = connection.flush(&mut Vec::new());
        }
    }
}

impl Driver {
    pub(super) fn begin_mesh(&mut self, operation: Operation, work: Arc<WorkState>) {
        let print = operation.print;
        let transfers = operation.transfers.clone();
        let own = self.shared.identity.rank;
        self.shared.recorder.cut(work.flight, transfers.len() as u32);
        let number = self.mesh.adopt(operation, work);
        for (transfer, what) in transfers.iter().enumerate() {
            let ticket = Ticket { operation: number, transfer };
            let letter = Letter { tag: what.tag, bytes: what.bytes as u64, print };
            if what.sends {
                self.mesh.pairs.send(what.peer, ticket, letter);
            } else if let Err(why) = self.mesh.pairs.receive(what.peer, ticket, letter) {
                self.violated(what.peer, why);
                return;
            }
            debug_assert!(what.peer != own, "copies to oneself are made before");
        }
        if transfers.is_empty() {
            self.complete_mesh(number);
        }
        self.act_mesh();
        self.refuse_the_departed();
    }

    fn act_mesh(&mut self) {
        while let Some(action) = self.mesh.pairs.poll() {
            match action {
                PairAction::Offer { peer, message, letter } => {
                    let Letter { tag, bytes, print } = letter;
                    self.say(peer, Head::bare(Frame::Offer { message, tag, bytes, print }));
                }
                PairAction::Grant { peer, message } => {
                    if let Some(incoming) = self.mesh.incoming.get_mut(&peer) {
                        let grant = Head::bare(Frame::Grant { message });
                        incoming.connection.push(&grant, Payload::Owned(vec![]), None);
                    }
                }
                PairAction::Stream { peer, message, ticket } => {
                    let outgoing = self.mesh.outgoing.entry(peer).or_default();
                    outgoing.streams.push_back(Stream { message, ticket, sent: 0 });
                }
                PairAction::Complete { ticket } => self.transferred(ticket),
            }
        }
    }

    fn say(&mut self, peer: u32, head: Head) {
        let outgoing = self.mesh.outgoing.entry(peer).or_default();
        outgoing.words.push_back(head);
        if outgoing.connection.is_some() || outgoing.dialling {
            return;
        }
        outgoing.dialling = true;
        let until = self.mesh.operations.values().map(|o| o.work.deadline).max();
        let until = until.unwrap_or_else(Instant::now);
        let (dial, shared) = (self.mesh.dial.clone(), self.shared.clone());
        let dialler = move || {
            let connected = dial(peer, until).map_err(|(kind, detail)| {
                let node = shared.identity.placement.node_name(peer);
                Cause::new(kind, shared.identity.rank, detail).blaming(peer, node)
            });
            lock(&shared.dialled).push((peer, connected));
            shared.ring();
        };
        let spawned = std::thread::Builder::new().name("hfreduce-dial".into()).spawn(dialler);
        if let Err(error) = spawned {
            self.fail(self.own_trouble(format!("no thread to dial rank {peer}: {error}")), None);
        }
    }

    /// Connections that were made, by us or by others.
    pub(super) fn take_connections(&mut self) {
        let dialled = std::mem::take(&mut *lock(&self.shared.dialled));
        for (peer, connected) in dialled {
            match connected.map(|stream| self.adopt_outgoing(peer, stream)) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => self.fail(self.own_trouble(format!("a socket: {error}")), None),
                Err(cause) => self.fail(cause, None),
            }
        }
        let admitted = std::mem::take(&mut *lock(&self.shared.admitted));
        for (peer, stream) in admitted {
            // Whoever connects a second time lost the first connection: a new process it is not.
            if self.mesh.incoming.contains_key(&peer) {
                continue;
            }
            if let Err(error) = self.adopt_incoming(peer, stream) {
                self.fail(self.own_trouble(format!("a socket: {error}")), None);
            }
        }
    }

    fn adopt_outgoing(&mut self, peer: u32, stream: TcpStream) -> io::Result<()> {
        let connection = Connection::new(stream, self.board.shape().slot_bytes)?;
        self.poller.watch(&connection, TOKEN_MESH_OUT | u64::from(peer))?;
        let outgoing = self.mesh.outgoing.entry(peer).or_default();
        outgoing.connection = Some(connection);
        outgoing.dialling = false;
        Ok(())
    }

    fn adopt_incoming(&mut self, peer: u32, stream: TcpStream) -> io::Result<()> {
        let connection = Connection::new(stream, self.board.shape().slot_bytes)?;
        self.poller.watch(&connection, TOKEN_MESH_IN | u64::from(peer))?;
        let incoming = Incoming { connection, receiving: None, wants_room: false, left: false };
        self.mesh.incoming.insert(peer, incoming);
        Ok(())
    }

    pub(super) fn mesh_event(&mut self, event: Ready) {
        let peer = event.token as u32;
        let inward = event.token & !0xffff_ffff == TOKEN_MESH_IN;
        if event.writable {
            self.flush_mesh(peer, inward);
        }
        if !event.readable {
            return;
        }
        if let Some(connection) = self.mesh_connection(peer, inward) {
            connection.readable();
        }
        while self.shared.broken.get().is_none() {
            let Some(connection) = self.mesh_connection(peer, inward) else { return };
            let taken = match connection.receive_next() {
                Ok(None) => return,
                Ok(Some(Arrival::Head(head))) if inward => self.inward_head(peer, &head),
                Ok(Some(Arrival::Head(head))) => self.outward_head(peer, &head),
                Ok(Some(_)) => {
                    let incoming = self.mesh.incoming.get_mut(&peer);
                    if let Some((message, bytes)) = incoming.and_then(|i| i.receiving.take()) {
                        self.mesh.pairs.arrived(peer, message, bytes);
                    }
                    Ok(())
                }
                Err(error) => {
                    self.mesh_lost(peer, inward, &error);
                    return;
                }
            };
            if let Err(why) = taken {
                self.violated(peer, why);
            }
            self.act_mesh();
        }
    }

    fn mesh_connection(&mut self, peer: u32, inward: bool) -> Option<&mut Connection<Note>> {
        if inward {
            self.mesh.incoming.get_mut(&peer).map(|incoming| &mut incoming.connection)
        } else {
            self.mesh.outgoing.get_mut(&peer)?.connection.as_mut()
        }
    }

    fn inward_head(&mut self, peer: u32, head: &Head) -> Result<(), Violation> {
        match head.frame {
            Frame::Offer { message, tag, bytes, print } => {
                self.mesh.pairs.offered(peer, message, Letter { tag, bytes, print })
            }
            Frame::Piece { message } => {
                let bytes = head.payload_bytes;
                let (ticket, have) = self.mesh.pairs.piece(peer, message, bytes as u64)?;
                let found = self.mesh.operations.get(&ticket.operation);
                let place = found.and_then(|found| {
                    let transfer = found.operation.transfers.get(ticket.transfer)?;
                    found.operation.output.contiguous(transfer.offset + have as usize, bytes)
                });
                let (Some(place), Some(incoming)) = (place, self.mesh.incoming.get_mut(&peer))
                else {
                    return Err(Violation::Protocol("a piece has no place here".into()));
                };
                incoming.receiving = Some((message, bytes as u64));
                // SAFETY: inside the operation's output, which is ours until the operation ends;
                // it cannot end before this piece has arrived or `detach` was called.
                unsafe { incoming.connection.body(place, bytes) };
                Ok(())
            }
            Frame::Bye { .. } => {
                if let Some(incoming) = self.mesh.incoming.get_mut(&peer) {
                    incoming.left = true;
                }
                Ok(())
            }
            other => Err(Violation::Protocol(format!("{other:?} came between two ranks"))),
        }
    }

    fn outward_head(&mut self, peer: u32, head: &Head) -> Result<(), Violation> {
        match head.frame {
            Frame::Grant { message } => self.mesh.pairs.granted(peer, message),
            Frame::Bye { .. } => {
                if let Some(outgoing) = self.mesh.outgoing.get_mut(&peer) {
                    outgoing.left = true;
                }
                Ok(())
            }
            other => Err(Violation::Protocol(format!("{other:?} came between two ranks"))),
        }
    }

    /// Sends what can be sent; true if anything moved.
    pub(super) fn move_mesh(&mut self) -> bool {
        let mut moved = false;
        let outward: Vec<u32> = self.mesh.outgoing.keys().copied().collect();
        for peer in outward {
            moved |= self.load_mesh(peer);
            moved |= self.flush_mesh(peer, false);
        }
        let inward: Vec<u32> = self.mesh.incoming.keys().copied().collect();
        for peer in inward {
            moved |= self.flush_mesh(peer, true);
        }
        moved
    }

    fn load_mesh(&mut self, peer: u32) -> bool {
        let Some(outgoing) = self.mesh.outgoing.get_mut(&peer) else { return false };
        let Some(connection) = &mut outgoing.connection else { return false };
        let mut loaded = false;
        while let Some(word) = outgoing.words.pop_front() {
            connection.push(&word, Payload::Owned(vec![]), None);
            loaded = true;
        }
        while connection.queued() < QUEUED_MAX {
            let Some(stream) = outgoing.streams.front_mut() else { break };
            let Some(found) = self.mesh.operations.get(&stream.ticket.operation) else { break };
            let Some(transfer) = found.operation.transfers.get(stream.ticket.transfer) else {
                break;
            };
            let bytes = (transfer.bytes - stream.sent).min(PIECE_BYTES_MAX);
            let from = transfer.offset + stream.sent;
            let Some(memory) = found.operation.input.contiguous(from, bytes) else { break };
            stream.sent += bytes;
            let last = stream.sent == transfer.bytes;
            let head = Frame::Piece { message: stream.message };
            let head = Head { payload_bytes: bytes, ..Head::bare(head) };
            // The input stays unchanged until the operation ends, which needs this frame gone.
            connection.push(&head, Payload::Memory(memory, bytes), last.then_some(stream.ticket));
            loaded = true;
            if last {
                outgoing.streams.pop_front();
            }
        }
        loaded
    }

    fn flush_mesh(&mut self, peer: u32, inward: bool) -> bool {
        let mut gone = Vec::new();
        let Some(connection) = self.mesh_connection(peer, inward) else { return false };
        if connection.queued() == 0 {
            return false;
        }
        let before = connection.sent_bytes;
        let flushed = connection.flush(&mut gone);
        let moved = connection.sent_bytes != before;
        let full = connection.queued() > 0;
        if let Err(error) = flushed {
            // As along the trees: what it said before comes first.
            let token = if inward { TOKEN_MESH_IN } else { TOKEN_MESH_OUT } | u64::from(peer);
            self.mesh_event(Ready { token, readable: true, writable: false });
            if self.mesh_connection(peer, inward).is_some() {
                self.mesh_lost(peer, inward, &error);
            }
            return true;
        }
        self.mesh_room(peer, inward, full);
        for ticket in gone.into_iter().flatten() {
            self.transferred(ticket);
        }
        moved
    }

    fn mesh_room(&mut self, peer: u32, inward: bool, full: bool) {
        let token = if inward { TOKEN_MESH_IN } else { TOKEN_MESH_OUT } | u64::from(peer);
        let poller = &self.poller;
        if inward {
            if let Some(incoming) = self.mesh.incoming.get_mut(&peer)
                && std::mem::replace(&mut incoming.wants_room, full) != full
            {
                let _ = poller.want_room(&incoming.connection, token, full);
            }
        } else if let Some(outgoing) = self.mesh.outgoing.get_mut(&peer)
            && std::mem::replace(&mut outgoing.wants_room, full) != full
            && let Some(connection) = &outgoing.connection
        {
            let _ = poller.want_room(connection, token, full);
        }
    }

    fn transferred(&mut self, ticket: Ticket) {
        let Some(found) = self.mesh.operations.get_mut(&ticket.operation) else { return };
        if let Some(done) = found.done.get_mut(ticket.transfer) {
            *done = true;
            let through = found.done.iter().filter(|done| **done).count() as u32;
            self.shared.recorder.progress(found.work.flight, through, through);
        }
        if found.done.iter().all(|done| *done) {
            self.complete_mesh(ticket.operation);
        }
    }

    fn complete_mesh(&mut self, number: u64) {
        if let Some(done) = self.mesh.operations.remove(&number) {
            use std::sync::atomic::Ordering;
            self.shared.counters.operations.fetch_add(1, Ordering::Relaxed);
            self.shared.recorder.finished(done.work.flight, false, Instant::now());
            done.work.complete();
            self.shared.room.call();
        }
    }

    /// A direct connection ended: a failure only if somebody still needs it.
    fn mesh_lost(&mut self, peer: u32, inward: bool, error: &io::Error) {
        self.heed_abort();
        // Dropping a connection closes its socket, and epoll forgets a closed one by itself.
        let left = if inward {
            self.mesh.incoming.remove(&peer).is_some_and(|incoming| incoming.left)
        } else {
            self.mesh.outgoing.remove(&peer).is_some_and(|outgoing| outgoing.left)
        };
        let mut open = self.mesh.operations.values().flat_map(MeshOperation::open);
        let needed = open.any(|transfer| transfer.peer == peer && transfer.sends != inward);
        drop(open);
        if !needed {
            return;
        }
        if left {
            let detail = "it closed the communicator before this message".into();
            self.fail(self.blame(CauseKind::PeerLeft, peer, detail), None);
        } else {
            self.peer_lost(peer, error);
        }
    }
}
