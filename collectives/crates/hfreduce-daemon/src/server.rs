//! Server side of the daemon protocol: `hfreduced` accepts ranks and runs their communicators.

mod admission;
mod calls;
mod connection;
mod descriptors;
mod limits;
mod listener;
mod pipelined;
mod reconfigure;
mod session;
pub(crate) mod validate;

pub use listener::{Daemon, ListenError, Rules};
