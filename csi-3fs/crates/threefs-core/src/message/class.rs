//! Classes of requests, each with a separate budget at the receiving service.
//!
//! A request may wait, in its chunk's queue or for a reply, only for requests of higher classes: an
//! update for forwards; a forward for forwards at a higher hop and for replaces; all of them for
//! repairs; a purge and a request to forget inodes for the same at a higher hop. Queries, repairs
//! and reads wait for the local disk only. So whatever budgets are full, the requests of the
//! highest class in flight can complete, then those of the class below, and so on: no cycle of full
//! budgets can form between nodes.

/// Clients' updates, and inodes to be forgotten for the metadata service.
pub const UPDATE: u8 = 0;
/// The highest hop with a separate class. A hop above the chain length requires a change of the
/// head during one update; further ones share this class.
pub const HOP_MAX: u8 = 5;
/// Whole chunks for a SYNCING successor, which does not forward them.
pub const REPLACE: u8 = HOP_MAX + 1;
/// Queries answered from the store: syncs, repairs, lists of chunks.
pub const QUERY: u8 = REPLACE + 1;
/// Clients' reads.
pub const READ: u8 = QUERY + 1;
/// Number of classes.
pub const COUNT: u8 = READ + 1;
