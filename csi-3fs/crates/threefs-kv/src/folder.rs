//! Folder of an embedded store: its owner, its names on the disk, and a load that was interrupted.

use std::fs::File;
use std::path::Path;

use crate::KvError;

/// LMDB's file in the folder of a store.
pub(crate) const ROWS_FILE: &str = "data.mdb";
/// Folder that a load fills before its file is moved into place.
pub(crate) const LOADING: &str = "loading";

/// Refuses a folder that a load has filled partially.
pub(crate) fn check_loaded(path: &Path) -> Result<(), KvError> {
    if !path.join(LOADING).exists() || path.join(ROWS_FILE).exists() {
        return Ok(());
    }
    let detail = "a load of a dump into this folder was interrupted; repeat it, for example `threefs meta load`";
    Err(KvError::broken(path, detail))
}

/// Refuses a folder without a store.
pub(crate) fn check_exists(path: &Path) -> Result<(), KvError> {
    if path.join(ROWS_FILE).is_file() {
        return Ok(());
    }
    Err(KvError::broken(path, "the folder has no store; name the one with data.mdb"))
}

/// The lock of a folder, until dropped.
#[derive(Debug)]
pub(crate) struct Ownership(File);

impl Drop for Ownership {
    fn drop(&mut self) {
        // A child process that another thread started holds the descriptor until it executes its
        // program, so closing it here may not end the lock. Unlocking fails for no valid descriptor.
        let _ = rustix::fs::flock(&self.0, rustix::fs::FlockOperation::Unlock);
    }
}

/// Locks the folder for this process.
pub(crate) fn take_ownership(path: &Path) -> Result<Ownership, KvError> {
    let broken = |detail: String| KvError::broken(path, detail);
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path.join("owner.lock"))
        .map_err(|error| broken(error.to_string()))?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(
        |error| match error {
            rustix::io::Errno::WOULDBLOCK => {
                broken("another process holds the folder; stop it, or use another folder".into())
            }
            error => broken(error.to_string()),
        },
    )?;
    Ok(Ownership(file))
}

/// Syncs the folder, so that the names of its files survive a power failure.
pub(crate) fn sync_folder(path: &Path) -> std::io::Result<()> {
    File::open(path)?.sync_all()?;
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => File::open(parent)?.sync_all(),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::take_ownership;

    #[test]
    fn a_descriptor_in_a_child_process_does_not_keep_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let owner = take_ownership(folder.path()).unwrap();
        let of_child = owner.0.try_clone().unwrap();
        assert!(take_ownership(folder.path()).is_err());
        drop(owner);
        take_ownership(folder.path()).unwrap();
        drop(of_child);
    }
}
