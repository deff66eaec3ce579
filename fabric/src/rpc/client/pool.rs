//! Connection pool for one address; reconnects automatically.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::config::{CallOptions, ConnectionConfig};
use super::connection::Connection;
use crate::deadline::Deadline;
use crate::rpc::error::{Executed, RpcError};
use crate::rpc::message::{Payload, Reply, decode, encode};
use crate::rpc::not_after::NotAfter;
use crate::rpc::server::{USAGE_CLASS, USAGE_REQUEST, Usage};

/// Configuration of a pool.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Configuration of each connection.
    pub connection: ConnectionConfig,
    /// Maximum number of connections; calls use them in round-robin order.
    pub connections_max: usize,
    /// Initial backoff after a failed attempt; it doubles.
    pub backoff_min: Duration,
    /// Maximum backoff.
    pub backoff_max: Duration,
}

impl PoolConfig {
    /// One connection, backoff of 20 ms to 500 ms.
    pub fn new(connection: ConnectionConfig) -> Self {
        Self {
            connection,
            connections_max: 1,
            backoff_min: Duration::from_millis(20),
            backoff_max: Duration::from_millis(500),
        }
    }
}

/// Connections to one address, opened on first use and reopened when lost. Clones share them.
#[derive(Clone)]
pub struct Pool(Arc<Inner>);

struct Inner {
    address: String,
    config: PoolConfig,
    slots: Vec<Mutex<Slot>>,
    next: AtomicUsize,
}

#[derive(Default)]
struct Slot {
    connection: Option<Arc<Connection>>,
    /// Consecutive failures to connect, and the time of the next permitted attempt.
    failures: u32,
    not_before: Option<Instant>,
}

impl Pool {
    /// Creates a pool without opening a connection.
    pub fn new(address: impl Into<String>, config: PoolConfig) -> Self {
        let slots = (0..config.connections_max.max(1)).map(|_| Mutex::default()).collect();
        Self(Arc::new(Inner { address: address.into(), config, slots, next: AtomicUsize::new(0) }))
    }

    /// The address of the server.
    pub fn address(&self) -> &str {
        &self.0.address
    }

    /// Makes one attempt. Connecting is retried until the deadline (nothing has been sent yet), the
    /// call itself is not.
    ///
    /// # Errors
    /// Any [`RpcError`].
    pub async fn call(
        &self,
        message: Bytes,
        payload: Payload,
        deadline: Deadline,
    ) -> Result<Reply, RpcError> {
        self.call_with(message, payload, deadline, CallOptions::default()).await
    }

    /// [`Pool::call`] with options.
    ///
    /// # Errors
    /// Any [`RpcError`].
    pub async fn call_with(
        &self,
        message: Bytes,
        payload: Payload,
        deadline: Deadline,
        options: CallOptions<'_>,
    ) -> Result<Reply, RpcError> {
        let slot = self.0.next.fetch_add(1, Relaxed) % self.0.slots.len();
        loop {
            let connection = self.connection(slot, deadline).await?;
            let (message, payload) = (message.clone(), payload.clone());
            match connection.call_with(message, payload, deadline, options).await {
                // The connection had closed before this call was sent.
                Err(RpcError::Unreachable { .. }) if !deadline.passed() => {}
                result => return result,
            }
        }
    }

    /// Retries errors that are [`RpcError::retryable`] until the deadline. Only for calls that may
    /// be executed twice (reads, or requests with an idempotency key). No attempt is started once
    /// `not_after` has expired.
    ///
    /// # Errors
    /// The last attempt's error; for a guarded call that of the last attempt that may have been
    /// executed, if there is one.
    pub async fn call_idempotent(
        &self,
        message: Bytes,
        payload: Payload,
        attempt_timeout: Duration,
        deadline: Deadline,
        not_after: Option<&NotAfter>,
    ) -> Result<Reply, RpcError> {
        let mut pause = self.0.config.backoff_min;
        let mut perhaps = None;
        loop {
            let attempt = deadline.within(attempt_timeout);
            let options = CallOptions { not_after, ..CallOptions::default() };
            let call = self.call_with(message.clone(), payload.clone(), attempt, options);
            let error = match call.await {
                Err(error) if error.retryable() => error,
                result => return result,
            };
            match deadline.remaining() {
                Some(remaining) if remaining > pause => tokio::time::sleep(pause).await,
                _ if error.executed() == Executed::Perhaps => return Err(error),
                _ => return Err(perhaps.unwrap_or(error)),
            }
            if not_after.is_some() && error.executed() == Executed::Perhaps {
                perhaps = Some(error);
            }
            pause = (pause * 2).min(self.0.config.backoff_max);
        }
    }

    /// [`Pool::call_idempotent`] with typed messages and no payload.
    ///
    /// # Errors
    /// Any [`RpcError`].
    pub async fn ask<Q: Serialize, A: DeserializeOwned>(
        &self,
        request: &Q,
        attempt_timeout: Duration,
        deadline: Deadline,
        not_after: Option<&NotAfter>,
    ) -> Result<A, RpcError> {
        let (message, payload) = (encode(request)?, Payload::empty());
        let reply =
            self.call_idempotent(message, payload, attempt_timeout, deadline, not_after).await?;
        decode(&reply.message)
    }

    /// Usage of the server by all callers since the previous report on the connection, for holders
    /// of the cluster's key. For a pool of one connection, which reports nothing else.
    ///
    /// # Errors
    /// Any [`RpcError`]; an older server answers with [`FaultCode::BadRequest`].
    ///
    /// [`FaultCode::BadRequest`]: crate::rpc::FaultCode::BadRequest
    pub async fn usage(&self, deadline: Deadline) -> Result<Usage, RpcError> {
        let options = CallOptions { class: USAGE_CLASS, ..CallOptions::default() };
        let message = Bytes::from_static(&USAGE_REQUEST);
        let reply = self.call_with(message, Payload::empty(), deadline, options).await?;
        decode(&reply.message)
    }

    async fn connection(
        &self,
        slot: usize,
        deadline: Deadline,
    ) -> Result<Arc<Connection>, RpcError> {
        let unreachable = |detail: String| RpcError::Unreachable {
            context: self.0.config.connection.context.clone(),
            peer: self.0.address.clone(),
            detail,
        };
        let at = deadline.instant().into();
        let mut last = None;
        loop {
            // A caller that waits here waits for another caller's attempt to connect, which is
            // bounded.
            let Ok(mut slot) = tokio::time::timeout_at(at, self.0.slots[slot].lock()).await else {
                return Err(last.unwrap_or_else(|| unreachable("still connecting".into())));
            };
            let usable = |open: &&Arc<Connection>| !open.is_closed() && !open.is_outdated();
            if let Some(connection) = slot.connection.as_ref().filter(usable) {
                return Ok(Arc::clone(connection));
            }
            slot.connection = None;
            let pause_over = slot.not_before.unwrap_or_else(Instant::now);
            if pause_over >= at {
                let detail = format!("{} attempts failed", slot.failures);
                return Err(last.unwrap_or_else(|| unreachable(detail)));
            }
            tokio::time::sleep_until(pause_over).await;
            let config = self.0.config.connection.clone();
            match Connection::open(&self.0.address, config, deadline).await {
                Ok(connection) => {
                    let connection = Arc::new(connection);
                    *slot = Slot { connection: Some(Arc::clone(&connection)), ..Slot::default() };
                    return Ok(connection);
                }
                Err(error) if error.retryable() && !deadline.passed() => {
                    let pause = self.0.config.backoff_min * 2u32.pow(slot.failures.min(10));
                    slot.failures += 1;
                    slot.not_before = Some(Instant::now() + pause.min(self.0.config.backoff_max));
                    last = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Pools of one configuration, by address: created on first use, and kept.
pub struct Pools {
    config: PoolConfig,
    by_address: std::sync::Mutex<HashMap<String, Pool>>,
}

impl Pools {
    /// Creates no pool yet.
    pub fn new(config: PoolConfig) -> Self {
        Self { config, by_address: std::sync::Mutex::default() }
    }

    /// The pool for an address.
    pub fn at(&self, address: &str) -> Pool {
        let mut pools = self.by_address.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = pools.get(address) {
            return pool.clone();
        }
        let pool = Pool::new(address, self.config.clone());
        pools.insert(address.into(), pool.clone());
        pool
    }
}
