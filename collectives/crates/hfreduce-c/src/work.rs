//! Handles of operations.

use hfreduce_engine::{CollectiveError, WaitError, Work as EngineWork};

use crate::conversions::{put, seconds};
use crate::error::{Failure, Status, guard};

/// `hfr_work`.
pub struct Work {
    engine: EngineWork,
}

/// Returns the handle to the caller, or waits if `work` is null.
///
/// # Safety
/// `work` is null or writable.
pub(crate) unsafe fn deliver(
    result: Result<EngineWork, CollectiveError>,
    work: *mut *mut Work,
) -> Result<(), Failure> {
    let engine = result?;
    if work.is_null() {
        return ended(engine.wait(None));
    }
    // SAFETY: just checked, and guaranteed by the caller.
    unsafe { put("work", work, Box::into_raw(Box::new(Work { engine }))) }
}

fn ended(result: Result<(), WaitError>) -> Result<(), Failure> {
    result.map_err(|error| match error {
        WaitError::Failed(error) => error.into(),
        running @ WaitError::StillRunning { .. } => Failure::still_running(running.to_string()),
    })
}

/// # Safety
/// `work` is null or was not freed.
unsafe fn live<'a>(work: *const Work) -> Result<&'a Work, Failure> {
    // SAFETY: guaranteed by the caller.
    unsafe { work.as_ref() }.ok_or_else(|| Failure::invalid("work is NULL"))
}

/// See the header.
///
/// # Safety
/// `work` is null or was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_work_wait(work: *mut Work, timeout_seconds: f64) -> Status {
    guard(|| {
        // SAFETY: guaranteed by the caller.
        let work = unsafe { live(work) }?;
        ended(work.engine.wait(Some(seconds("timeout_seconds", timeout_seconds)?)))
    })
}

/// See the header.
///
/// # Safety
/// `work` is null or was not freed; `done` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_work_done(work: *const Work, done: *mut i32) -> Status {
    // SAFETY: guaranteed by the caller.
    guard(|| unsafe { put("done", done, i32::from(live(work)?.engine.is_done())) })
}

/// See the header.
///
/// # Safety
/// `work` is null or was not freed; no other call uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_work_free(work: *mut Work) {
    guard(|| {
        if !work.is_null() {
            // SAFETY: guaranteed by the caller: this library made it, and no other call uses it.
            drop(unsafe { Box::from_raw(work) });
        }
        Ok(())
    });
}
