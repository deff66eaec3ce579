//! Numbers from Python into the engine's types, or a ValueError that names the value.

use std::time::Duration;

use hfreduce_engine::{Buffer, DType, ReduceOp};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A time-out in seconds.
pub fn seconds(value: f64) -> PyResult<Duration> {
    if value.is_nan() || value < 0.0 {
        return Err(PyValueError::new_err(format!(
            "timeout_seconds {value} is not a time; give a number from 0 on"
        )));
    }
    Ok(Duration::try_from_secs_f64(value).unwrap_or(Duration::MAX))
}

/// An element type.
pub fn dtype(code: u8) -> PyResult<DType> {
    DType::from_code(code).ok_or_else(|| {
        PyValueError::new_err(format!("dtype {code} does not exist; use FLOAT32 and its like"))
    })
}

/// A reduction.
pub fn op(code: u8) -> PyResult<ReduceOp> {
    ReduceOp::from_code(code).ok_or_else(|| {
        PyValueError::new_err(format!("op {code} does not exist; use SUM and its like"))
    })
}

/// Memory of the caller, (address, elements) each.
pub fn buffers(pieces: impl IntoIterator<Item = (usize, usize)>, dtype: DType) -> PyResult<Buffer> {
    let mut ranges = Vec::new();
    for (pointer, numel) in pieces {
        let bytes =
            numel.checked_mul(dtype.size_bytes()).filter(|bytes| *bytes <= isize::MAX as usize);
        let Some(bytes) = bytes else {
            return Err(PyValueError::new_err(format!("{numel} elements are too many")));
        };
        if pointer == 0 && bytes > 0 {
            return Err(PyValueError::new_err(format!("a null pointer for {numel} elements")));
        }
        ranges.push((std::ptr::with_exposed_provenance_mut(pointer), bytes));
    }
    // SAFETY: the Python interface demands it of its callers: every buffer stays alive and
    // untouched until its work has ended.
    Ok(unsafe { Buffer::new(ranges) })
}

/// Where blocks of several ranks lie: one behind the other, or (address, elements) each.
#[derive(FromPyObject)]
pub enum Place {
    One(usize),
    Many(Vec<(usize, usize)>),
}

impl Place {
    /// Its memory: `numel` elements if it is one range; the engine checks the sum of several.
    pub fn buffer(self, numel: usize, dtype: DType) -> PyResult<Buffer> {
        match self {
            Self::One(pointer) => buffer(pointer, numel, dtype),
            Self::Many(pieces) => buffers(pieces, dtype),
        }
    }
}

/// One buffer.
pub fn buffer(pointer: usize, numel: usize, dtype: DType) -> PyResult<Buffer> {
    buffers([(pointer, numel)], dtype)
}
