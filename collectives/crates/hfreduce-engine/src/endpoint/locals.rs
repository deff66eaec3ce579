//! Connections between the ranks of one node: segment, doorbells, and sockets that detect the end
//! of a process.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use fabric::arena::Arena;
use fabric::auth::{Acceptor, CHALLENGE_BYTES, Dialer, HELLO_BYTES, Key, PROOF_BYTES, nonce};
use fabric::deadline::Deadline;
use fabric::shm::{self, Segment};
use rustix::fd::{AsFd, OwnedFd};

use super::info::{Info, context};
use super::{Endpoint, HANDSHAKE_TIMEOUT};
use crate::driver::NodePeers;
use hfreduce_core::error::{CollectiveError, ErrorKind};
use hfreduce_shm::arenas::{Arenas, PeerArena};
use hfreduce_shm::segment::{Shape, ShmSegment};

/// Maximum number of concurrent handshakes at the node's socket, one thread each, so that a silent
/// peer delays no other.
const HANDSHAKES_MAX: usize = 64;
/// Interval at which their results are checked.
const LOOK_EVERY: Duration = Duration::from_millis(5);

impl Endpoint {
    pub(super) fn meet_locals(
        &self,
        infos: &[Info],
        group: u64,
        doorbell: &OwnedFd,
        (slots, ring_slots, channels): (usize, usize, usize),
        deadline: Deadline,
    ) -> Result<(ShmSegment, NodePeers, Arenas), CollectiveError> {
        let node = self.placement.node_of(self.options.rank);
        let members = self.placement.members(node);
        let slot_bytes = self.options.slot_bytes;
        let shape = Shape { locals: members.len(), slots, ring_slots, slot_bytes };
        let own = || doorbell.try_clone();
        let io =
            |error: io::Error| self.io_error("sharing memory inside the node", error.to_string());
        let foreign = || {
            let detail = "the node's shared memory is invalid".to_owned();
            self.peer_error(
                ErrorKind::Protocol,
                members[0],
                "sharing memory inside the node",
                detail,
            )
        };
        let arena = self.own_arena(members).map_err(io)?;
        if members[0] == self.options.rank {
            let segment = Segment::create("hfreduce", shape.bytes()).map_err(io)?;
            let shm = ShmSegment::create(segment, shape).ok_or_else(foreign)?;
            let mut arrived = self.gather_locals(members, group, deadline)?;
            let mut doorbells = vec![own().map_err(io)?];
            let mut arenas = Vec::new();
            if let Some(arena) = &arena {
                arenas.push(arena.segment().fd().try_clone_to_owned().map_err(io)?);
            }
            let mut watched = Vec::new();
            for (local, rank) in members.iter().enumerate().skip(1) {
                if let Some((stream, Card { doorbell, arena })) = arrived.remove(rank) {
                    doorbells.push(doorbell);
                    arenas.extend(arena);
                    let process = shm::peer_process(&stream);
                    watched.push((local, stream, process));
                }
            }
            for (local, stream, _) in &watched {
                let mut fds = vec![shm.segment().fd()];
                fds.extend(doorbells.iter().chain(&arenas).map(|fd| fd.as_fd()));
                shm::send_descriptors(stream, b"board", &fds, deadline).map_err(|error| {
                    let phase = "sharing memory inside the node";
                    self.peer_error(ErrorKind::PeerDied, members[*local], phase, error.to_string())
                })?;
            }
            let arenas = self.arenas(arena, infos, channels, arenas)?;
            return Ok((shm, NodePeers { doorbells, watched }, arenas));
        }
        let leader = members[0];
        let phase = "joining the node's shared memory";
        self.record_phase(phase, leader);
        let peer_error = |error: io::Error| {
            let kind = match error.kind() {
                io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => ErrorKind::TimedOut,
                _ => ErrorKind::PeerDied,
            };
            self.peer_error(kind, leader, phase, error.to_string())
        };
        let stream = self.join_leader(&infos[leader as usize], group, (doorbell, &arena), deadline);
        let stream = stream.map_err(peer_error)?;
        let fds = shm::receive_descriptors(&stream, &mut [0; 5], deadline).map_err(peer_error)?;
        let mut fds = fds.into_iter();
        let segment = fds.next().ok_or_else(foreign)?;
        let segment = Segment::open(segment, shape.bytes()).map_err(peer_error)?;
        let shm = ShmSegment::open(segment, shape).ok_or_else(foreign)?;
        let doorbells: Vec<OwnedFd> = fds.by_ref().take(members.len()).collect();
        if doorbells.len() != members.len() {
            return Err(foreign());
        }
        let arenas = self.arenas(arena, infos, channels, fds.collect())?;
        let process = shm::peer_process(&stream);
        Ok((shm, NodePeers { doorbells, watched: vec![(0, stream, process)] }, arenas))
    }

    /// This rank's arena, if another rank may map it.
    fn own_arena(&self, members: &[u32]) -> io::Result<Option<Arc<Arena>>> {
        if members.len() == 1 || self.info.registered_bytes == 0 {
            return Ok(None);
        }
        self.identity.arena(&self.options).map(Some)
    }

    /// The arenas of the node's ranks, if this rank owns chunks: one descriptor for each that has
    /// one.
    fn arenas(
        &self,
        own: Option<Arc<Arena>>,
        infos: &[Info],
        channels: usize,
        fds: Vec<OwnedFd>,
    ) -> Result<Arenas, CollectiveError> {
        let members = self.placement.members(self.placement.node_of(self.options.rank));
        if members.len() == 1 {
            return Ok(Arenas::default());
        }
        let bytes = |rank: u32| infos[rank as usize].registered_bytes;
        let phase = "mapping the registered memory of this node";
        let with = members.iter().filter(|rank| bytes(**rank) > 0).count();
        if fds.len() != with {
            let detail = format!("received {} arenas for {with} ranks", fds.len());
            return Err(self.peer_error(ErrorKind::Protocol, members[0], phase, detail));
        }
        let owner = members.iter().position(|rank| *rank == self.options.rank) < Some(channels);
        let mut fds = fds.into_iter();
        let mut others = Vec::new();
        for rank in members {
            let fd = if bytes(*rank) > 0 { fds.next() } else { None };
            let size = usize::try_from(bytes(*rank)).unwrap_or(usize::MAX);
            let peer = fd.filter(|_| owner && *rank != self.options.rank);
            let peer = peer
                .map(|fd| PeerArena::new(fd, size, self.options.share.address_account().clone()))
                .transpose();
            others
                .push(peer.map_err(|detail| self.peer_error(ErrorKind::Io, *rank, phase, detail))?);
        }
        Ok(Arenas { own, others })
    }

    /// First rank of the node: waits for all others.
    fn gather_locals(
        &self,
        members: &[u32],
        group: u64,
        deadline: Deadline,
    ) -> Result<HashMap<u32, (UnixStream, Card)>, CollectiveError> {
        let mut arrived = HashMap::new();
        let Some(listener) = &self.local_sockets.local else { return Ok(arrived) };
        let (admissions_tx, admissions_rx) = mpsc::channel();
        let mut under_way = 0;
        while arrived.len() + 1 < members.len() {
            let missing = members[1..].iter().find(|rank| !arrived.contains_key(*rank)).copied();
            let phase = "waiting for the ranks of this node";
            self.record_phase(phase, missing.unwrap_or(self.options.rank));
            while let Ok((stream, admitted)) = admissions_rx.try_recv() {
                under_way -= 1;
                // Connections of other processes are closed.
                match admitted {
                    Ok((rank, card)) if members[1..].contains(&rank) => {
                        arrived.insert(rank, (stream, card));
                    }
                    Ok((rank, _)) => {
                        tracing::warn!(
                            rank,
                            "a rank of another node connected to the local socket"
                        );
                    }
                    Err(error) => tracing::warn!(%error, "a local connection was refused"),
                }
            }
            let failed = |error: io::Error| {
                let kind = match error.kind() {
                    io::ErrorKind::TimedOut => ErrorKind::TimedOut,
                    _ => ErrorKind::Io,
                };
                self.peer_error(
                    kind,
                    missing.unwrap_or(self.options.rank),
                    phase,
                    error.to_string(),
                )
            };
            if deadline.passed() {
                return Err(failed(io::ErrorKind::TimedOut.into()));
            }
            if under_way >= HANDSHAKES_MAX {
                std::thread::sleep(LOOK_EVERY);
                continue;
            }
            let stream = match shm::accept(listener, deadline.within(LOOK_EVERY)) {
                Ok(stream) => stream,
                Err(error) if error.kind() == io::ErrorKind::TimedOut => continue,
                Err(error) => return Err(failed(error)),
            };
            let (key, context) = (self.identity.key.clone(), context(self.info.id));
            let (admissions_tx, soon) = (admissions_tx.clone(), deadline.within(HANDSHAKE_TIMEOUT));
            let admit = move || {
                let admitted = admit_local(&stream, (&key, &context), group, soon);
                let _ = admissions_tx.send((stream, admitted));
            };
            let thread = std::thread::Builder::new().name("hfreduce-local".into());
            thread.spawn(admit).map_err(failed)?;
            under_way += 1;
        }
        Ok(arrived)
    }

    fn join_leader(
        &self,
        leader: &Info,
        group: u64,
        (doorbell, arena): (&OwnedFd, &Option<Arc<Arena>>),
        deadline: Deadline,
    ) -> io::Result<UnixStream> {
        if leader.host != self.info.host {
            return Err(io::Error::other(format!(
                "it is placed on the same node but runs on another machine ({} and {}): give different \
                 machines different node names",
                leader.host, self.info.host
            )));
        }
        let stream = shm::dial(&leader.local_socket, deadline)?;
        bound(&stream, deadline)?;
        let (dialer, hello) = Dialer::new(&self.identity.key, &context(leader.id), nonce()?);
        (&stream).write_all(&hello)?;
        let mut challenge = [0; CHALLENGE_BYTES];
        (&stream).read_exact(&mut challenge)?;
        (&stream).write_all(&dialer.answer(&challenge).map_err(io::Error::other)?)?;
        (&stream).read_exact(&mut [0])?;
        let mut message = [0; 12];
        message[..8].copy_from_slice(&group.to_le_bytes());
        message[8..].copy_from_slice(&self.options.rank.to_le_bytes());
        let mut fds = vec![doorbell.as_fd()];
        fds.extend(arena.iter().map(|arena| arena.segment().fd()));
        shm::send_descriptors(&stream, &message, &fds, deadline)?;
        Ok(stream)
    }
}

/// Authenticates a rank of this node; returns the rank and its descriptors.
fn admit_local(
    mut stream: &UnixStream,
    (key, context): (&Key, &str),
    group: u64,
    deadline: Deadline,
) -> io::Result<(u32, Card)> {
    let mut hello = [0; HELLO_BYTES];
    read_by(stream, &mut hello, deadline)?;
    let (acceptor, challenge) =
        Acceptor::new(key, context, &hello, nonce()?).map_err(io::Error::other)?;
    stream.write_all(&challenge)?;
    let mut proof = [0; PROOF_BYTES];
    read_by(stream, &mut proof, deadline)?;
    acceptor.check(&proof).map_err(io::Error::other)?;
    stream.write_all(&[fabric::auth::WELCOME])?;
    let mut message = [0; 12];
    let fds = shm::receive_descriptors(stream, &mut message, deadline)?;
    let (group_bytes, rank) = message.split_at(8);
    if group_bytes != group.to_le_bytes() {
        return Err(io::Error::other("it belongs to another group"));
    }
    let mut word = [0; 4];
    word.copy_from_slice(rank);
    let mut fds = fds.into_iter();
    let doorbell = fds.next().ok_or(io::ErrorKind::InvalidData)?;
    Ok((u32::from_le_bytes(word), Card { doorbell, arena: fds.next() }))
}

/// Reads all bytes within one deadline, however slowly they arrive.
fn read_by(mut stream: &UnixStream, bytes: &mut [u8], deadline: Deadline) -> io::Result<()> {
    let mut have = 0;
    while have < bytes.len() {
        bound(stream, deadline)?;
        match stream.read(&mut bytes[have..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(more) => have += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Descriptors that a rank sends to the first rank of its node.
struct Card {
    doorbell: OwnedFd,
    arena: Option<OwnedFd>,
}

fn bound(stream: &UnixStream, deadline: Deadline) -> io::Result<()> {
    let remaining = deadline.remaining().ok_or(io::ErrorKind::TimedOut)?;
    stream.set_read_timeout(Some(remaining))?;
    stream.set_write_timeout(Some(remaining))
}
