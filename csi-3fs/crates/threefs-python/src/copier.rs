//! Copies of trees by inode.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use threefs_client::{BootInstant, Client, Lease};
use threefs_core::ids::InodeId;
use threefs_meta::{Entry, Inode, InodeKind};

use crate::errors;
use crate::runtime::ClientRuntime;

/// name, kind, inode, size, mode, uid, gid, links, accessed and modified (nanoseconds since 1970).
type RawCopyEntry = (String, &'static str, u64, u64, u32, u32, u32, u32, i64, i64);

/// Copies trees with the identity of its client, under a separate lease.
#[pyclass(module = "threefs._native", frozen)]
pub struct Copier {
    live: Arc<ClientRuntime>,
    client: Client,
}

impl Copier {
    pub(crate) fn new(live: Arc<ClientRuntime>) -> Self {
        let client = live.client.under(&Lease::default());
        Self { live, client }
    }
}

#[pymethods]
impl Copier {
    /// From now on no change starts after these seconds, unless this is repeated; negative: never
    /// again.
    fn hold_for(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        if seconds < 0.0 {
            self.client.lease().revoke();
            return Ok(());
        }
        let held = Duration::try_from_secs_f64(seconds)
            .map_err(|error| errors::invalid(py, &format!("seconds: {error}")))?;
        self.client.lease().renew_until(BootInstant::now().after(held));
        Ok(())
    }

    fn page(
        &self,
        py: Python<'_>,
        directory: u64,
        after: &str,
        limit: u32,
    ) -> PyResult<(Vec<RawCopyEntry>, bool)> {
        let work = self.client.scan_page(InodeId(directory), after, limit);
        let (entries, more) = self.live.wait(py, work)?;
        Ok((entries.into_iter().map(raw_entry).collect(), more))
    }

    fn open_directory(&self, py: Python<'_>, parent: u64, name: &str) -> PyResult<u64> {
        let work = self.client.open_directory(InodeId(parent), name);
        Ok(self.live.wait(py, work)?.id.0)
    }

    /// The inode of the copy, and the offset of the next call unless it is complete.
    fn copy(
        &self,
        py: Python<'_>,
        source: u64,
        directory: u64,
        name: &str,
        offset: u64,
    ) -> PyResult<(u64, Option<u64>)> {
        let work = self.client.copy_entry(InodeId(source), InodeId(directory), name, offset);
        let (inode, next) = self.live.wait(py, work)?;
        Ok((inode.0, next))
    }

    fn link(&self, py: Python<'_>, file: u64, directory: u64, name: &str) -> PyResult<()> {
        let work = self.client.link_inode(InodeId(file), InodeId(directory), name);
        self.live.wait(py, work)
    }

    fn copy_attributes(&self, py: Python<'_>, source: u64, to: u64) -> PyResult<()> {
        self.live.wait(py, self.client.copy_attributes(InodeId(source), InodeId(to)))
    }
}

fn raw_entry((entry, inode): (Entry, Inode)) -> RawCopyEntry {
    let kind = match &inode.kind {
        InodeKind::File { .. } => "file",
        InodeKind::Directory { .. } => "directory",
        InodeKind::Symlink { .. } => "symlink",
        InodeKind::Special { .. } => "special",
    };
    let size = inode.length();
    let Inode { id, mode, uid, gid, links, accessed, modified, .. } = inode;
    (entry.name, kind, id.0, size, mode, uid, gid, links, accessed.0, modified.0)
}
