//! How direct connections come to be: we dial a rank when we first have something for it; the port
//! takes those who dial us.

use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::{Dial, Incoming, Note, farewell};
use crate::cause::{Cause, CauseKind};
use crate::drivers::connection::Connection;
use crate::drivers::wire::Head;
use crate::drivers::{Driver, Shared, TOKEN_MESH_IN, TOKEN_MESH_OUT, lock};

/// Ranks that are dialled at the same time: a first all-to-all of a large group needs no thread for each
/// of them, and one rank that answers late does not keep all others waiting.
const DIALERS_MAX: usize = 16;

/// A few threads that dial whom we have messages for, in turn.
pub(super) struct Dialers {
    dial: Dial,
    queue: Arc<Mutex<Queue>>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<(u32, Instant)>,
    threads: usize,
}

impl Dialers {
    pub(super) fn new(dial: Dial) -> Self {
        Self { dial, queue: Arc::default() }
    }

    /// Has `peer` dialled until `until`; the result comes with the driver's news.
    fn add(&self, peer: u32, until: Instant, shared: &Arc<Shared>) -> io::Result<()> {
        let mut queue = lock(&self.queue);
        queue.waiting.push_back((peer, until));
        if queue.threads >= DIALERS_MAX {
            return Ok(());
        }
        let (dial, waiting, shared) = (self.dial.clone(), self.queue.clone(), shared.clone());
        let work = move || {
            while let Some((peer, until)) = next(&waiting) {
                if shared.broken.get().is_some() {
                    continue;
                }
                let connected = dial(peer, until).map_err(|(kind, detail)| {
                    let node = shared.identity.placement.node_name(peer);
                    let blamed = if kind == CauseKind::Io { shared.identity.rank } else { peer };
                    let at = if blamed == peer { node } else { shared.own_node_name() };
                    Cause::new(kind, shared.identity.rank, detail).blaming(blamed, at)
                });
                lock(&shared.dialled).push((peer, connected));
                shared.ring();
            }
        };
        let spawned = std::thread::Builder::new().name("hfreduce-dial".into()).spawn(work);
        match spawned {
            Ok(_) => queue.threads += 1,
            // Those that there are take it.
            Err(_) if queue.threads > 0 => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// The next one to dial; a thread that gets none is done.
fn next(queue: &Mutex<Queue>) -> Option<(u32, Instant)> {
    let mut queue = lock(queue);
    let next = queue.waiting.pop_front();
    if next.is_none() {
        queue.threads -= 1;
    }
    next
}

impl Driver {
    pub(super) fn say(&mut self, peer: u32, head: Head) {
        let outgoing = self.mesh.outgoing.entry(peer).or_default();
        outgoing.words.push_back(head);
        if outgoing.connection.is_some() || outgoing.dialling {
            return;
        }
        outgoing.dialling = true;
        let until = self.mesh.operations.values().map(|o| o.work.deadline).max();
        let until = until.unwrap_or_else(Instant::now);
        if let Err(error) = self.mesh.dialers.add(peer, until, &self.shared) {
            self.fail(self.own_trouble(format!("no thread to dial rank {peer}: {error}")), None);
        }
    }

    /// Connections that were made, by us or by others.
    pub(in crate::drivers) fn take_connections(&mut self) {
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
        let connection = self.adopted(stream, TOKEN_MESH_OUT | u64::from(peer))?;
        let outgoing = self.mesh.outgoing.entry(peer).or_default();
        outgoing.connection = Some(connection);
        outgoing.dialling = false;
        Ok(())
    }

    fn adopt_incoming(&mut self, peer: u32, stream: TcpStream) -> io::Result<()> {
        let connection = self.adopted(stream, TOKEN_MESH_IN | u64::from(peer))?;
        let incoming = Incoming { connection, receiving: None, wants_room: false, left: false };
        self.mesh.incoming.insert(peer, incoming);
        Ok(())
    }

    /// Listens to a new connection; where everything has ended it only says why.
    fn adopted(&mut self, stream: TcpStream, token: u64) -> io::Result<Connection<Note>> {
        let mut connection = Connection::new(stream, self.board.shape().slot_bytes)?;
        match self.shared.broken.get() {
            Some(cause) => {
                farewell::tell(&mut connection, &cause.encode());
                self.begin_farewell();
            }
            None => self.poller.watch(&connection, token)?,
        }
        Ok(connection)
    }
}
