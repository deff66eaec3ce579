//! Client side: connections, and connection pools for one address.

mod config;
mod connection;
mod pool;
mod shared;

pub use config::{CallOptions, ConnectionConfig};
pub use connection::Connection;
pub use pool::{Pool, PoolConfig};
