//! Pure core of 3FS: identifiers, routing, chain rules, CRAQ replica and resync as state machines.
//!
//! This crate does not read clocks, open sockets or files, start threads or draw random numbers.
//! Time is passed in as [`time::Millis`]; all effects are returned as actions. The storage service
//! and the simulator drive the same code.
//!
//! | module | content |
//! |---|---|
//! | [`ids`] | identifiers as types |
//! | [`routing`] | chains, target states, chain tables, nodes, moves: published by mgmtd |
//! | [`chain`] | the chain state machine of mgmtd as a pure function |
//! | [`heartbeat`] | heartbeats of storage nodes and their serving lease |
//! | [`fence`] | fences of volumes: epochs whose updates are refused |
//! | [`hosting`] | policy for reopening failed stores and setting damaged ones aside |
//! | [`layout`] | the chain of each chunk of a file |
//! | [`location`] | zone, rack and host of a storage node |
//! | [`membership`] | what the disks of targets prove about a restored chain table |
//! | [`message`] | requests and replies of the storage service |
//! | [`moves`] | moves of replicas to other nodes without losing redundancy |
//! | [`replica`] | one replica of one chain: write path, read path, resync, repair |
//! | [`scrub`] | schedule, pace and comparison of scrubs |
//! | [`shown`] | epochs that the snapshots of a volume show |
//! | [`snapshot_inode`] | numbers of inodes in snapshots |
//! | [`terms`] | chunks of a file that a capability permits to update |
//! | [`disks`] | which of the disks that are found a storage service serves, and under which ids |
//! | [`error`] | errors of the storage service, and the remedy for each |
//! | [`chunk`] | the state of one chunk |
//! | [`forgotten`] | inodes whose chunks were dropped permanently |
//! | [`checksum`] | CRC32C and its combination |

pub mod chain;
pub mod checksum;
pub mod chunk;
pub mod disks;
pub mod error;
pub mod fence;
pub mod forgotten;
pub mod heartbeat;
pub mod hosting;
pub mod ids;
pub mod layout;
pub mod location;
pub mod membership;
pub mod message;
pub mod moves;
pub mod replica;
pub mod routing;
pub mod scrub;
pub mod shown;
pub mod snapshot_inode;
pub mod terms;
pub mod time;
