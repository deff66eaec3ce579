//! The words of the core: what arrives, what is to be done, what was wrong.

use super::credit::{Key, class};
use super::fingerprint::Fingerprint;
use crate::error::AbortReason;

/// The direction of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// A partial sum on its way to where the tree is hung up.
    Up = 0,
    /// A result on its way from there.
    Down = 1,
}

/// What a data frame says about its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataHead {
    /// The operation's number.
    pub sequence: u64,
    /// The chunk's number in it.
    pub chunk: u32,
    /// The tree in which it travels.
    pub tree: usize,
    /// Its direction.
    pub stage: Stage,
    /// Payload length.
    pub bytes: usize,
    /// What the sender thinks the operation is.
    pub fingerprint: Fingerprint,
}

impl DataHead {
    pub(super) fn key(&self) -> Key {
        (self.sequence, self.chunk)
    }

    pub(super) fn class(&self) -> usize {
        class(self.tree, self.stage)
    }
}

/// Where the payload of an arriving frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Straight to where the chunk's result belongs.
    Direct,
    /// Into this slot of the link's pool for the frame's (tree, stage).
    Slot(u32),
}

/// A partial sum that waits in a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partial {
    /// The link it came from.
    pub link: usize,
    /// The pool: see [`class`].
    pub class: usize,
    /// The slot.
    pub slot: u32,
}

/// What the driver has to do, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Combine the local inputs and these partial sums, in this order, into the chunk's result place.
    Reduce {
        /// Operation and chunk.
        key: Key,
        /// The partial sums, in the order of summation.
        partials: Vec<Partial>,
    },
    /// Copy a result that came early from its slot to the chunk's result place.
    Move {
        /// Operation and chunk.
        key: Key,
        /// Where it waits.
        from: Partial,
    },
    /// Send the chunk's result place; tell [`TreeCore::sent`] when the last byte is handed over.
    Send {
        /// The link.
        link: usize,
        /// Operation and chunk.
        key: Key,
        /// The tree.
        tree: usize,
        /// The direction.
        stage: Stage,
    },
    /// The result is in its place: local ranks may copy it.
    Publish {
        /// Operation and chunk.
        key: Key,
    },
    /// Nothing more happens to this chunk here; its places are free once the local ranks say so.
    Done {
        /// Operation and chunk.
        key: Key,
    },
    /// Tell this neighbour why everything ends.
    Abort {
        /// The link.
        link: usize,
        /// Why.
        cause: AbortReason,
    },
}

/// What a peer did that it must not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// It runs another operation under the same number.
    Mismatch {
        /// The number.
        sequence: u64,
        /// What we run.
        ours: Fingerprint,
        /// What it runs.
        theirs: Fingerprint,
    },
    /// It broke the protocol.
    Protocol(String),
}

/// What the oldest unfinished chunk waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// For inputs of ranks on this node.
    Local(Key),
    /// For a frame from this link.
    Frame(Key, usize, Stage),
    /// For this link to take what we send.
    Peer(Key, usize),
}
