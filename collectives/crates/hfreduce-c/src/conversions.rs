//! Conversion of single C values: outputs, times and texts.

use std::ffi::{CStr, c_char};
use std::time::Duration;

use crate::error::Failure;

/// # Safety
/// `to` is null or writable.
pub(crate) unsafe fn put<T>(name: &str, to: *mut T, value: T) -> Result<(), Failure> {
    if to.is_null() {
        return Err(Failure::invalid(format!("{name} is NULL")));
    }
    // SAFETY: just checked, and guaranteed by the caller.
    unsafe { to.write(value) };
    Ok(())
}

pub(crate) fn seconds(name: &str, value: f64) -> Result<Duration, Failure> {
    if value.is_nan() || value < 0.0 {
        return Err(Failure::invalid(format!("{name} is {value}: expected 0 or more seconds")));
    }
    Ok(Duration::try_from_secs_f64(value).unwrap_or(Duration::MAX))
}

/// # Safety
/// `value` is null or text that ends with a null byte and is valid during the call.
pub(crate) unsafe fn text<'a>(
    name: &str,
    value: *const c_char,
) -> Result<Option<&'a str>, Failure> {
    if value.is_null() {
        return Ok(None);
    }
    // SAFETY: just checked, and guaranteed by the caller.
    let text = unsafe { CStr::from_ptr(value) }.to_str();
    let text = text.map_err(|_| Failure::invalid(format!("{name} is not UTF-8")))?;
    Ok(Some(text).filter(|text| !text.is_empty()))
}
