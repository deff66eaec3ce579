//! Establishes point-to-point connections: this rank dials a peer when it first has a frame for it,
//! and accepts the connections of peers at its port.

use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::{Dial, Incoming, Note, shutdown};
use crate::driver::{Driver, Shared, TOKEN_P2P_IN, TOKEN_P2P_OUT, lock};
use hfreduce_core::error::{AbortReason, ErrorKind};
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

impl Driver {
    /// Sends a head and its payload to a rank, which is dialed if necessary.
    pub(super) fn send_p2p(&mut self, peer: u32, head: Head, payload: Vec<u8>) {
        let outgoing = self.p2p.outgoing.entry(peer).or_default();
        outgoing.words.push_back((head, payload));
        if outgoing.connection.is_some() || outgoing.dialing {
            return;
        }
        outgoing.dialing = true;
        let until = self.p2p.operations.values().map(|o| o.work.deadline).max();
        let until = until.unwrap_or_else(Instant::now);
        if let Err(error) = self.p2p.dialers.add(peer, until, &self.shared) {
            self.fail(
                self.io_reason(format!("cannot start a thread to dial rank {peer}: {error}")),
                None,
            );
        }
    }

    /// Takes connections that were dialed or accepted.
    pub(in crate::driver) fn take_connections(&mut self) {
        let dialed = std::mem::take(&mut *lock(&self.shared.dialed));
        for (peer, connected) in dialed {
            match connected.map(|stream| self.adopt_outgoing(peer, stream)) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => self.fail(self.io_reason(format!("socket: {error}")), None),
                Err(cause) => self.fail(cause, None),
            }
        }
        let admitted = std::mem::take(&mut *lock(&self.shared.admitted));
        for (peer, stream, charge) in admitted {
            // A second connection of a peer means that it lost the first one: the same process,
            // since a new one has another key.
            if self.p2p.incoming.contains_key(&peer) {
                continue;
            }
            if let Err(error) = self.adopt_incoming(peer, stream, charge) {
                self.fail(self.io_reason(format!("socket: {error}")), None);
            }
        }
    }

    fn adopt_outgoing(&mut self, peer: u32, stream: TcpStream) -> io::Result<()> {
        let charge = self.shared.identity.share.descriptor().unwrap_or_else(|error| {
            // Closing the connection now would look like the end of this rank: send the reason
            // first.
            self.fail(self.io_reason(error.to_string()), None);
            Charge::default()
        });
        let connection = self.adopted(stream, TOKEN_P2P_OUT | u64::from(peer))?;
        let outgoing = self.p2p.outgoing.entry(peer).or_default();
        (outgoing.connection, outgoing._charge) = (Some(connection), charge);
        outgoing.dialing = false;
        Ok(())
    }

    fn adopt_incoming(&mut self, peer: u32, stream: TcpStream, _charge: Charge) -> io::Result<()> {
        let connection = self.adopted(stream, TOKEN_P2P_IN | u64::from(peer))?;
        let (receiving, eager, wants_room, left) = (None, None, false, false);
        let incoming = Incoming { connection, _charge, receiving, eager, wants_room, left };
        self.p2p.incoming.insert(peer, incoming);
        Ok(())
    }

    /// Watches a new connection; after an abort it only sends the reason.
    fn adopted(&mut self, stream: TcpStream, token: u64) -> io::Result<Connection<Note>> {
        let mut connection = Connection::new(stream, self.shm.shape().slot_bytes)?;
        match self.shared.broken.get() {
            Some(cause) => {
                shutdown::send_reason(&mut connection, &cause.encode());
                self.begin_drain();
            }
            None => self.poller.watch(&connection, token)?,
        }
        Ok(connection)
    }
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
