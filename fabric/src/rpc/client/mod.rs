//! Client side: connections, and connection pools for one address.

mod connection;
mod pool;

pub use connection::{CallOptions, Connection, ConnectionConfig};
pub use pool::{Pool, PoolConfig};
