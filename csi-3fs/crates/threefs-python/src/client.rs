//! Methods of the client: convert the arguments, wait, return the result.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fabric::auth::credentials::Credentials;
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use threefs_client::{Claim, ClientConfig, ReadRange, WriteRange};
use threefs_core::ids::{NodeId, TargetId};
use threefs_core::location::Location;
use threefs_meta::{At, Correction, Inode, InodeKind, LayoutDefaults, QuotaUse};
use threefs_mgmtd::DrainChange;

use crate::addresses::Addresses;
use crate::audit::ChunkAudit;
use crate::buffer::{BorrowedViews, View};
use crate::copier::Copier;
use crate::errors;
use crate::file::File;
use crate::runtime::ClientRuntime;
use crate::snapshots::{RawSnapshot, raw_snapshot};
use crate::trash::{RawTrashEntry, RawTrashId, raw_trash_entry, trash_id};

/// kind, inode, size, mode, modified (nanoseconds since 1970), chunk bytes, stripe.
pub(crate) type RawStat = (&'static str, u64, u64, u32, i64, u32, u32);

/// directory's inode, bytes_max, bytes_used, inodes_max, inodes_used.
pub(crate) type RawQuota = (u64, Option<u64>, u64, Option<u64>, u64);

/// One routing cache and pool of connections. Thread-safe; every call releases the GIL.
#[pyclass(module = "threefs._native", frozen)]
pub struct Client {
    live: Mutex<Option<Arc<ClientRuntime>>>,
}

impl Client {
    fn live(&self) -> PyResult<Arc<ClientRuntime>> {
        let live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        live.clone().ok_or_else(|| PyValueError::new_err("the client is closed; create a new one"))
    }
}

#[pymethods]
impl Client {
    #[new]
    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (mgmtd, meta, key_file, timeout_seconds, control_plane=false, tls=false, location=""))]
    fn new(
        py: Python<'_>,
        mgmtd: Vec<String>,
        meta: Addresses,
        key_file: &str,
        timeout_seconds: f64,
        control_plane: bool,
        tls: bool,
        location: &str,
    ) -> PyResult<Self> {
        let timeout = Duration::try_from_secs_f64(timeout_seconds)
            .map_err(|error| errors::invalid(py, &format!("timeout_seconds: {error}")))?;
        let credentials = Credentials::read(Path::new(key_file))
            .map_err(|error| errors::invalid(py, &error.to_string()))?;
        let mut config = ClientConfig::new(mgmtd, meta.into(), credentials.over_tls(tls));
        config.timeout = timeout;
        config.control_plane = control_plane;
        config.location = Location::try_from(location.to_owned())
            .map_err(|error| errors::invalid(py, &error.to_string()))?;
        Ok(Self { live: Mutex::new(Some(Arc::new(ClientRuntime::start(config)?))) })
    }

    fn close(&self) {
        drop(self.live.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    fn mkdir(&self, py: Python<'_>, path: &str, parents: bool) -> PyResult<()> {
        let live = self.live()?;
        live.wait(py, live.client.mkdir(path, parents))
    }

    fn listdir(&self, py: Python<'_>, path: &str) -> PyResult<Vec<String>> {
        let live = self.live()?;
        let entries = live.wait(py, live.client.list(path))?;
        Ok(entries.into_iter().map(|entry| entry.name).collect())
    }

    fn scandir(&self, py: Python<'_>, path: &str) -> PyResult<Vec<(String, RawStat)>> {
        let live = self.live()?;
        let entries = live.wait(py, live.client.scan(path))?;
        Ok(entries.into_iter().map(|(entry, inode)| (entry.name, raw(&inode))).collect())
    }

    fn stat(&self, py: Python<'_>, path: &str, follow: bool) -> PyResult<RawStat> {
        let live = self.live()?;
        Ok(raw(&live.wait(py, live.client.stat(path, follow))?))
    }

    fn open(&self, py: Python<'_>, path: &str) -> PyResult<File> {
        let live = self.live()?;
        let handle = live.wait(py, live.client.open(path))?;
        Ok(File::new(live, handle))
    }

    fn create(&self, py: Python<'_>, path: &str, exclusive: bool) -> PyResult<File> {
        let live = self.live()?;
        let handle = live.wait(py, live.client.create(path, exclusive))?;
        Ok(File::new(live, handle))
    }

    fn rename(&self, py: Python<'_>, source: &str, destination: &str) -> PyResult<()> {
        let live = self.live()?;
        live.wait(py, live.client.rename(source, destination))
    }

    fn remove(&self, py: Python<'_>, path: &str) -> PyResult<()> {
        let live = self.live()?;
        live.wait(py, live.client.unlink(path))
    }

    fn rmdir(&self, py: Python<'_>, path: &str) -> PyResult<()> {
        let live = self.live()?;
        live.wait(py, live.client.rmdir(path))
    }

    fn rmtree(&self, py: Python<'_>, path: &str) -> PyResult<()> {
        let live = self.live()?;
        live.wait(py, live.client.rmtree(path))
    }

    fn link(&self, py: Python<'_>, source: &str, destination: &str) -> PyResult<()> {
        let live = self.live()?;
        live.wait(py, live.client.link(source, destination))
    }

    fn symlink(&self, py: Python<'_>, target: &str, path: &str) -> PyResult<()> {
        let live = self.live()?;
        live.wait(py, live.client.symlink(target, path))
    }

    fn readlink(&self, py: Python<'_>, path: &str) -> PyResult<String> {
        let live = self.live()?;
        live.wait(py, live.client.readlink(path))
    }

    fn make_directory(
        &self,
        py: Python<'_>,
        path: &str,
        mode: u32,
        chunk_bytes: u32,
        stripe: u32,
    ) -> PyResult<RawStat> {
        let live = self.live()?;
        let defaults = LayoutDefaults { chunk_bytes, stripe };
        Ok(raw(&live.wait(py, live.client.make_directory(path, mode, defaults))?))
    }

    fn set_quota(
        &self,
        py: Python<'_>,
        path: &str,
        bytes_max: Option<u64>,
        inodes_max: Option<u64>,
    ) -> PyResult<RawQuota> {
        let live = self.live()?;
        Ok(raw_quota(&live.wait(py, live.client.set_quota(path, bytes_max, inodes_max))?))
    }

    fn quotas(&self, py: Python<'_>, path: &str) -> PyResult<Vec<RawQuota>> {
        let live = self.live()?;
        let quotas = live.wait(py, live.client.quotas(At::path(path)))?;
        Ok(quotas.iter().map(raw_quota).collect())
    }

    fn keep_removed(&self, py: Python<'_>, volume: &str, seconds: u64) -> PyResult<()> {
        let live = self.live()?;
        live.wait(py, live.client.keep_removed(volume, seconds))
    }

    #[pyo3(signature = (volume, after=None))]
    fn trash(
        &self,
        py: Python<'_>,
        volume: &str,
        after: Option<RawTrashId>,
    ) -> PyResult<(u64, Vec<RawTrashEntry>, bool)> {
        let live = self.live()?;
        let page = live.wait(py, live.client.trash(volume, after.map(trash_id)))?;
        Ok((page.seconds, page.entries.into_iter().map(raw_trash_entry).collect(), page.more))
    }

    #[pyo3(signature = (volume, entry, to=None))]
    fn restore_removed(
        &self,
        py: Python<'_>,
        volume: &str,
        entry: RawTrashId,
        to: Option<&str>,
    ) -> PyResult<RawStat> {
        let live = self.live()?;
        Ok(raw(&live.wait(py, live.client.restore_removed(volume, trash_id(entry), to))?))
    }

    fn purge_removed(&self, py: Python<'_>, volume: &str, ids: Vec<RawTrashId>) -> PyResult<()> {
        let live = self.live()?;
        let ids = ids.into_iter().map(trash_id).collect();
        live.wait(py, live.client.purge_removed(volume, ids))
    }

    fn trash_count(&self, py: Python<'_>) -> PyResult<u64> {
        let live = self.live()?;
        live.wait(py, live.client.trash_count())
    }

    fn create_snapshot(&self, py: Python<'_>, volume: &str, name: &str) -> PyResult<RawSnapshot> {
        let live = self.live()?;
        Ok(raw_snapshot(live.wait(py, live.client.create_snapshot(volume, name))?))
    }

    fn remove_snapshot(&self, py: Python<'_>, volume: &str, name: &str) -> PyResult<()> {
        let live = self.live()?;
        live.wait(py, live.client.remove_snapshot(volume, name))
    }

    fn snapshots(&self, py: Python<'_>, volume: &str) -> PyResult<Vec<RawSnapshot>> {
        let live = self.live()?;
        let snapshots = live.wait(py, live.client.snapshots(volume))?;
        Ok(snapshots.into_iter().map(raw_snapshot).collect())
    }

    fn copier(&self) -> PyResult<Copier> {
        Ok(Copier::new(self.live()?))
    }

    fn statfs(&self, py: Python<'_>, path: &str) -> PyResult<(u64, u64, u64, u64)> {
        let live = self.live()?;
        let space = live.wait(py, live.client.space(At::path(path)))?;
        Ok((space.bytes_total, space.bytes_free, space.inodes_total, space.inodes_free))
    }

    fn setxattr(&self, py: Python<'_>, path: &str, name: &str, value: Vec<u8>) -> PyResult<()> {
        let live = self.live()?;
        live.wait(py, live.client.set_attribute(path, name, Some(value)))
    }

    fn getxattr<'py>(
        &self,
        py: Python<'py>,
        path: &str,
        name: &str,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let live = self.live()?;
        let value = live.wait(py, live.client.attribute(path, name))?;
        Ok(PyBytes::new(py, &value))
    }

    fn listxattr(&self, py: Python<'_>, path: &str) -> PyResult<Vec<String>> {
        let live = self.live()?;
        live.wait(py, live.client.attributes(path))
    }

    fn removexattr(&self, py: Python<'_>, path: &str, name: &str) -> PyResult<()> {
        let live = self.live()?;
        live.wait(py, live.client.set_attribute(path, name, None))
    }

    #[pyo3(signature = (path, holder, stood_still=None))]
    fn claim(
        &self,
        py: Python<'_>,
        path: &str,
        holder: &str,
        stood_still: Option<(String, u64)>,
    ) -> PyResult<(String, u64)> {
        let live = self.live()?;
        let stood_still = stood_still.map(|(holder, beat)| Claim { holder, beat });
        let claim = live.wait(py, live.client.claim(path, holder, stood_still.as_ref()))?;
        Ok((claim.holder, claim.beat))
    }

    fn claim_of(&self, py: Python<'_>, path: &str) -> PyResult<Option<(String, u64)>> {
        let live = self.live()?;
        let claim = live.wait(py, live.client.claim_of(path))?;
        Ok(claim.map(|claim| (claim.holder, claim.beat)))
    }

    fn unclaim(&self, py: Python<'_>, path: &str, holder: &str) -> PyResult<()> {
        let live = self.live()?;
        live.wait(py, live.client.unclaim(path, holder))
    }

    fn set_owner(
        &self,
        py: Python<'_>,
        path: &str,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> PyResult<()> {
        let live = self.live()?;
        live.wait(py, live.client.set_owner(path, mode, uid, gid))
    }

    fn batch_write(
        &self,
        py: Python<'_>,
        writes: Vec<(String, u64, Bound<'_, PyAny>)>,
        create: bool,
    ) -> PyResult<()> {
        let live = self.live()?;
        let views = BorrowedViews::default();
        let mut ranges = Vec::with_capacity(writes.len());
        for (path, offset, data) in writes {
            let payload = views.lend(View::readable(&data)?);
            ranges.push(WriteRange { path, offset, payload });
        }
        let result = live.wait(py, live.client.batch_write(ranges, create));
        py.detach(|| views.wait_for_release());
        result
    }

    fn batch_read<'py>(
        &self,
        py: Python<'py>,
        reads: Vec<(String, u64, Option<u64>)>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let live = self.live()?;
        let ranges: Vec<ReadRange> = reads
            .into_iter()
            .map(|(path, offset, length)| ReadRange { path, offset, length })
            .collect();
        let plan = live.wait(py, live.client.plan_read(&ranges))?;
        let mut results = Vec::with_capacity(ranges.len());
        let mut buffers = Vec::with_capacity(ranges.len());
        for length in plan.lengths() {
            let (object, buffer) = uninitialised(py, *length)?;
            results.push(object);
            buffers.push(buffer);
        }
        live.wait(py, live.client.read_planned(plan, &mut buffers))?;
        Ok(results)
    }

    fn batch_read_into(
        &self,
        py: Python<'_>,
        reads: Vec<(String, u64, Bound<'_, PyAny>)>,
    ) -> PyResult<Vec<usize>> {
        let live = self.live()?;
        let mut ranges = Vec::with_capacity(reads.len());
        let mut views = Vec::with_capacity(reads.len());
        for (path, offset, out) in reads {
            let view = View::writable(&out)?;
            ranges.push(ReadRange { path, offset, length: Some(view.len() as u64) });
            views.push(view);
        }
        if View::overlap(&views) {
            return Err(errors::invalid(
                py,
                "two of the buffers share memory; use a separate buffer for each range",
            ));
        }
        let plan = live.wait(py, live.client.plan_read(&ranges))?;
        let lengths = plan.lengths().to_vec();
        let mut buffers: Vec<&mut [u8]> = views.iter_mut().map(View::as_mut_slice).collect();
        live.wait(py, live.client.read_planned(plan, &mut buffers))?;
        Ok(lengths)
    }

    fn status(&self, py: Python<'_>) -> PyResult<String> {
        let live = self.live()?;
        let status = live.wait(py, live.client.status())?;
        serde_json::to_string(&status).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    fn scrub(&self, py: Python<'_>, start: bool, targets: Vec<u64>) -> PyResult<String> {
        let live = self.live()?;
        let targets: Vec<TargetId> = targets.into_iter().map(TargetId).collect();
        let scrubs = live.wait(py, live.client.scrub(start, &targets))?;
        serde_json::to_string(&scrubs).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    fn usage(&self, py: Python<'_>) -> PyResult<String> {
        let live = self.live()?;
        let loads = live.wait(py, live.client.usage())?;
        serde_json::to_string(&loads).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    fn audit(&self, py: Python<'_>) -> PyResult<ChunkAudit> {
        let live = self.live()?;
        let audit = live.wait(py, live.client.audit())?;
        Ok(ChunkAudit::new(live, audit))
    }

    fn start_repair(&self, py: Python<'_>) -> PyResult<u64> {
        let live = self.live()?;
        live.wait(py, live.client.start_repair())
    }

    /// `corrections`: those of `store_check`, as JSON.
    fn repair(&self, py: Python<'_>, repair: u64, corrections: &str) -> PyResult<()> {
        let live = self.live()?;
        let corrections: Vec<Correction> = serde_json::from_str(corrections)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        live.wait(py, live.client.repair(repair, &corrections))
    }

    fn rebalance(&self, py: Python<'_>, apply: bool) -> PyResult<String> {
        let live = self.live()?;
        let plan = live.wait(py, live.client.rebalance(apply))?;
        serde_json::to_string(&plan).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// `nodes`: those to drain, or with `cancel` those to keep; `None` = none, or all.
    fn drain(
        &self,
        py: Python<'_>,
        apply: bool,
        cancel: bool,
        nodes: Option<Vec<u32>>,
    ) -> PyResult<String> {
        let live = self.live()?;
        let nodes = nodes.map(|nodes| nodes.into_iter().map(NodeId).collect());
        let change = match (cancel, nodes) {
            (false, nodes) => DrainChange::Add(nodes.unwrap_or_default()),
            (true, Some(nodes)) => DrainChange::Remove(nodes),
            (true, None) => DrainChange::RemoveAll,
        };
        let plan = live.wait(py, live.client.drain(apply, change))?;
        serde_json::to_string(&plan).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    fn read_bytes(&self) -> PyResult<String> {
        let read = self.live()?.client.read_bytes();
        serde_json::to_string(&read).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    fn moves(&self, py: Python<'_>, plan: bool) -> PyResult<Option<String>> {
        let live = self.live()?;
        let report = live.wait(py, live.client.moves(plan))?;
        let report = report.map(|report| serde_json::to_string(&report)).transpose();
        report.map_err(|error| PyValueError::new_err(error.to_string()))
    }

    fn move_rate(&self, py: Python<'_>, bytes_per_second: Option<u64>) -> PyResult<Option<u64>> {
        let live = self.live()?;
        live.wait(py, live.client.move_rate(bytes_per_second))
    }

    fn promote(&self, py: Python<'_>, target: u64, apply: bool) -> PyResult<String> {
        let live = self.live()?;
        let promotion = live.wait(py, live.client.promote(TargetId(target), apply))?;
        serde_json::to_string(&promotion).map_err(|error| PyValueError::new_err(error.to_string()))
    }
}

/// A bytes object that is filled before it is visible, and its memory.
fn uninitialised<'py>(
    py: Python<'py>,
    length: usize,
) -> PyResult<(Bound<'py, PyBytes>, &'py mut [u8])> {
    let size = isize::try_from(length).map_err(|error| PyValueError::new_err(error.to_string()))?;
    // SAFETY: attached; null requests uninitialised memory. The object is new, so no other
    // code sees it until `batch_read` returns it; it outlives the slice, because both are used
    // inside `batch_read` only. Every byte is written before a success is returned: the plan's
    // reads cover the whole length, and on an error the object is dropped unseen.
    unsafe {
        let object = ffi::PyBytes_FromStringAndSize(std::ptr::null(), size);
        let object = Bound::from_owned_ptr_or_err(py, object)?;
        let memory = ffi::PyBytes_AsString(object.as_ptr()).cast::<u8>();
        let object = object.cast_into_unchecked::<PyBytes>();
        if length == 0 {
            // The empty object is shared by the whole interpreter.
            return Ok((object, &mut []));
        }
        Ok((object, std::slice::from_raw_parts_mut(memory, length)))
    }
}

fn raw_quota(quota: &QuotaUse) -> RawQuota {
    let QuotaUse { directory, bytes_max, bytes_used, inodes_max, inodes_used, .. } = *quota;
    (directory.0, bytes_max, bytes_used, inodes_max, inodes_used)
}

pub(crate) fn raw(inode: &Inode) -> RawStat {
    let (kind, chunk_bytes, stripe) = match &inode.kind {
        InodeKind::File { layout, .. } => ("file", layout.chunk_bytes, layout.stripe),
        InodeKind::Directory { defaults, .. } => {
            ("directory", defaults.chunk_bytes, defaults.stripe)
        }
        InodeKind::Symlink { .. } => ("symlink", 0, 0),
        InodeKind::Special { .. } => ("special", 0, 0),
    };
    (kind, inode.id.0, inode.length(), inode.mode, inode.modified.0, chunk_bytes, stripe)
}
