//! Numbers from Python into the engine's types, or a ValueError that names the value.

use std::time::Duration;

use hfreduce_device::Range;
use hfreduce_engine::{Buffer, DType, ReduceOp};
use pyo3::exceptions::{PyTypeError, PyValueError};
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

/// Addresses of the blocks of several ranks: contiguous, or (address, elements) each.
#[derive(FromPyObject)]
pub enum Place {
    One(usize),
    Many(Vec<(usize, usize)>),
}

impl Place {
    /// Its memory on the host: `numel` elements if it is one range. The engine checks the total of
    /// several.
    pub fn buffer(self, numel: usize, dtype: DType) -> PyResult<Buffer> {
        let range = |(pointer, numel)| {
            let bytes = bytes(pointer, numel, dtype)?;
            Ok((std::ptr::with_exposed_provenance_mut(pointer), bytes))
        };
        // SAFETY: the Python interface demands it of its callers: every buffer stays alive and
        // untouched until its work has ended.
        Ok(unsafe {
            match self {
                Self::One(pointer) => Buffer::new([range((pointer, numel))?]),
                Self::Many(pieces) => {
                    Buffer::new(pieces.into_iter().map(range).collect::<PyResult<Vec<_>>>()?)
                }
            }
        })
    }

    /// Its memory on a GPU.
    pub fn range(self, numel: usize, dtype: DType) -> PyResult<Range> {
        match self {
            Self::One(pointer) => {
                Ok(Range { pointer: pointer as u64, bytes: bytes(pointer, numel, dtype)? })
            }
            Self::Many(_) => Err(PyTypeError::new_err("blocks in a GPU's memory are contiguous")),
        }
    }
}

fn bytes(pointer: usize, numel: usize, dtype: DType) -> PyResult<usize> {
    let bytes = numel.checked_mul(dtype.size_bytes()).filter(|bytes| *bytes <= isize::MAX as usize);
    match bytes {
        None => Err(PyValueError::new_err(format!("{numel} elements are too many"))),
        Some(bytes) if pointer == 0 && bytes > 0 => {
            Err(PyValueError::new_err(format!("a null pointer for {numel} elements")))
        }
        Some(bytes) => Ok(bytes),
    }
}
