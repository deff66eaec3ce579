//! An open file.

use std::sync::Arc;

use pyo3::prelude::*;
use threefs_client::FileHandle;

use crate::buffer::{BorrowedViews, View};
use crate::runtime::ClientRuntime;

/// An open file: refers to its inode, also when the file is renamed. The caller keeps the offsets.
#[pyclass(module = "threefs._native", frozen)]
pub struct File {
    live: Arc<ClientRuntime>,
    handle: FileHandle,
}

impl File {
    pub(crate) fn new(live: Arc<ClientRuntime>, handle: FileHandle) -> Self {
        Self { live, handle }
    }
}

#[pymethods]
impl File {
    #[getter]
    fn inode(&self) -> u64 {
        self.handle.inode.0
    }

    fn size(&self, py: Python<'_>) -> PyResult<u64> {
        self.live.wait(py, self.live.client.length(&self.handle))
    }

    fn truncate(&self, py: Python<'_>, size: u64) -> PyResult<()> {
        self.live.wait(py, self.live.client.set_length(&self.handle, size))
    }

    fn write(&self, py: Python<'_>, offset: u64, data: &Bound<'_, PyAny>) -> PyResult<usize> {
        let view = View::readable(data)?;
        let length = view.len();
        let views = BorrowedViews::default();
        let payload = views.lend(view);
        let result = self.live.wait(py, self.live.client.write_at(&self.handle, offset, payload));
        py.detach(|| views.wait_for_release());
        result.map(|()| length)
    }

    fn read_into(&self, py: Python<'_>, offset: u64, out: &Bound<'_, PyAny>) -> PyResult<usize> {
        let mut view = View::writable(out)?;
        let buffer_bytes = view.len() as u64;
        let plan = self
            .live
            .wait(py, self.live.client.plan_read_at(&self.handle, offset, buffer_bytes))?;
        let length = plan.lengths().first().copied().unwrap_or(0);
        self.live.wait(py, self.live.client.read_planned(plan, &mut [view.as_mut_slice()]))?;
        Ok(length)
    }
}
