//! Rings: memory, files and I/O through the library of `hf3fs_usrbio.h`.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use hf3fs_api_shared::{Done, Memory, Ring, RingOptions, Session};
use pyo3::exceptions::{PyIndexError, PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PySlice;

use crate::buffer::View;

/// How often a wait checks for pending signals of the interpreter (Ctrl-C).
const SIGNAL_PACE: Duration = Duration::from_millis(100);
/// Results of one call of `wait` without a number.
const RESULTS_DEFAULT: usize = 1;

fn os_error(error: rustix::io::Errno) -> PyErr {
    let number = error.raw_os_error();
    PyOSError::new_err((number, std::io::Error::from_raw_os_error(number).to_string()))
}

/// Register a descriptor of a file in a mount of 3FS for rings.
#[pyfunction]
#[pyo3(signature = (fd, flags = 0))]
pub fn register_fd(py: Python<'_>, fd: i32, flags: u64) -> PyResult<()> {
    let _ = flags;
    py.detach(|| hf3fs_api_shared::register(fd)).map(drop).map_err(os_error)
}

/// End the registration of a descriptor.
#[pyfunction]
pub fn deregister_fd(py: Python<'_>, fd: i32) {
    py.detach(|| hf3fs_api_shared::deregister(fd));
}

/// The mount point of 3FS that contains a path; None if there is none.
#[pyfunction]
pub fn extract_mount_point(py: Python<'_>, path: PathBuf) -> Option<OsString> {
    py.detach(|| hf3fs_api_shared::extract_mount_point(&path)).map(PathBuf::into_os_string)
}

/// A range of shared memory, and the result of an I/O with it.
#[pyclass(frozen, module = "hf3fs_fuse.io", name = "iovec")]
pub struct RingMemory {
    memory: Arc<Memory>,
    offset: usize,
    length: usize,
    result: i64,
    userdata: Option<Py<PyAny>>,
}

#[pymethods]
impl RingMemory {
    /// Register shared memory: its name in /dev/shm, and its buffer.
    #[new]
    #[pyo3(signature = (name, buffer, hf3fs_mount_point, block_size = 0, numa = -1))]
    fn new(
        py: Python<'_>,
        name: &str,
        buffer: &Bound<'_, PyAny>,
        hf3fs_mount_point: PathBuf,
        block_size: usize,
        numa: i32,
    ) -> PyResult<Self> {
        // Not held: shared memory can be closed before its iovec is deleted, as with other
        // implementations. The address is used for its placement only.
        let (base, length) = {
            let mut view = View::writable(buffer)?;
            (view.as_mut_slice().as_mut_ptr() as usize, view.len())
        };
        let memory = py.detach(|| {
            let base = NonNull::new(base as *mut u8).ok_or(rustix::io::Errno::INVAL)?;
            let session = Session::of(&hf3fs_mount_point)?;
            let memory = Memory::share(session, name, base, length, block_size, numa)?;
            memory.register()?;
            Ok(memory)
        });
        let memory = Arc::new(memory.map_err(os_error)?);
        Ok(Self { memory, offset: 0, length, result: 0, userdata: None })
    }

    fn __len__(&self) -> usize {
        self.length
    }

    /// A part of the memory.
    fn __getitem__(&self, slice: &Bound<'_, PySlice>) -> PyResult<Self> {
        let length = isize::try_from(self.length).unwrap_or(isize::MAX);
        let part = slice.indices(length)?;
        if part.step != 1 {
            return Err(PyIndexError::new_err("a slice of memory must have a step of 1"));
        }
        let start = usize::try_from(part.start).unwrap_or(0);
        Ok(Self {
            memory: Arc::clone(&self.memory),
            offset: self.offset + start,
            length: part.slicelength,
            result: 0,
            userdata: None,
        })
    }

    /// Bytes that were read or written, or a negative errno.
    #[getter]
    fn result(&self) -> i64 {
        self.result
    }

    /// Offset of this range in the registered memory.
    #[getter]
    fn base_off(&self) -> usize {
        self.offset
    }

    /// Object that was passed to `prepare`.
    #[getter]
    fn userdata(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.userdata.as_ref().map(|userdata| userdata.clone_ref(py))
    }
}

/// I/Os that were prepared and not returned yet, by the number that the ring keeps for each.
#[derive(Default)]
struct PendingIos {
    next: usize,
    ios: HashMap<usize, PendingIo>,
}

struct PendingIo {
    memory: Arc<Memory>,
    offset: usize,
    length: usize,
    userdata: Py<PyAny>,
}

/// A ring for reads or for writes.
#[pyclass(frozen, module = "hf3fs_fuse.io", name = "ioring")]
pub struct PyRing {
    ring: Ring,
    pending: Mutex<PendingIos>,
}

impl PyRing {
    fn pending(&self) -> MutexGuard<'_, PendingIos> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl PyRing {
    #[new]
    #[pyo3(signature = (
        hf3fs_mount_point, entries, for_read = true, io_depth = 0, priority = None, timeout = None,
        numa = -1, flags = 0
    ))]
    #[expect(clippy::too_many_arguments, reason = "the signature of other implementations")]
    fn new(
        py: Python<'_>,
        hf3fs_mount_point: PathBuf,
        entries: u32,
        for_read: bool,
        io_depth: i32,
        priority: Option<i32>,
        timeout: Option<i32>,
        numa: i32,
        flags: u64,
    ) -> PyResult<Self> {
        let _ = (priority, timeout);
        let ring = py.detach(|| {
            let depth = io_depth;
            let options = RingOptions::with_flags(entries, for_read, depth, numa, flags)?;
            Ring::create(Session::of(&hf3fs_mount_point)?, options)
        });
        Ok(Self { ring: ring.map_err(os_error)?, pending: Mutex::default() })
    }

    /// Maximum number of I/Os in flight.
    #[getter]
    fn entries(&self) -> u32 {
        self.ring.entries()
    }

    /// Prepare a read of a file into memory, or a write from it. Returns the ring.
    #[pyo3(signature = (iov, read, fd, off, userdata = None))]
    fn prepare<'py>(
        slf: &Bound<'py, Self>,
        iov: &RingMemory,
        read: bool,
        fd: i32,
        off: u64,
        userdata: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, Self>> {
        let this = slf.get();
        if read != this.ring.for_read() {
            let kind = if read { "read" } else { "write" };
            return Err(PyValueError::new_err(format!(
                "a {kind} in a ring for {}: make a separate ring with for_read={read}",
                if read { "writes" } else { "reads" }
            )));
        }
        let py = slf.py();
        let (memory, offset, length) = (Arc::clone(&iov.memory), iov.offset, iov.length);
        let userdata = userdata.unwrap_or_else(|| py.None());
        let prepared = py.detach(move || {
            let file = hf3fs_api_shared::registered(fd)?;
            // Locked: another thread may submit the I/O and take its completion at once.
            let mut pending = this.pending();
            let number = pending.next;
            this.ring.prepare(&memory, offset, &file, off, length as u64, number)?;
            pending.next = number.wrapping_add(1);
            pending.ios.insert(number, PendingIo { memory, offset, length, userdata });
            Ok(())
        });
        prepared.map_err(os_error)?;
        Ok(slf.clone())
    }

    /// Start what is prepared. Returns the ring.
    fn submit<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, Self>> {
        let this = slf.get();
        slf.py().detach(|| this.ring.submit()).map_err(os_error)?;
        Ok(slf.clone())
    }

    /// Wait for results: the memory of completed I/Os, with `result` and `userdata`.
    #[pyo3(signature = (*, max_results = 0, min_results = 0, timeout = None))]
    fn wait(
        &self,
        py: Python<'_>,
        max_results: usize,
        min_results: usize,
        timeout: Option<Duration>,
    ) -> PyResult<Vec<RingMemory>> {
        let room = max_results.max(min_results).max(RESULTS_DEFAULT);
        let deadline = timeout.map(|timeout| SystemTime::now() + timeout);
        let mut results = Vec::new();
        loop {
            let slice = SystemTime::now() + SIGNAL_PACE;
            let until = deadline.map_or(slice, |deadline| deadline.min(slice));
            let missing = min_results.saturating_sub(results.len());
            let mut done = vec![Done::default(); room - results.len()];
            let waited = py.detach(|| self.ring.wait(&mut done, missing, Some(until)));
            match waited {
                Ok(count) => {
                    let mut pending = self.pending();
                    results.extend(done.iter().take(count).filter_map(|done| {
                        let PendingIo { memory, offset, length, userdata } =
                            pending.ios.remove(&done.userdata)?;
                        let (result, userdata) = (done.result, Some(userdata));
                        Some(RingMemory { memory, offset, length, result, userdata })
                    }));
                }
                Err(error) if results.is_empty() => return Err(os_error(error)),
                // Results that were taken out of the ring are not lost.
                Err(_) => return Ok(results),
            }
            let over = deadline.is_some_and(|deadline| deadline <= SystemTime::now());
            if results.len() >= min_results || over {
                return Ok(results);
            }
            py.check_signals()?;
        }
    }

    /// Bytes of a ring with this number of entries.
    #[staticmethod]
    fn size_for_entries(entries: u32) -> usize {
        hf3fs_api_shared::ring_bytes(entries)
    }
}
