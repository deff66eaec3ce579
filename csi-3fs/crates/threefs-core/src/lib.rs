//! The pure core of 3FS: identities, routing, chain rules, CRAQ replica and resync as state machines.
//!
//! What this crate never does: read a clock, open a socket or a file, start a thread, draw a random
//! number. Time comes in as [`time::Millis`], everything that must happen outside goes out as an
//! action. The storage service and the simulator drive the same code.
//!
//! | module | what |
//! |---|---|
//! | [`ids`] | the names of things as types |
//! | [`routing`] | chains, their targets' states, chain tables, nodes: what mgmtd publishes |
//! | [`chain`] | the chain state machine of mgmtd as one pure function |
//! | [`heartbeat`] | what a storage node tells mgmtd, and the lease that the answer gives |
//! | [`hosting`] | when a failed store is opened again, and a damaged one set aside |
//! | [`layout`] | which chain holds chunk i of a file, specified to the byte |
//! | [`message`] | requests and replies of the storage service |
//! | [`moves`] | how a replica moves to another node without one less meanwhile |
//! | [`replica`] | one replica of one chain: write path, read path, resync, repair |
//! | [`terms`] | what of a file's chunks the holder of a capability may change |
//! | [`error`] | its errors, and what a caller has to do about each |
//! | [`chunk`] | what a replica knows about one chunk |
//! | [`forgotten`] | inodes whose chunks were dropped for good |
//! | [`checksum`] | CRC32C and how two of them combine |

pub mod chain;
pub mod checksum;
pub mod chunk;
pub mod error;
pub mod forgotten;
pub mod heartbeat;
pub mod hosting;
pub mod ids;
pub mod layout;
pub mod message;
pub mod moves;
pub mod replica;
pub mod routing;
pub mod terms;
pub mod time;
