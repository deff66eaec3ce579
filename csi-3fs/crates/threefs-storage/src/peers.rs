//! RPC client for the storage services of other nodes.

use std::time::Duration;

use bytes::Bytes;
use fabric::auth::capability::Presented;
use fabric::auth::credentials::Credentials;
use fabric::class::TrafficClass;
use fabric::deadline::Deadline;
use fabric::rpc::{CallOptions, ConnectionConfig, PoolConfig, Pools, decode, encode};
use threefs_core::message::{StorageReply, StorageRequest, StorageResult};
use threefs_core::replica::PeerFailure;

use crate::admission::CALLS_OF_CONNECTION_MAX;

/// Connections per node: two, so that a large frame on one does not delay the other.
const CONNECTIONS_MAX: usize = 2;

/// Timeout factor for a replica that answers other calls, compared with a silent one.
pub(crate) const BUSY_TIMEOUT_FACTOR: u32 = 8;

pub(crate) struct Peers {
    /// Addresses come from the routing, so there are few.
    pools: Pools,
    idle_timeout: Duration,
}

impl Peers {
    pub(crate) fn new(credentials: &Credentials, idle_timeout: Duration) -> Self {
        let mut connection = ConnectionConfig::new(crate::CONTEXT, credentials);
        connection.class = TrafficClass::Storage;
        connection.connect_timeout = Duration::from_millis(500);
        connection.calls_in_flight_max = CALLS_OF_CONNECTION_MAX;
        let mut config = PoolConfig::new(connection);
        config.connections_max = CONNECTIONS_MAX;
        config.backoff_max = Duration::from_millis(200);
        Self { pools: Pools::new(config), idle_timeout }
    }

    /// Makes one attempt.
    pub(crate) async fn call(
        &self,
        address: &str,
        request: &StorageRequest,
        payload: Bytes,
        deadline: Deadline,
    ) -> (Result<StorageReply, PeerFailure>, Bytes) {
        let unreachable = |error: &dyn std::fmt::Display| {
            tracing::debug!(address, %error, "call to another replica failed");
            (Err(PeerFailure::Unreachable), Bytes::new())
        };
        let message = match encode(&(request, Presented::Nothing)) {
            Ok(message) => message,
            Err(error) => return unreachable(&error),
        };
        let options = CallOptions {
            not_after: None,
            class: request.class(),
            idle_timeout: Some(self.idle_timeout),
        };
        let pool = self.pools.at(address);
        let reply = match pool.call_with(message, payload.into(), deadline, options).await {
            Ok(reply) => reply,
            Err(error) => return unreachable(&error),
        };
        match decode::<StorageResult>(&reply.message) {
            Ok(result) => (result.map_err(PeerFailure::Refused), reply.payload.into_bytes()),
            Err(error) => unreachable(&error),
        }
    }
}
