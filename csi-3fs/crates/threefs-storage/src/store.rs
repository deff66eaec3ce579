//! Disk of a node: the shared space budget, and the stores of its targets.

use std::path::Path;
use std::sync::Arc;

use threefs_chunkstore::{ChunkStore, DiskBudget, FileChunkStore, StoreConfig};
use threefs_core::error::StoreError;
use threefs_core::ids::StoreId;

/// Opens or creates the store of one target in a folder. Blocks.
pub(crate) type OpenStore =
    dyn Fn(&Path, Arc<DiskBudget>) -> Result<Arc<dyn ChunkStore>, StoreError> + Send + Sync;

/// Disk of a node's data folder.
#[derive(Clone)]
pub(crate) struct Disk {
    /// Space budget shared by all targets.
    pub(crate) budget: Arc<DiskBudget>,
    pub(crate) open: Arc<OpenStore>,
}

/// Opens or creates the chunk store in `folder`. Blocks.
pub(crate) fn open(
    folder: &Path,
    budget: Arc<DiskBudget>,
) -> Result<Arc<dyn ChunkStore>, StoreError> {
    std::fs::create_dir_all(folder).map_err(|error| StoreError::Io {
        operation: format!("make folder {}", folder.display()),
        reason: error.to_string(),
    })?;
    let new_id = StoreId(rand::random());
    let config = StoreConfig { budget, new_id, ..StoreConfig::default() };
    Ok(FileChunkStore::open(folder, config)?.shared())
}
