//! Vocabulary of the core: arriving frames, actions for the driver, protocol violations.

use super::credit::{Key, class};
use super::fingerprint::Fingerprint;
use super::flow::Stage;
use crate::error::AbortReason;

/// Header of a data frame: what its payload is.
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
    /// The sender's fingerprint of the operation.
    pub fingerprint: Fingerprint,
}

impl DataHead {
    #[inline]
    pub(super) fn key(&self) -> Key {
        (self.sequence, self.chunk)
    }

    #[inline]
    pub(super) fn class(&self) -> usize {
        class(self.tree, self.stage)
    }
}

/// Destination of the payload of an arriving frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The result buffer of the chunk.
    Direct,
    /// This slot of the link's pool for the frame's (tree, stage).
    Slot(u32),
}

/// A partial sum stored in a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partial {
    /// The link on which it was received.
    pub link: usize,
    /// The pool: see [`class`].
    pub class: usize,
    /// The slot.
    pub slot: u32,
}

/// Actions for the driver, to be executed in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Combine the local inputs and these partial sums, in this order, into the chunk's result
    /// buffer.
    Reduce {
        /// Operation and chunk.
        key: Key,
        /// The partial sums, in the order of summation.
        partials: Vec<Partial>,
    },
    /// Copy a result that arrived early from its slot to the chunk's result buffer.
    Move {
        /// Operation and chunk.
        key: Key,
        /// The slot that holds it.
        from: Partial,
    },
    /// Send the chunk's result buffer, and call [`TreeCore::sent`] when its last byte has left.
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
    /// The result is in its buffer: local ranks may copy it.
    Publish {
        /// Operation and chunk.
        key: Key,
    },
    /// This node is finished with the chunk; its buffers are free once the local ranks release
    /// them.
    Done {
        /// Operation and chunk.
        key: Key,
    },
    /// Send the abort reason to this neighbor.
    Abort {
        /// The link.
        link: usize,
        /// The reason.
        cause: AbortReason,
    },
}

/// A violation of the protocol by a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The peer runs another operation under the same sequence number.
    Mismatch {
        /// The sequence number.
        sequence: u64,
        /// The operation of this rank.
        fingerprint: Fingerprint,
        /// The operation of the peer.
        peer_fingerprint: Fingerprint,
    },
    /// The peer broke the wire protocol.
    Protocol(String),
}

/// What the oldest unfinished chunk waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// For inputs of ranks on this node.
    Local(Key),
    /// For a frame from this link.
    Frame(Key, usize, Stage),
    /// For this link to accept what this node sends.
    Peer(Key, usize),
}
