//! Connections to storage services, and the nodes that have recently not answered.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fabric::rpc::{Pool, PoolConfig};
use threefs_core::ids::NodeId;

use crate::config::ClientConfig;

/// How long a node that did not answer is deprioritized.
const SUSPICION: Duration = Duration::from_secs(1);

pub(crate) struct Peers {
    config: PoolConfig,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    pools: HashMap<String, Pool>,
    suspected: HashMap<NodeId, Instant>,
}

impl Peers {
    pub(crate) fn new(config: &ClientConfig) -> Self {
        Self { config: config.storage_pool(), state: Mutex::default() }
    }

    /// Connections to an address. Addresses come from the routing, so there are few.
    pub(crate) fn at(&self, address: &str) -> Pool {
        let mut state = self.lock();
        if let Some(pool) = state.pools.get(address) {
            return pool.clone();
        }
        let pool = Pool::new(address, self.config.clone());
        state.pools.insert(address.into(), pool.clone());
        pool
    }

    /// Records that the node did not answer.
    pub(crate) fn suspect(&self, node: NodeId) {
        self.lock().suspected.insert(node, Instant::now() + SUSPICION);
    }

    /// Records that the node answered.
    pub(crate) fn trust(&self, node: NodeId) {
        self.lock().suspected.remove(&node);
    }

    /// Whether other nodes should be preferred.
    pub(crate) fn is_suspected(&self, node: NodeId) -> bool {
        self.lock().suspected.get(&node).is_some_and(|until| Instant::now() < *until)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
