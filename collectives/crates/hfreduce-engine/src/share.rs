//! What the ranks that one user has in this process share. A daemon has a share for each user; any
//! other process has one.

use std::sync::{Arc, LazyLock};

use crate::drivers::priority::Levels;

/// See the module's text.
#[derive(Debug, Default)]
pub struct Share {
    /// Whose chunks go first. Levels of different users are not compared: each user chooses its own.
    pub(crate) levels: Arc<Levels>,
}

static OF_PROCESS: LazyLock<Arc<Share>> = LazyLock::new(Arc::default);

impl Share {
    /// The share of a process that serves nobody else's ranks.
    pub fn of_process() -> Arc<Self> {
        OF_PROCESS.clone()
    }
}
