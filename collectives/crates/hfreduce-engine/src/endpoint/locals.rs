//! The ranks of one node meet: shared memory, bells, and sockets whose hang-up is a death.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use fabric::auth::{Acceptor, CHALLENGE_BYTES, Dialer, HELLO_BYTES, PROOF_BYTES, nonce};
use fabric::deadline::Deadline;
use fabric::shm::{self, Segment};
use rustix::fd::{AsFd, OwnedFd};

use super::info::{Info, context};
use super::{Endpoint, HANDSHAKE_TIMEOUT};
use crate::board::{Board, Shape};
use crate::cause::{CauseKind, CollectiveError};
use crate::drivers::Neighbourhood;

impl Endpoint {
    pub(super) fn meet_locals(
        &self,
        infos: &[Info],
        group: u64,
        bell: &OwnedFd,
        slots: usize,
        deadline: Deadline,
    ) -> Result<(Board, Neighbourhood), CollectiveError> {
        let node = self.placement.node_of(self.options.rank);
        let members = self.placement.members(node);
        let shape = Shape { locals: members.len(), slots, slot_bytes: self.options.slot_bytes };
        let own = || bell.try_clone();
        let io =
            |error: io::Error| self.trouble("sharing memory inside the node", error.to_string());
        let foreign = || {
            let detail = "the node's shared memory is not what it should be".to_owned();
            self.blame(CauseKind::Protocol, members[0], "sharing memory inside the node", detail)
        };
        if members[0] == self.options.rank {
            let segment = Segment::create("hfreduce", shape.bytes()).map_err(io)?;
            let board = Board::create(segment, shape).ok_or_else(foreign)?;
            let mut arrived = self.gather_locals(members, group, deadline)?;
            let mut bells = vec![own().map_err(io)?];
            let mut watched = Vec::new();
            for (local, rank) in members.iter().enumerate().skip(1) {
                if let Some((stream, bell)) = arrived.remove(rank) {
                    bells.push(bell);
                    let process = shm::peer_process(&stream);
                    watched.push((local, stream, process));
                }
            }
            for (local, stream, _) in &watched {
                let mut fds = vec![board.segment().fd()];
                fds.extend(bells.iter().map(|bell| bell.as_fd()));
                shm::send_descriptors(stream, b"board", &fds, deadline).map_err(|error| {
                    let phase = "sharing memory inside the node";
                    self.blame(CauseKind::PeerDied, members[*local], phase, error.to_string())
                })?;
            }
            return Ok((board, Neighbourhood { bells, watched }));
        }
        let leader = members[0];
        let phase = "joining the node's shared memory";
        self.says(phase, leader);
        let blame = |error: io::Error| {
            let kind = match error.kind() {
                io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => CauseKind::TimedOut,
                _ => CauseKind::PeerDied,
            };
            self.blame(kind, leader, phase, error.to_string())
        };
        let stream =
            self.join_leader(&infos[leader as usize], group, bell, deadline).map_err(blame)?;
        let fds = shm::receive_descriptors(&stream, &mut [0; 5], deadline).map_err(blame)?;
        let mut fds = fds.into_iter();
        let segment = fds.next().ok_or_else(foreign)?;
        let segment = Segment::open(segment, shape.bytes()).map_err(blame)?;
        let board = Board::open(segment, shape).ok_or_else(foreign)?;
        let bells: Vec<OwnedFd> = fds.collect();
        if bells.len() != members.len() {
            return Err(foreign());
        }
        let process = shm::peer_process(&stream);
        Ok((board, Neighbourhood { bells, watched: vec![(0, stream, process)] }))
    }

    /// As the first rank of the node: waits for all the others.
    fn gather_locals(
        &self,
        members: &[u32],
        group: u64,
        deadline: Deadline,
    ) -> Result<HashMap<u32, (UnixStream, OwnedFd)>, CollectiveError> {
        let mut arrived = HashMap::new();
        let Some(listener) = &self.doors.local else { return Ok(arrived) };
        while arrived.len() + 1 < members.len() {
            let missing = members[1..].iter().find(|rank| !arrived.contains_key(*rank)).copied();
            let phase = "waiting for the ranks of this node";
            self.says(phase, missing.unwrap_or(self.options.rank));
            let stream = shm::accept(listener, deadline).map_err(|error| {
                let kind = match error.kind() {
                    io::ErrorKind::TimedOut => CauseKind::TimedOut,
                    _ => CauseKind::Io,
                };
                self.blame(kind, missing.unwrap_or(self.options.rank), phase, error.to_string())
            })?;
            // Whoever is not one of us is closed; it costs us at most its handshake's time.
            match self.admit_local(&stream, group, deadline.within(HANDSHAKE_TIMEOUT)) {
                Ok((rank, bell)) if members[1..].contains(&rank) => {
                    arrived.insert(rank, (stream, bell));
                }
                Ok((rank, _)) => tracing::warn!(rank, "a rank of another node came to our socket"),
                Err(error) => tracing::warn!(%error, "a local connection was refused"),
            }
        }
        Ok(arrived)
    }

    fn admit_local(
        &self,
        stream: &UnixStream,
        group: u64,
        deadline: Deadline,
    ) -> io::Result<(u32, OwnedFd)> {
        bound(stream, deadline)?;
        let mut hello = [0; HELLO_BYTES];
        (&*stream).read_exact(&mut hello)?;
        let (acceptor, challenge) =
            Acceptor::new(&self.home.key, &context(self.info.id), &hello, nonce()?)
                .map_err(io::Error::other)?;
        (&*stream).write_all(&challenge)?;
        let mut proof = [0; PROOF_BYTES];
        (&*stream).read_exact(&mut proof)?;
        acceptor.check(&proof).map_err(io::Error::other)?;
        (&*stream).write_all(&[fabric::auth::WELCOME])?;
        let mut message = [0; 12];
        let fds = shm::receive_descriptors(stream, &mut message, deadline)?;
        let (group_bytes, rank) = message.split_at(8);
        if group_bytes != group.to_le_bytes() {
            return Err(io::Error::other("it belongs to another group"));
        }
        let mut word = [0; 4];
        word.copy_from_slice(rank);
        let bell = fds.into_iter().next().ok_or(io::ErrorKind::InvalidData)?;
        Ok((u32::from_le_bytes(word), bell))
    }

    fn join_leader(
        &self,
        leader: &Info,
        group: u64,
        bell: &OwnedFd,
        deadline: Deadline,
    ) -> io::Result<UnixStream> {
        if leader.host != self.info.host {
            return Err(io::Error::other(format!(
                "it is placed on our node but runs on another machine ({} and {}): give different \
                 machines different node names",
                leader.host, self.info.host
            )));
        }
        let stream = shm::dial(&leader.local_socket, deadline)?;
        bound(&stream, deadline)?;
        let (dialer, hello) = Dialer::new(&self.home.key, &context(leader.id), nonce()?);
        (&stream).write_all(&hello)?;
        let mut challenge = [0; CHALLENGE_BYTES];
        (&stream).read_exact(&mut challenge)?;
        (&stream).write_all(&dialer.answer(&challenge).map_err(io::Error::other)?)?;
        (&stream).read_exact(&mut [0])?;
        let mut message = [0; 12];
        message[..8].copy_from_slice(&group.to_le_bytes());
        message[8..].copy_from_slice(&self.options.rank.to_le_bytes());
        shm::send_descriptors(&stream, &message, &[bell.as_fd()], deadline)?;
        Ok(stream)
    }
}

fn bound(stream: &UnixStream, deadline: Deadline) -> io::Result<()> {
    let left = deadline.remaining().ok_or(io::ErrorKind::TimedOut)?;
    stream.set_read_timeout(Some(left))?;
    stream.set_write_timeout(Some(left))
}
