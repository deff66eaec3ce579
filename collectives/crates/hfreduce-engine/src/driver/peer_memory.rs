//! Neighbours on one machine lend each other their segments: a chunk is copied once, from the
//! sender's segment to where the receiver wants it, instead of twice through a socket.
//!
//! ```text
//! lender                                   borrower
//! descriptor and token, by UNIX socket ──▶ waits at the counter
//! Lend(token), by the tree connection  ──▶ takes the descriptor with that token, maps it to read
//!                                      ◀── Mapped
//! Data(… lies at offset …)             ──▶ copies
//!                                      ◀── returned: so many; the slot may be used again
//! ```
//! A partial sum of an allreduce on its way up is not even copied: the parent reads it where it
//! lies (it is *shown*). Its slot is not written again before the result comes down from that
//! parent, and that comes after the parent has read it.
//!
//! Nobody waits for anybody: until `Mapped` comes, and for ever if it never does, payloads go
//! through the socket. The token, which only the authenticated connection tells, proves whose
//! segment a descriptor is.

use std::collections::VecDeque;
use std::io;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use fabric::auth::nonce;
use fabric::deadline::Deadline;
use fabric::shm::{self, View};
use hfreduce_kernels::Store;
use rustix::fd::{AsFd, OwnedFd};

use super::Driver;
use super::transport::Payload;
use super::wire::{Frame, Head};
use crate::core::credit::CLASSES;
use crate::core::tree::{Partial, Violation};
use crate::core::{DataHead, Kind, Stage};
use crate::shm::ShmSegment;

/// Below this a copy through the socket costs less than saying later that it was made.
const MAPPED_FROM_BYTES: usize = 32 << 10;
const TOKEN_BYTES: usize = 8;
/// Descriptors that wait for their token to be told.
const WAITING_MAX: usize = 64;
/// Connections accepted while looking for one token: a process that keeps connecting must not keep the
/// loop going. A segment that is not found is not used, and its data goes over TCP.
const ACCEPTS_MAX: usize = 256;

/// What the two ends of a tree connection lend each other.
#[derive(Debug)]
pub struct PeerMemory {
    /// Our segment lies at the peer's counter with this token.
    pub(super) offered: Option<u64>,
    peer_segment_bytes: usize,
    /// The peer has mapped our segment.
    supports_peer_memory: bool,
    view: Option<View>,
    /// By class and slot: where in the peer's segment its partial sum lies.
    mapped_partials: [Vec<Option<u64>>; CLASSES],
    slot_bytes: usize,
}

impl PeerMemory {
    /// Of a peer whose segment has this size; ours is at its counter with the token `offered`.
    pub fn new(peer_segment_bytes: usize, offered: Option<u64>, slot_bytes: usize) -> Self {
        let mapped_partials = std::array::from_fn(|_| Vec::new());
        Self {
            offered,
            peer_segment_bytes,
            supports_peer_memory: false,
            view: None,
            mapped_partials,
            slot_bytes,
        }
    }

    /// The peer has mapped our segment.
    pub(super) fn mapped(&mut self) {
        self.supports_peer_memory = self.offered.is_some();
    }

    /// Where in our segment these bytes lie, if the peer can copy them there and it is worth it.
    pub(super) fn offset(&self, shm: &ShmSegment, place: *const u8, bytes: usize) -> Option<u64> {
        if !self.supports_peer_memory || bytes < MAPPED_FROM_BYTES {
            return None;
        }
        let segment = shm.segment();
        let offset = place.addr().checked_sub(segment.base().addr())?;
        (offset + bytes <= segment.bytes()).then_some(offset as u64)
    }

    /// Where a partial sum lies, if it is shown.
    pub(super) fn mapped_partials(&self, partial: &Partial) -> Option<*const u8> {
        let offset = (*self.mapped_partials[partial.class].get(partial.slot as usize)?)?;
        self.view.as_ref()?.at(offset, self.slot_bytes)
    }

    /// The slot is used again.
    pub(super) fn forget_partial(&mut self, partial: &Partial) {
        if let Some(mapped_partials) =
            self.mapped_partials[partial.class].get_mut(partial.slot as usize)
        {
            *mapped_partials = None;
        }
    }
}

/// True for a frame whose lent payload is read where it lies. Both ends decide alike.
pub(super) fn is_read_in_place(data: &DataHead) -> bool {
    data.stage == Stage::Up && data.fingerprint.kind == Kind::Allreduce
}

/// Where neighbours leave their segments for us.
#[derive(Debug)]
pub struct MappingListener {
    listener: Option<UnixListener>,
    waiting: VecDeque<(u64, OwnedFd)>,
}

impl MappingListener {
    /// One that nobody comes to if there is no socket.
    pub fn new(listener: Option<UnixListener>) -> Self {
        Self { listener, waiting: VecDeque::new() }
    }

    /// The descriptor that came with this token; whoever else came waits for his own.
    fn take(&mut self, token: u64) -> io::Result<OwnedFd> {
        if let Some(listener) = &self.listener {
            for _ in 0..ACCEPTS_MAX {
                let Ok(stream) = shm::accept(listener, Deadline::after(Duration::ZERO)) else {
                    break;
                };
                stream.set_nonblocking(true)?;
                let mut bytes = [0; TOKEN_BYTES];
                // It was sent before the token was told, so it is here: no waiting for strangers.
                let soon = Deadline::after(Duration::from_millis(1));
                match shm::receive_descriptors(&stream, &mut bytes, soon) {
                    Ok(fds) => {
                        let came = u64::from_le_bytes(bytes);
                        self.waiting.extend(fds.into_iter().take(1).map(|fd| (came, fd)));
                    }
                    Err(error) => tracing::debug!(%error, "nothing came with a knock"),
                }
                let too_many = self.waiting.len().saturating_sub(WAITING_MAX);
                self.waiting.drain(..too_many);
            }
        }
        let at = self.waiting.iter().position(|(came, _)| *came == token);
        let found = at.and_then(|at| self.waiting.remove(at));
        found.map(|(_, fd)| fd).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

/// Leaves our segment at a neighbour's counter; the token that it goes by.
///
/// # Errors
/// It cannot be reached so (another user, another network namespace), or what the kernel says.
pub fn offer(shm: &ShmSegment, mapping_listener: &str, deadline: Deadline) -> io::Result<u64> {
    let mut token = [0; TOKEN_BYTES];
    token.copy_from_slice(&nonce()?[..TOKEN_BYTES]);
    let fd = shm.segment().read_only_fd()?;
    let stream = shm::dial(mapping_listener, deadline)?;
    shm::send_descriptors(&stream, &token, &[fd.as_fd()], deadline)?;
    Ok(u64::from_le_bytes(token))
}

impl Driver {
    /// A neighbour says that its segment lies at our counter.
    pub(super) fn map_peer_segment(&mut self, at: usize, token: u64) {
        let Some(tree_links) = &mut self.tree_links else { return };
        let bytes = tree_links.links[at].peer_memory.peer_segment_bytes;
        let view = tree_links.mapping_listener.take(token).and_then(|fd| View::open(&fd, bytes));
        match view {
            Ok(view) => {
                let link = &mut tree_links.links[at];
                link.peer_memory.view = Some(view);
                let mapped = Head::bare(Frame::MappingReady);
                link.transport.push(&mapped, Payload::Owned(vec![]), None);
                self.flush_link(at);
            }
            Err(error) => {
                let rank = tree_links.links[at].peer_rank;
                tracing::info!(%error, rank, "its segment cannot be mapped: payloads come by TCP");
            }
        }
    }

    /// Notes where a partial sum lies in a neighbour's segment; false if we cannot see it, and
    /// everything ends.
    pub(super) fn record_mapped_partial(
        &mut self,
        partial: &Partial,
        offset: u64,
        bytes: usize,
    ) -> bool {
        let Some(tree_links) = &mut self.tree_links else { return false };
        let link = &mut tree_links.links[partial.link];
        let peer_memory = &mut link.peer_memory;
        let slot_bytes = peer_memory.slot_bytes;
        if peer_memory.view.as_ref().and_then(|view| view.at(offset, slot_bytes)).is_none() {
            self.fail_invalid_mapping(partial.link, offset, bytes);
            return false;
        }
        let mapped_partials = &mut peer_memory.mapped_partials[partial.class];
        let slot = partial.slot as usize;
        mapped_partials.resize(mapped_partials.len().max(slot + 1), None);
        mapped_partials[slot] = Some(offset);
        link.transport.read_in_place(bytes);
        true
    }

    fn fail_invalid_mapping(&mut self, at: usize, offset: u64, bytes: usize) {
        let why = format!("it lends {bytes} bytes at {offset}, which we cannot see");
        self.violated_on(at, Violation::Protocol(why));
    }

    /// Copies what a neighbour lends; false if it lends what we cannot see, and everything ends.
    ///
    /// # Safety
    /// `place` must be writable for `bytes` and nobody else's.
    pub(super) unsafe fn copy_from_peer(
        &mut self,
        at: usize,
        offset: u64,
        place: *mut u8,
        bytes: usize,
    ) -> bool {
        let Some(tree_links) = &mut self.tree_links else { return false };
        let link = &mut tree_links.links[at];
        let Some(source) = link.peer_memory.view.as_ref().and_then(|view| view.at(offset, bytes))
        else {
            self.fail_invalid_mapping(at, offset, bytes);
            return false;
        };
        // SAFETY: the view holds them and the lender leaves them alone until we say that they are
        // copied; a lender that does not keeps us from nothing but the right bytes. The place is
        // apart from it: our segment or a pool of ours.
        unsafe { hfreduce_kernels::copy_raw(Store::Cached, source, place, bytes) };
        link.transport.copied(bytes);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::Shape;
    use fabric::shm::Segment;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_board_is_taken_by_its_token_whoever_else_knocks() {
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
