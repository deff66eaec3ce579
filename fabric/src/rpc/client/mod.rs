//! Client side: connections, and connection pools for one address.

mod call;
mod config;
mod connection;
mod pool;

pub use config::{CallOptions, ConnectionConfig};
pub use connection::Connection;
pub use pool::{Pool, PoolConfig, Pools};
