//! Memory of Python objects, borrowed through the buffer protocol without a copy.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

/// A contiguous view of an object's bytes, of any element type. The object cannot free or resize
/// them while this exists.
pub(crate) struct View(Box<ffi::Py_buffer>);

// SAFETY: a `Py_buffer` is a pointer with counts; the exporter keeps the memory valid until it is
// released, and `Drop` attaches to the interpreter to release it, from whichever thread.
unsafe impl Send for View {}
// SAFETY: as above; sharing gives read access to plain bytes only.
unsafe impl Sync for View {}

impl View {
    /// Borrows for reading.
    pub(crate) fn readable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::get(object, ffi::PyBUF_SIMPLE)
    }

    /// Borrows for writing; read-only objects are rejected.
    pub(crate) fn writable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::get(object, ffi::PyBUF_WRITABLE)
    }

    fn get(object: &Bound<'_, PyAny>, flags: std::ffi::c_int) -> PyResult<Self> {
        let mut buffer = Box::new(ffi::Py_buffer::new());
        // SAFETY: the object is alive and we are attached; `buffer` is local.
        let status = unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &mut *buffer, flags) };
        if status != 0 {
            return Err(PyErr::take(object.py()).unwrap_or_else(|| {
                PyBufferError::new_err("the object does not provide contiguous bytes")
            }));
        }
        Ok(Self(buffer))
    }

    /// Whether two of the views share a byte: they must not be written concurrently.
    pub(crate) fn overlap(views: &[View]) -> bool {
        let mut ranges: Vec<(usize, usize)> = views
            .iter()
            .filter(|view| view.len() > 0)
            .map(|view| (view.0.buf as usize, view.0.buf as usize + view.len()))
            .collect();
        ranges.sort_unstable();
        ranges.windows(2).any(|pair| pair[0].1 > pair[1].0)
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        usize::try_from(self.0.len).unwrap_or(0)
    }

    /// The bytes. Changing them concurrently from another thread results in torn bytes in the file,
    /// as with `os.write`.
    pub(crate) fn as_slice(&self) -> &[u8] {
        if self.len() == 0 {
            return &[];
        }
        // SAFETY: PyBUF_SIMPLE promises `len` contiguous bytes at `buf` until release.
        unsafe { std::slice::from_raw_parts(self.0.buf.cast(), self.len()) }
    }

    /// The bytes, for writing.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        if self.len() == 0 {
            return &mut [];
        }
        // SAFETY: as `as_slice`; only views made by `writable` are asked for it.
        unsafe { std::slice::from_raw_parts_mut(self.0.buf.cast(), self.len()) }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // Without an interpreter, the exporter does not exist, and the buffer needs no release.
        let _ = Python::try_attach(|_py| {
            // SAFETY: attached, and filled by a successful `PyObject_GetBuffer`; released once.
            unsafe { ffi::PyBuffer_Release(&mut *self.0) }
        });
    }
}

/// Views borrowed by a write as its payload. Network threads may hold on to a view for a moment
/// after the reply; the caller must find its buffers free when the write returns.
#[derive(Default)]
pub(crate) struct BorrowedViews(Arc<()>);

/// Timeout of [`BorrowedViews::wait_for_release`]: an abandoned attempt may hold its payload for
/// longer, which is harmless, because the receiver verifies its checksum.
const RETURN_WAIT: Duration = Duration::from_millis(100);

impl BorrowedViews {
    /// The view as a payload, without a copy.
    pub(crate) fn lend(&self, view: View) -> Bytes {
        Bytes::from_owner(LentView { view, _lending: Arc::clone(&self.0) })
    }

    /// Waits, up to a time limit, until all payloads are released. Must be called detached:
    /// releasing a view needs the interpreter.
    pub(crate) fn wait_for_release(&self) {
        let started = Instant::now();
        while Arc::strong_count(&self.0) > 1 && started.elapsed() < RETURN_WAIT {
            std::thread::yield_now();
        }
    }
}

struct LentView {
    view: View,
    // After the view: counted out once the view is released.
    _lending: Arc<()>,
}

impl AsRef<[u8]> for LentView {
    fn as_ref(&self) -> &[u8] {
        self.view.as_slice()
    }
}
