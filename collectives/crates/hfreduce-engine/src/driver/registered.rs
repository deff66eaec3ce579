//! Memory that ranks of one node have registered: read and written where it is, by whoever owns the
//! chunk, without a copy on its way in or out.
//!
//! Says where this rank's memory lies, finds that of others, and sees to it that nobody touches any
//! of it after an operation has failed:
//!
//! ```text
//! owner of a chunk                      rank whose memory it is, when all ends
//! touching = 1, fence                   abort recorded, fence
//! aborted? then touching = 0, stop      touching = 0? it reads and writes nothing more
//! read, write                           its process has ended? neither (its leader says so)
//! touching = 0                          still 1 after a while: it stands still in the middle of it;
//!                                       revoke: our memory gets pages of its own
//! ```

use std::cell::OnceCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric::arena::Arena;
use fabric::shm::Segment;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;

use super::{Active, Driver};
use crate::core::{Fingerprint, Kind};
use crate::error::ErrorKind;
use crate::operation::{Buffer, Operation};
use crate::share::{Charge, Share};
use crate::shm::Registered;

/// How long somebody who runs may take to finish one chunk, on a machine that is busy.
const QUIET_WITHIN: Duration = Duration::from_millis(200);
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// The arenas of a node's ranks, as this rank sees them.
#[derive(Debug, Default)]
pub struct Arenas {
    /// Ours, where others of this node map it.
    pub own: Option<Arc<Arena>>,
    /// By local index: those of the others, if we own chunks and they have any.
    pub others: Vec<Option<PeerArena>>,
}

/// The arena of another rank of this node. It is as large as the machine's memory, and most groups
/// register nothing: it takes addresses once a rank has registered memory in this group.
#[derive(Debug)]
pub struct PeerArena {
    fd: OwnedFd,
    bytes: usize,
    share: Arc<Share>,
    mapped: OnceCell<Result<(Segment, Charge), String>>,
}

impl PeerArena {
    /// Of a descriptor that the peer has sent. It is mapped once, so that what is not what it should
    /// be is found before the group is connected.
    ///
    /// # Errors
    /// Why it cannot be mapped, with the remedy.
    pub fn new(fd: OwnedFd, bytes: usize, share: Arc<Share>) -> Result<Self, String> {
        let peer = Self { fd, bytes, share, mapped: OnceCell::new() };
        peer.map()?;
        Ok(peer)
    }

    fn map(&self) -> Result<(Segment, Charge), String> {
        let mut addresses = self.share.addresses();
        addresses.set_to(self.bytes).map_err(|error| error.to_string())?;
        let mapped = self.fd.try_clone().and_then(|fd| Segment::open(fd, self.bytes));
        mapped.map(|segment| (segment, addresses)).map_err(|error| {
            format!(
                "{} bytes: {error}; raise the limit of address space, or lower \
                 HFREDUCE_REGISTERED_BYTES",
                self.bytes
            )
        })
    }

    fn mapped(&self) -> Result<&Segment, &str> {
        let mapped = self.mapped.get_or_init(|| self.map()).as_ref();
        mapped.map(|(segment, _)| segment).map_err(String::as_str)
    }

    fn at(&self, offset: u64, bytes: usize) -> Option<*mut u8> {
        self.mapped().ok()?.at(offset, bytes)
    }
}

impl Arenas {
    /// Where `bytes` bytes lie in the arena of another rank; `None` if they are not all inside.
    pub(super) fn at(&self, local: usize, offset: u64, bytes: usize) -> Option<*mut u8> {
        self.others.get(local)?.as_ref()?.at(offset, bytes)
    }

    /// What of an operation's memory others may use in place. Only where values are combined: then
    /// every rank has said where its memory lies before any result is made.
    pub(super) fn registered(&self, operation: &Operation, rank: u32) -> Registered {
        let fingerprint = &operation.fingerprint;
        let Some(arena) = self.own.as_ref().filter(|_| fingerprint.kind.reduces()) else {
            return Registered::default();
        };
        let (input, output) = (&operation.input, &operation.output);
        let sinks = fingerprint.kind != Kind::Reduce || fingerprint.root == rank;
        if fingerprint.kind == Kind::ReduceScatter && !keep_apart(fingerprint, input, output, rank)
        {
            return Registered::default();
        }
        let find = |buffer: &Buffer| {
            let place = buffer.contiguous(0, buffer.bytes()).filter(|_| !buffer.is_pipelined())?;
            arena.find(place, buffer.bytes())
        };
        let found = if sinks { find(output).filter(|found| found.whole_pages) } else { None };
        Registered {
            input: find(input).map(|found| found.offset),
            output: found.map(|found| found.offset),
        }
    }
}

/// True if what is written to the output of a reduce-scatter is read of no other chunk's input.
fn keep_apart(fingerprint: &Fingerprint, input: &Buffer, output: &Buffer, rank: u32) -> bool {
    let block = fingerprint.count as usize * usize::from(fingerprint.element_bytes);
    let (Some(from), Some(to)) =
        (input.contiguous(0, input.bytes()), output.contiguous(0, output.bytes()))
    else {
        return false;
    };
    let (from, to) = (from.addr(), to.addr());
    to == from + rank as usize * block || to >= from + input.bytes() || from >= to + output.bytes()
}

impl Active {
    /// True if this rank looks at no result of it but the last: all are made where they belong.
    pub(super) fn is_made_in_place(&self, rank: u32) -> bool {
        let fingerprint = &self.operation.fingerprint;
        let sinks = fingerprint.kind != Kind::Reduce || fingerprint.root == rank;
        self.registered.input.is_some() && (self.registered.output.is_some() || !sinks)
    }
}

impl Driver {
    /// After an abort was recorded, before callers hear that they have their memory back: nobody
    /// reads or writes it any more, or what they write goes nowhere.
    pub(super) fn wait_for_peer_access(&mut self) {
        let own = self.shared.identity.local();
        self.shm.end_peer_access(own); // A panic may have left it so; this thread touches nothing.
        let none = Registered::default();
        let registered = |active: &&Active| active.registered != none;
        if !self.active.iter().any(|active| registered(&active)) {
            return;
        }
        let until = Instant::now() + QUIET_WITHIN;
        let owners = self.shared.identity.channels.min(self.shm.shape().locals);
        let peer_access =
            |driver: &Self| (0..owners).any(|o| o != own && driver.shm.is_accessing_peers(o));
        while peer_access(self) && Instant::now() < until {
            std::thread::sleep(LOOK_EVERY);
            self.clear_ended_peers();
        }
        if !peer_access(self) {
            return;
        }
        let Some(arena) = &self.arenas.own else { return };
        for active in self.active.iter().filter(registered) {
            let Some(offset) = active.registered.output else { continue };
            if let Err(error) = arena.revoke(offset, active.operation.output.bytes()) {
                let sequence = active.work.sequence;
                tracing::error!(%error, sequence, "memory could not be taken back from a peer");
            }
        }
    }

    /// A process that has ended touches nothing, whatever it was at.
    fn clear_ended_peers(&self) {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        for (local, socket, process) in &self.node_peers.watched {
            let mut end = match process {
                Some(process) => [PollFd::new(process, PollFlags::IN)],
                None => [PollFd::new(socket, PollFlags::HUP)],
            };
            if poll(&mut end, Some(&now)).is_ok_and(|ended| ended > 0) {
                self.shm.end_peer_access(*local);
            }
        }
    }

    /// Another rank of this node has registered memory that we cannot find.
    pub(super) fn cannot_find(&mut self, local: usize) {
        let rank = self.shared.identity.locals()[local];
        let peer = self.arenas.others.get(local).and_then(Option::as_ref);
        let (kind, detail) = match peer.map(PeerArena::mapped) {
            Some(Err(why)) => (ErrorKind::Io, why.to_owned()),
            _ => (ErrorKind::Protocol, "it registered memory outside its arena".to_owned()),
        };
        self.fail(self.reason_for(kind, rank, detail), None);
    }
}
