//! Neighbours on one machine lend each other their boards: a chunk is copied once, from the
//! sender's board to where the receiver wants it, instead of twice through a socket.
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
//! board a descriptor is.

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
use crate::board::Board;
use crate::core::credit::CLASSES;
use crate::core::tree::{Partial, Violation};
use crate::core::{DataHead, Kind, Stage};

/// Below this a copy through the socket costs less than saying later that it was made.
const LENT_FROM_BYTES: usize = 32 << 10;
const TOKEN_BYTES: usize = 8;
/// Descriptors that wait for their token to be told.
const WAITING_MAX: usize = 64;
/// Connections accepted while looking for one token: a process that keeps connecting must not keep the
/// loop going. A segment that is not found is not used, and its data goes over TCP.
const KNOCKS_MAX: usize = 256;

/// What the two ends of a tree connection lend each other.
#[derive(Debug)]
pub struct Loan {
    /// Our board lies at the peer's counter with this token.
    pub(super) offered: Option<u64>,
    peer_board_bytes: usize,
    /// The peer has mapped our board.
    lends: bool,
    view: Option<View>,
    /// By class and slot: where in the peer's board its partial sum lies.
    shown: [Vec<Option<u64>>; CLASSES],
    slot_bytes: usize,
}

impl Loan {
    /// Of a peer whose board has this size; ours is at its counter with the token `offered`.
    pub fn new(peer_board_bytes: usize, offered: Option<u64>, slot_bytes: usize) -> Self {
        let shown = std::array::from_fn(|_| Vec::new());
        Self { offered, peer_board_bytes, lends: false, view: None, shown, slot_bytes }
    }

    /// The peer has mapped our board.
    pub(super) fn mapped(&mut self) {
        self.lends = self.offered.is_some();
    }

    /// Where in our board these bytes lie, if the peer can copy them there and it is worth it.
    pub(super) fn offset(&self, board: &Board, place: *const u8, bytes: usize) -> Option<u64> {
        if !self.lends || bytes < LENT_FROM_BYTES {
            return None;
        }
        let segment = board.segment();
        let offset = place.addr().checked_sub(segment.base().addr())?;
        (offset + bytes <= segment.bytes()).then_some(offset as u64)
    }

    /// Where a partial sum lies, if it is shown.
    pub(super) fn shown(&self, partial: &Partial) -> Option<*const u8> {
        let offset = (*self.shown[partial.class].get(partial.slot as usize)?)?;
        self.view.as_ref()?.at(offset, self.slot_bytes)
    }

    /// The slot is used again.
    pub(super) fn hide(&mut self, partial: &Partial) {
        if let Some(shown) = self.shown[partial.class].get_mut(partial.slot as usize) {
            *shown = None;
        }
    }
}

/// True for a frame whose lent payload is read where it lies. Both ends decide alike.
pub(super) fn is_shown(data: &DataHead) -> bool {
    data.stage == Stage::Up && data.print.kind == Kind::Allreduce
}

/// Where neighbours leave their boards for us.
#[derive(Debug)]
pub struct Counter {
    listener: Option<UnixListener>,
    waiting: VecDeque<(u64, OwnedFd)>,
}

impl Counter {
    /// One that nobody comes to if there is no socket.
    pub fn new(listener: Option<UnixListener>) -> Self {
        Self { listener, waiting: VecDeque::new() }
    }

    /// The descriptor that came with this token; whoever else came waits for his own.
    fn take(&mut self, token: u64) -> io::Result<OwnedFd> {
        if let Some(listener) = &self.listener {
            for _ in 0..KNOCKS_MAX {
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

/// Leaves our board at a neighbour's counter; the token that it goes by.
///
/// # Errors
/// It cannot be reached so (another user, another network namespace), or what the kernel says.
pub fn offer(board: &Board, counter: &str, deadline: Deadline) -> io::Result<u64> {
    let mut token = [0; TOKEN_BYTES];
    token.copy_from_slice(&nonce()?[..TOKEN_BYTES]);
    let fd = board.segment().read_only_fd()?;
    let stream = shm::dial(counter, deadline)?;
    shm::send_descriptors(&stream, &token, &[fd.as_fd()], deadline)?;
    Ok(u64::from_le_bytes(token))
}

impl Driver {
    /// A neighbour says that its board lies at our counter.
    pub(super) fn borrow_board(&mut self, at: usize, token: u64) {
        let Some(trunk) = &mut self.trunk else { return };
        let bytes = trunk.links[at].loan.peer_board_bytes;
        let view = trunk.counter.take(token).and_then(|fd| View::open(&fd, bytes));
        match view {
            Ok(view) => {
                let link = &mut trunk.links[at];
                link.loan.view = Some(view);
                let mapped = Head::bare(Frame::Mapped);
                link.transport.push(&mapped, Payload::Owned(vec![]), None);
                self.flush_link(at);
            }
            Err(error) => {
                let rank = trunk.links[at].peer_rank;
                tracing::info!(%error, rank, "its board cannot be mapped: payloads come by TCP");
            }
        }
    }

    /// Notes where a partial sum lies in a neighbour's board; false if we cannot see it, and
    /// everything ends.
    pub(super) fn look_at(&mut self, partial: &Partial, offset: u64, bytes: usize) -> bool {
        let Some(trunk) = &mut self.trunk else { return false };
        let link = &mut trunk.links[partial.link];
        let loan = &mut link.loan;
        let slot_bytes = loan.slot_bytes;
        if loan.view.as_ref().and_then(|view| view.at(offset, slot_bytes)).is_none() {
            self.cannot_see(partial.link, offset, bytes);
            return false;
        }
        let shown = &mut loan.shown[partial.class];
        let slot = partial.slot as usize;
        shown.resize(shown.len().max(slot + 1), None);
        shown[slot] = Some(offset);
        link.transport.looked_at(bytes);
        true
    }

    fn cannot_see(&mut self, at: usize, offset: u64, bytes: usize) {
        let why = format!("it lends {bytes} bytes at {offset}, which we cannot see");
        self.violated_on(at, Violation::Protocol(why));
    }

    /// Copies what a neighbour lends; false if it lends what we cannot see, and everything ends.
    ///
    /// # Safety
    /// `place` must be writable for `bytes` and nobody else's.
    pub(super) unsafe fn copy_lent(
        &mut self,
        at: usize,
        offset: u64,
        place: *mut u8,
        bytes: usize,
    ) -> bool {
        let Some(trunk) = &mut self.trunk else { return false };
        let link = &mut trunk.links[at];
        let Some(source) = link.loan.view.as_ref().and_then(|view| view.at(offset, bytes)) else {
            self.cannot_see(at, offset, bytes);
            return false;
        };
        // SAFETY: the view holds them and the lender leaves them alone until we say that they are
        // copied; a lender that does not keeps us from nothing but the right bytes. The place is
        // apart from it: our board or a pool of ours.
        unsafe { hfreduce_kernels::copy_raw(Store::Cached, source, place, bytes) };
        link.transport.copied(bytes);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::board::Shape;
    use fabric::shm::Segment;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_board_is_taken_by_its_token_whoever_else_knocks() {
        let name = format!("hfreduce-lending-test-{}", std::process::id());
        let mut counter = Counter::new(Some(shm::listen(&name).unwrap()));
        let soon = Deadline::after(Duration::from_secs(60));
        let shape = Shape { locals: 2, slots: 2, sums: 0, slot_bytes: 4096 };
        let board = Board::create(Segment::create("lent", shape.bytes()).unwrap(), shape).unwrap();
        let silent: Vec<UnixStream> = (0..3).map(|_| shm::dial(&name, soon).unwrap()).collect();
        let other = shm::dial(&name, soon).unwrap();
        shm::send_descriptors(&other, &[7; TOKEN_BYTES], &[], soon).unwrap();
        let token = offer(&board, &name, soon).unwrap();
        let fd = counter.take(token).unwrap();
        assert!(View::open(&fd, shape.bytes()).is_ok() && View::open(&fd, 4096).is_err());
        assert_eq!(counter.take(token).unwrap_err().kind(), io::ErrorKind::NotFound);
        for _ in 0..WAITING_MAX + 5 {
            offer(&board, &name, soon).unwrap();
            let _ = counter.take(token);
        }
        assert_eq!(counter.waiting.len(), WAITING_MAX);
        drop((silent, other));
    }
}
