//! Validation of submissions. A caller can write anything into its ring, also while the daemon
//! reads it: the daemon copies a submission once, checks the copy, and uses only the copy.

use rustix::io::Errno;

use crate::entry::Submission;

/// Access with which a file was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The file is open for reading.
    pub read: bool,
    /// The file is open for writing.
    pub write: bool,
}

/// What a ring was registered for.
#[derive(Clone, Copy, Debug)]
pub struct RingTerms {
    /// Number of entries.
    pub entries: u32,
    /// The ring is for reads; otherwise for writes.
    pub for_read: bool,
}

/// Registered memory.
#[derive(Clone, Copy, Debug)]
pub struct RegionTerms {
    /// Size in bytes.
    pub bytes: u64,
    /// No I/O may cross a multiple of this; 0 for no such limit.
    pub block: u64,
}

/// A registered file.
#[derive(Clone, Copy, Debug)]
pub struct FileTerms {
    /// Access of its descriptor.
    pub access: Access,
}

/// A valid submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checked {
    /// Offset in the memory.
    pub memory_offset: u64,
    /// Offset in the file.
    pub file_offset: u64,
    /// Bytes, at least 1.
    pub length: u64,
}

/// Checks a submission against the memory and the file that it names, if they are registered.
///
/// # Errors
/// `EINVAL`: a slot outside the ring, unknown memory, a range outside the memory or across a block,
/// a length of 0. `EBADF`: an unknown file. `EACCES`: the file is not open for this. `EFBIG`: a
/// range that no file can have.
pub fn check(
    entry: &Submission,
    ring: RingTerms,
    region: Option<RegionTerms>,
    file: Option<FileTerms>,
) -> Result<Checked, Errno> {
    let Submission { slot, reserved, memory_offset, file_offset, length, .. } = *entry;
    let region = region.ok_or(Errno::INVAL)?;
    let memory_end = memory_offset.checked_add(length).ok_or(Errno::INVAL)?;
    if slot >= ring.entries || reserved != 0 || length == 0 || memory_end > region.bytes {
        return Err(Errno::INVAL);
    }
    if region.block != 0 && memory_offset / region.block != (memory_end - 1) / region.block {
        return Err(Errno::INVAL);
    }
    let access = file.ok_or(Errno::BADF)?.access;
    if !(if ring.for_read { access.read } else { access.write }) {
        return Err(Errno::ACCESS);
    }
    let file_end = file_offset.checked_add(length).ok_or(Errno::FBIG)?;
    if i64::try_from(file_end).is_err() {
        return Err(Errno::FBIG);
    }
    Ok(Checked { memory_offset, file_offset, length })
}
