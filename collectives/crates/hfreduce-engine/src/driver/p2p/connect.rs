//! Establishes point-to-point connections: this rank dials a peer when it first has a frame for it,
//! and accepts the connections of peers at its port.

use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::{Dial, Incoming, Note, P2p, shutdown, token};
use crate::driver::fault::Fault;
use crate::driver::node::Node;
use crate::driver::shared::Shared;
use hfreduce_core::error::{AbortReason, ErrorKind};
use hfreduce_shm::lock;
use hfreduce_shm::quota::Charge;
use hfreduce_transport::connection::Connection;
use hfreduce_transport::wire::Head;

/// Maximum number of ranks dialed at the same time: a first all-to-all of a large group does not
/// need a thread per rank, and one slow rank does not delay the others.
const DIALERS_MAX: usize = 16;

/// Threads that dial peers, in order.
pub(super) struct Dialers {
    dial: Dial,
    pool: Pool<(u32, Instant)>,
}

/// Items that at most [`DIALERS_MAX`] threads process in order. A thread ends when no item is left.
struct Pool<T>(Arc<Mutex<Queue<T>>>);

struct Queue<T> {
    waiting: VecDeque<T>,
    threads: usize,
}

impl<T: Send + 'static> Pool<T> {
    fn new() -> Self {
        Self(Arc::new(Mutex::new(Queue { waiting: VecDeque::new(), threads: 0 })))
    }

    fn add(&self, item: T, work: impl Fn(T) + Send + 'static) -> io::Result<()> {
        let mut queue = lock(&self.0);
        queue.waiting.push_back(item);
        if queue.threads >= DIALERS_MAX {
            return Ok(());
        }
        let waiting = self.0.clone();
        let run = move || {
            while let Some(item) = next(&waiting) {
                work(item);
            }
        };
        match std::thread::Builder::new().name("hfreduce-dial".into()).spawn(run) {
            Ok(_) => queue.threads += 1,
            // The existing threads process the item.
            Err(_) if queue.threads > 0 => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

impl Dialers {
    pub(super) fn new(dial: Dial) -> Self {
        Self { dial, pool: Pool::new() }
    }

    /// Dials `peer` until `until`; the result is passed to the driver.
    fn add(&self, peer: u32, until: Instant, shared: &Arc<Shared>) -> io::Result<()> {
        let (dial, shared) = (self.dial.clone(), shared.clone());
        self.pool.add((peer, until), move |(peer, until)| {
            if shared.broken.get().is_some() {
                return;
            }
            let connected = dial(peer, until).map_err(|(kind, detail)| {
                let node = shared.identity.placement.node_name(peer);
                let blamed = if kind == ErrorKind::Io { shared.identity.rank } else { peer };
                let at = if blamed == peer { node } else { shared.own_node_name() };
                AbortReason::new(kind, shared.identity.rank, detail).with_peer(blamed, at)
            });
            lock(&shared.dialed).push((peer, connected));
            shared.notify();
        })
    }
}

/// The next item; a thread that gets none ends.
fn next<T>(queue: &Mutex<Queue<T>>) -> Option<T> {
    let mut queue = lock(queue);
    let next = queue.waiting.pop_front();
    if next.is_none() {
        queue.threads -= 1;
    }
    next
}

impl P2p {
    /// Sends a head and its payload to a rank, which is dialed if necessary.
    pub(super) fn send(
        &mut self,
        node: &Node,
        peer: u32,
        head: Head,
        payload: Vec<u8>,
    ) -> Result<(), Fault> {
        let outgoing = self.outgoing.entry(peer).or_default();
        outgoing.frames.push_back((head, payload));
        if outgoing.connection.is_some() || outgoing.dialing {
            return Ok(());
        }
        outgoing.dialing = true;
        let until = self.operations.values().map(|o| o.work.deadline).max();
        let until = until.unwrap_or_else(Instant::now);
        self.dialers.add(peer, until, &node.shared).map_err(|error| {
            node.io_fault(format!("cannot start a thread to dial rank {peer}: {error}"))
        })
    }

    /// Takes connections that were dialed or accepted: true if there were any, and the first fault
    /// of them.
    pub(in crate::driver) fn take_connections(&mut self, node: &Node) -> (bool, Result<(), Fault>) {
        let dialed = std::mem::take(&mut *lock(&node.shared.dialed));
        let admitted = std::mem::take(&mut *lock(&node.shared.admitted));
        let any = !dialed.is_empty() || !admitted.is_empty();
        let mut outcome = Ok(());
        for (peer, connected) in dialed {
            let adopted = match connected {
                Ok(stream) => self.adopt_outgoing(node, peer, stream),
                Err(cause) => Err(cause.into()),
            };
            outcome = outcome.and(adopted);
        }
        for (peer, stream, charge) in admitted {
            // A second connection of a peer means that it lost the first one: the same process,
            // since a new one has another key.
            if !self.incoming.contains_key(&peer) {
                outcome = outcome.and(self.adopt_incoming(node, peer, stream, charge));
            }
        }
        (any, outcome)
    }

    fn adopt_outgoing(&mut self, node: &Node, peer: u32, stream: TcpStream) -> Result<(), Fault> {
        let charge = node.shared.identity.share.descriptor();
        let connection = adopt(node, stream, token(peer, false))?;
        let outgoing = self.outgoing.entry(peer).or_default();
        outgoing.connection = Some(connection);
        outgoing.dialing = false;
        // Closing the connection now would look like the end of this rank: the abort sends the
        // reason first.
        outgoing._charge = charge.map_err(|error| node.io_fault(error.to_string()))?;
        Ok(())
    }

    fn adopt_incoming(
        &mut self,
        node: &Node,
        peer: u32,
        stream: TcpStream,
        _charge: Charge,
    ) -> Result<(), Fault> {
        let connection = adopt(node, stream, token(peer, true))?;
        let (receiving, eager, wants_room, peer_closed) = (None, None, false, false);
        let incoming = Incoming { connection, _charge, receiving, eager, wants_room, peer_closed };
        self.incoming.insert(peer, incoming);
        Ok(())
    }
}

/// Watches a new connection; after an abort it only sends the reason.
fn adopt(node: &Node, stream: TcpStream, token: u64) -> Result<Connection<Note>, Fault> {
    let socket_fault = |error: io::Error| node.io_fault(format!("socket: {error}"));
    let slot_bytes = node.shm.shape().slot_bytes;
    let mut connection = Connection::new(stream, slot_bytes).map_err(socket_fault)?;
    match node.shared.broken.get() {
        Some(cause) => shutdown::send_reason(&mut connection, &cause.encode()),
        None => node.poller.watch(&connection, token).map_err(socket_fault)?,
    }
    Ok(connection)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Condvar, mpsc};
    use std::time::Duration;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn a_thousand_ranks_are_dialled_by_sixteen_threads() {
        let (pool, gate) = (Pool::new(), Arc::new((Mutex::new(false), Condvar::new())));
        let (at_once, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (done, results) = mpsc::channel();
        let (started, starts) = mpsc::channel();
        for rank in 0..1024 {
            let (gate, at_once, most) = (gate.clone(), at_once.clone(), most.clone());
            let (done, started) = (done.clone(), started.clone());
            let work = move |rank: usize| {
                most.fetch_max(at_once.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                started.send(()).unwrap();
                let open = gate.1.wait_timeout_while(lock(&gate.0), PATIENCE, |open| !*open);
                drop(open);
                at_once.fetch_sub(1, Ordering::SeqCst);
                done.send(rank).unwrap();
            };
            pool.add(rank, work).unwrap();
        }
        for _ in 0..DIALERS_MAX {
            starts.recv_timeout(PATIENCE).unwrap();
        }
        // All threads are blocked in a dial; the other items wait.
        assert_eq!(lock(&pool.0).threads, DIALERS_MAX);
        assert_eq!(lock(&pool.0).waiting.len(), 1024 - DIALERS_MAX);
        *lock(&gate.0) = true;
        gate.1.notify_all();
        let mut ranks: Vec<usize> =
            (0..1024).map(|_| results.recv_timeout(PATIENCE).unwrap()).collect();
        ranks.sort_unstable();
        assert!(ranks.into_iter().eq(0..1024));
        assert_eq!(most.load(Ordering::SeqCst), DIALERS_MAX);
    }
}
