//! How direct connections come to be: we dial a rank when we first have something for it; the port
//! takes those who dial us.

use std::io;
use std::net::TcpStream;
use std::time::Instant;

use super::{Incoming, Note, farewell};
use crate::cause::Cause;
use crate::drivers::connection::Connection;
use crate::drivers::wire::Head;
use crate::drivers::{Driver, TOKEN_MESH_IN, TOKEN_MESH_OUT, lock};

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
