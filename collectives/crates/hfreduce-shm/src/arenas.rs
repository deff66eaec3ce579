//! Arenas of registered memory of a node's ranks.

use std::cell::OnceCell;
use std::sync::Arc;

use fabric::arena::Arena;
use fabric::shm::Segment;
use rustix::fd::OwnedFd;

use crate::quota::{Account, Charge};

/// The arenas of a node's ranks, as seen by this rank.
#[derive(Debug, Default)]
pub struct Arenas {
    /// This rank's arena, if other ranks of the node map it.
    pub own: Option<Arc<Arena>>,
    /// By local index: the arenas of other ranks, if this rank owns chunks and they have any.
    pub others: Vec<Option<PeerArena>>,
}

/// The arena of another rank of the node. It is as large as the machine's memory, and most groups
/// register nothing: it takes address space once a rank has registered memory in this group.
#[derive(Debug)]
pub struct PeerArena {
    fd: OwnedFd,
    bytes: usize,
    addresses: Account,
    mapped: OnceCell<Result<(Segment, Charge), String>>,
}

impl PeerArena {
    /// From a descriptor that the peer has sent. It is mapped once, so that an invalid descriptor
    /// is detected before the group is connected.
    ///
    /// # Errors
    /// The arena cannot be mapped; the message names the remedy.
    pub fn new(fd: OwnedFd, bytes: usize, addresses: Account) -> Result<Self, String> {
        let peer = Self { fd, bytes, addresses, mapped: OnceCell::new() };
        peer.map()?;
        Ok(peer)
    }

    fn map(&self) -> Result<(Segment, Charge), String> {
        let mut addresses = self.addresses.charge();
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

    /// The mapping, made at the first call.
    ///
    /// # Errors
    /// The arena cannot be mapped; the message names the remedy.
    #[inline]
    pub fn mapped(&self) -> Result<&Segment, &str> {
        let mapped = self.mapped.get_or_init(|| self.map()).as_ref();
        mapped.map(|(segment, _)| segment).map_err(String::as_str)
    }

    fn at(&self, offset: u64, bytes: usize) -> Option<*mut u8> {
        self.mapped().ok()?.at(offset, bytes)
    }
}

impl Arenas {
    /// Address of a range in the arena of another rank; `None` if it is not inside.
    #[inline]
    pub fn at(&self, local: usize, offset: u64, bytes: usize) -> Option<*mut u8> {
        self.others.get(local)?.as_ref()?.at(offset, bytes)
    }
}
