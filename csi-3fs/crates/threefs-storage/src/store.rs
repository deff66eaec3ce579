//! Opens the store of one target.

use std::path::Path;
use std::sync::Arc;

use threefs_chunkstore::{ChunkStore, DiskBudget, FileChunkStore, StoreConfig};
use threefs_core::error::StoreError;
use threefs_core::ids::StoreId;

/// Opens, or makes, the chunk files in `folder`. Blocks.
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
