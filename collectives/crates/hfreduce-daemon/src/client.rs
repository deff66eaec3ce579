//! Client side of the daemon protocol: the part of a rank that runs in the rank's process.

mod arena;
mod driver;
mod endpoint;
mod pipelined;
mod queue;
mod session;
mod staging;

pub use driver::ClientDriver;
pub use endpoint::{DaemonEndpoint, DaemonNewcomer};
#[cfg(test)]
pub(crate) use session::ClientSession;
