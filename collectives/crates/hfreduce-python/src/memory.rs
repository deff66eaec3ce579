//! Registered memory as a Python object with the buffer protocol.

use std::ffi::c_int;

use hfreduce_engine::Block;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Zeroed memory that the ranks of this machine read and write in place. It is freed with its last
/// view.
#[pyclass(module = "hfreduce._native", frozen)]
pub struct Registered {
    block: Block,
}

impl Registered {
    pub(crate) fn new(block: Block) -> Self {
        Self { block }
    }
}

#[pymethods]
impl Registered {
    #[getter]
    fn address(&self) -> usize {
        self.block.base().expose_provenance()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.block.bytes()
    }

    fn __len__(&self) -> usize {
        self.block.bytes()
    }

    /// # Safety
    /// Python's: `view` is writable.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let (base, bytes) = (slf.get().block.base(), slf.get().block.bytes() as isize);
        // SAFETY: the block is valid as long as this object, of which the view takes a reference.
        let filled =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), base.cast(), bytes, 0, flags) };
        if filled == 0 {
            return Ok(());
        }
        Err(PyErr::take(slf.py())
            .unwrap_or_else(|| PyBufferError::new_err("registered memory cannot be viewed so")))
    }
}
