//! The calling side: connections, and pools of connections to one address.

mod connection;
mod pool;

pub use connection::{CallOptions, Connection, ConnectionConfig};
pub use pool::{Pool, PoolConfig};
