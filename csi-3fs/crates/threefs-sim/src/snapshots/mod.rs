//! Seeded, deterministic model of snapshots and clones of volumes, as decision 0167 designs them.
//!
//! One seed determines one schedule: two storage nodes, clients that write, read and truncate
//! through cached handles, transactions of the metadata services, creations, removals and clones of
//! snapshots, background work, and faults: crashed and unreachable nodes, creators that die between
//! two steps, lost and repeated updates. Transactions are atomic and a node stands for a chain:
//! `threefs-kv` and the simulation of chains test these.
//!
//! The reference copies whole trees: each snapshot must have the names of the moment of its commit,
//! and for each block a value that a read at that moment could return; and it must never change.
//! Each [`Mutation`] removes one rule of the design.

mod check;
mod clones;
mod files;
mod meta;
mod mutations;
mod operations;
mod reference;
mod schedule;
mod space;
mod storage;
mod tasks;

pub use mutations::Mutation;
pub use schedule::{Outcome, Violation, run};

/// Inodes. Never reused.
type Id = u64;
/// Counts the snapshots of a volume: a row is of an epoch, a snapshot is the end of one.
type Epoch = u64;
/// A snapshot of any volume.
type Slot = u64;
/// One write, with all its retries.
type Tag = u64;

/// Blocks of a chunk.
const CHUNK_BLOCKS: u64 = 2;
/// Chunks of the longest file.
const CHUNKS: u64 = 3;
/// Storage nodes; chunk `i` is on node `i % NODES`.
const NODES: u64 = 2;
