//! Peer memory: tree neighbors on one machine map each other's segments, so that a chunk is copied
//! once, from the sender's segment to its destination, instead of twice through a socket.
//!
//! ```text
//! owner                                     peer
//! descriptor and token, by UNIX socket  ──▶ queued at its socket
//! MappingOffer(token), by the tree link ──▶ takes the descriptor with that token, maps it to read
//!                                       ◀── MappingReady
//! Data(offset)                          ──▶ copies
//!                                       ◀── acked: the number of copies; the slots may be reused
//! ```
//! A partial sum of an allreduce on its way up is not even copied: the parent reads it in place.
//! Its slot is not written again before the result arrives from that parent, which is after the
//! parent has read it.
//!
//! No rank waits for a mapping: until `MappingReady` arrives, if ever, payloads are sent through
//! the socket. The token, which is sent over the authenticated connection only, proves whose
//! segment a descriptor belongs to.

use std::collections::VecDeque;
use std::io;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use fabric::auth::nonce;
use fabric::deadline::Deadline;
use fabric::shm::{self, View};
use rustix::fd::{AsFd, OwnedFd};

use crate::segment::ShmSegment;
use hfreduce_core::credit::CLASSES;
use hfreduce_core::tree::Partial;

/// Below this size, a copy through the socket is cheaper than the acknowledgment of a mapped
/// payload.
const MAPPED_FROM_BYTES: usize = 32 << 10;
const TOKEN_BYTES: usize = 8;
/// Maximum number of descriptors that wait for their token.
const WAITING_MAX: usize = 64;
/// Maximum number of connections accepted while looking for one token, so that a process that keeps
/// connecting cannot block the rank. A segment that is not found is not used; its data is sent over
/// TCP.
const ACCEPTS_MAX: usize = 256;

/// Mappings of the two ends of a tree link.
#[derive(Debug)]
pub struct PeerMemory {
    /// Token under which this rank's segment was sent to the peer.
    pub offered: Option<u64>,
    /// Size of the peer's segment.
    pub peer_segment_bytes: usize,
    /// The peer has mapped this rank's segment.
    peer_has_mapped: bool,
    /// The peer's segment, once mapped.
    pub view: Option<View>,
    /// By class and slot: offset of a partial sum in the peer's segment. See
    /// [`PeerMemory::mapped_partial`].
    pub mapped_partials: [Vec<Option<u64>>; CLASSES],
    /// Bytes of one slot of the peer.
    pub slot_bytes: usize,
}

impl PeerMemory {
    /// For a peer with a segment of this size; `offered` is the token under which this rank's
    /// segment was sent.
    pub fn new(peer_segment_bytes: usize, offered: Option<u64>, slot_bytes: usize) -> Self {
        let mapped_partials = std::array::from_fn(|_| Vec::new());
        Self {
            offered,
            peer_segment_bytes,
            peer_has_mapped: false,
            view: None,
            mapped_partials,
            slot_bytes,
        }
    }

    /// Records that the peer has mapped this rank's segment.
    #[inline]
    pub fn mapped(&mut self) {
        self.peer_has_mapped = self.offered.is_some();
    }

    /// Offset of these bytes in this rank's segment, if the peer can copy them and that is cheaper.
    #[inline]
    pub fn offset(&self, shm: &ShmSegment, place: *const u8, bytes: usize) -> Option<u64> {
        if !self.peer_has_mapped || bytes < MAPPED_FROM_BYTES {
            return None;
        }
        let segment = shm.segment();
        let offset = place.addr().checked_sub(segment.base().addr())?;
        (offset + bytes <= segment.bytes()).then_some(offset as u64)
    }

    /// Address of a partial sum in the peer's segment, if it is mapped.
    #[inline]
    pub fn mapped_partial(&self, partial: &Partial) -> Option<*const u8> {
        let offset = (*self.mapped_partials[partial.class].get(partial.slot as usize)?)?;
        self.view.as_ref()?.at(offset, self.slot_bytes)
    }

    /// Forgets a mapped partial sum: its slot is reused.
    #[inline]
    pub fn forget_partial(&mut self, partial: &Partial) {
        if let Some(mapped_partials) =
            self.mapped_partials[partial.class].get_mut(partial.slot as usize)
        {
            *mapped_partials = None;
        }
    }
}

/// Socket at which neighbors deliver the descriptors of their segments.
#[derive(Debug)]
pub struct MappingListener {
    listener: Option<UnixListener>,
    waiting: VecDeque<(u64, OwnedFd)>,
}

impl MappingListener {
    /// Without a socket no descriptor arrives.
    pub fn new(listener: Option<UnixListener>) -> Self {
        Self { listener, waiting: VecDeque::new() }
    }

    /// Returns the descriptor that was sent with this token; others are kept for their links.
    ///
    /// # Errors
    /// No such descriptor has arrived.
    pub fn take(&mut self, token: u64) -> io::Result<OwnedFd> {
        if let Some(listener) = &self.listener {
            for _ in 0..ACCEPTS_MAX {
                let Ok(stream) = shm::accept(listener, Deadline::after(Duration::ZERO)) else {
                    break;
                };
                stream.set_nonblocking(true)?;
                let mut bytes = [0; TOKEN_BYTES];
                // It was sent before the token, so it is here: no waiting for unauthenticated
                // peers.
                let soon = Deadline::after(Duration::from_millis(1));
                match shm::receive_descriptors(&stream, &mut bytes, soon) {
                    Ok(fds) => {
                        let token_received = u64::from_le_bytes(bytes);
                        self.waiting.extend(fds.into_iter().take(1).map(|fd| (token_received, fd)));
                    }
                    Err(error) => {
                        tracing::debug!(%error, "an accepted connection sent no descriptor")
                    }
                }
                let too_many = self.waiting.len().saturating_sub(WAITING_MAX);
                self.waiting.drain(..too_many);
            }
        }
        let at = self.waiting.iter().position(|(pending_token, _)| *pending_token == token);
        let connection = at.and_then(|at| self.waiting.remove(at));
        connection.map(|(_, fd)| fd).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

/// Sends this rank's segment to a neighbor; returns the token that identifies it.
///
/// # Errors
/// The neighbor is not reachable (another user, another network namespace), or a system call
/// failed.
#[inline]
pub fn offer(shm: &ShmSegment, mapping_listener: &str, deadline: Deadline) -> io::Result<u64> {
    let mut token = [0; TOKEN_BYTES];
    token.copy_from_slice(&nonce()?[..TOKEN_BYTES]);
    let fd = shm.segment().read_only_fd()?;
    let stream = shm::dial(mapping_listener, deadline)?;
    shm::send_descriptors(&stream, &token, &[fd.as_fd()], deadline)?;
    Ok(u64::from_le_bytes(token))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::Shape;
    use fabric::shm::Segment;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_segment_is_identified_by_its_token_among_other_connections() {
        let name = format!("hfreduce-lending-test-{}", std::process::id());
        let mut mapping_listener = MappingListener::new(Some(shm::listen(&name).unwrap()));
        let soon = Deadline::after(Duration::from_secs(60));
        let shape = Shape { locals: 2, slots: 2, ring_slots: 0, slot_bytes: 4096 };
        let shm =
            ShmSegment::create(Segment::create("lent", shape.bytes()).unwrap(), shape).unwrap();
        let silent: Vec<UnixStream> = (0..3).map(|_| shm::dial(&name, soon).unwrap()).collect();
        let other = shm::dial(&name, soon).unwrap();
        shm::send_descriptors(&other, &[7; TOKEN_BYTES], &[], soon).unwrap();
        let token = offer(&shm, &name, soon).unwrap();
        let fd = mapping_listener.take(token).unwrap();
        assert!(View::open(&fd, shape.bytes()).is_ok() && View::open(&fd, 4096).is_err());
        assert_eq!(mapping_listener.take(token).unwrap_err().kind(), io::ErrorKind::NotFound);
        for _ in 0..WAITING_MAX + 5 {
            offer(&shm, &name, soon).unwrap();
            let _ = mapping_listener.take(token);
        }
        assert_eq!(mapping_listener.waiting.len(), WAITING_MAX);
        drop((silent, other));
    }
}
