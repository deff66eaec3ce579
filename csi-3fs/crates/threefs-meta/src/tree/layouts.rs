//! Layouts of new files: round robin over the chain table.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use threefs_core::layout::{ChainChoice, Layout, check_chunk_bytes};
use threefs_core::routing::RoutingInfo;
use threefs_mgmtd::FIRST_TABLE;
use tokio::sync::watch;

use crate::ops::Layouts;
use crate::protocol::{LayoutDefaults, MetaError};

impl LayoutDefaults {
    /// Refuses defaults that no file could be created with.
    ///
    /// # Errors
    /// [`MetaError::Invalid`] with the field, its value and the expected value.
    pub(crate) fn validate(&self) -> Result<(), MetaError> {
        let bytes = self.chunk_bytes;
        if bytes == 0 {
            return Ok(());
        }
        check_chunk_bytes(bytes).map_err(|error| MetaError::Invalid {
            field: "defaults.chunk_bytes".into(),
            value: bytes.to_string(),
            reason: error.to_string(),
        })
    }
}

/// Assigns consecutive stripes of the newest chain table, so that files spread evenly.
pub(crate) struct RoundRobin {
    routing: watch::Receiver<Arc<RoutingInfo>>,
    service: LayoutDefaults,
    files: AtomicU32,
}

impl RoundRobin {
    /// `first` is the random start, so that restarts do not all start at the same chain.
    pub(crate) fn new(
        routing: watch::Receiver<Arc<RoutingInfo>>,
        service: LayoutDefaults,
        first: u32,
    ) -> Self {
        Self { routing, service, files: AtomicU32::new(first) }
    }
}

impl Layouts for RoundRobin {
    fn choose(&self, wishes: [LayoutDefaults; 2]) -> Result<Layout, MetaError> {
        let first_set = |field: fn(&LayoutDefaults) -> u32| {
            wishes.iter().map(field).find(|value| *value != 0).unwrap_or(field(&self.service))
        };
        let routing = self.routing.borrow();
        let table = routing.newest_table(FIRST_TABLE).filter(|table| !table.chains.is_empty());
        let Some(table) = table else {
            let detail = "no chains yet: not all storage nodes have registered".into();
            return Err(MetaError::Unavailable { detail });
        };
        // A table has far fewer than 2^32 chains.
        let chains = table.chains.len() as u32;
        let stripe = first_set(|defaults| defaults.stripe).min(chains);
        let number = self.files.fetch_add(1, Relaxed);
        let layout = Layout {
            table: table.id,
            table_version: table.version,
            chunk_bytes: first_set(|defaults| defaults.chunk_bytes),
            stripe,
            chains: ChainChoice::Range {
                base: number.wrapping_mul(stripe) % chains,
                seed: u64::from(number),
            },
        };
        layout.validate().map_err(|error| MetaError::Invalid {
            field: "layout".into(),
            value: format!("chunk_bytes {}, stripe {stripe}", layout.chunk_bytes),
            reason: error.to_string(),
        })?;
        Ok(layout)
    }
}
