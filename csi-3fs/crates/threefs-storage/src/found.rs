//! Inspection of a path of the service: a disk, a folder for a new one, or nothing. Blocks; a mount
//! that hangs may block forever, so each path is looked at on a separate thread.
//!
//! ```text
//! identity.json   version, node and random id of the disk
//! cluster         the cluster of its data
//! adopt           mark of a folder that is not a file system: a new disk may use it
//! ```

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use threefs_core::disks::{DiskId, DiskIdentity, Found};
use threefs_core::heartbeat::DataFolder;
use threefs_core::ids::NodeId;

use crate::identity;

const FILE: &str = "identity.json";
const DRAFT: &str = "identity.draft";
const MARK: &str = "adopt";
/// Folder that a new ext4 has.
const LOST_AND_FOUND: &str = "lost+found";
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct IdentityJson {
    version: u32,
    node: NodeId,
    disk: DiskId,
}

/// Looks at a path.
pub(crate) fn look(path: &Path) -> Found {
    inspect(path).unwrap_or_else(|error| Found::Unknown(error.to_string()))
}

/// Checks that the disk at a path is this one. Otherwise a store could be created in the folder
/// below a lost mount.
///
/// # Errors
/// It is another one, or cannot be read.
pub(crate) fn check(path: &Path, disk: &DiskId) -> io::Result<()> {
    match look(path) {
        Found::Disk(there) if there.disk == *disk => Ok(()),
        Found::Disk(there) => Err(io::Error::other(format!("disk {} is there", there.disk.0))),
        Found::New => Err(io::Error::other("the disk was removed")),
        Found::Unknown(reason) | Found::Nothing(reason) => Err(io::Error::other(reason)),
    }
}

/// Writes the identity of a new disk, durably.
///
/// # Errors
/// It cannot be written.
pub(crate) fn adopt(path: &Path, node: NodeId) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let disk = DiskId(format!("{:032x}", rand::random::<u128>()));
    let written = IdentityJson { version: VERSION, node, disk };
    identity::replace(path, DRAFT, FILE, &serde_json::to_vec(&written)?)?;
    tracing::info!("disk {} at {path:?} now belongs to {node}", written.disk.0);
    Ok(())
}

/// Writes the identity of a data folder that has data and none, from a release without identities: it
/// is the first disk of its service.
///
/// # Errors
/// The folder cannot be read or written.
pub(crate) fn claim_first(path: &Path, node: NodeId) -> io::Result<()> {
    if fs::exists(path.join(FILE))? || identity::read(path)? == DataFolder::Empty {
        return Ok(());
    }
    adopt(path, node)
}

/// Creates the folder of a service that has only this one, and marks it if it is empty: whatever is
/// mounted there is the first disk or a new one.
///
/// # Errors
/// It cannot be created, read or written.
pub(crate) fn prepare_only(path: &Path, node: NodeId) -> io::Result<()> {
    fs::create_dir_all(path)?;
    claim_first(path, node)?;
    if !fs::exists(path.join(FILE))? {
        fs::write(path.join(MARK), "")?;
    }
    Ok(())
}

fn inspect(path: &Path) -> io::Result<Found> {
    let text = match fs::read_to_string(path.join(FILE)) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return without_identity(path),
        Err(error) => return Err(error),
    };
    let IdentityJson { version, node, disk } = serde_json::from_str(&text).map_err(|error| {
        let remedy = "empty the disk, then it is synced from the other replicas";
        io::Error::other(format!("`{FILE}` is damaged: {error}; {remedy}"))
    })?;
    if version != VERSION {
        let reason = format!("`{FILE}` has version {version}; this release reads {VERSION}");
        return Err(io::Error::other(reason));
    }
    let cluster = match identity::read(path)? {
        DataFolder::Of(cluster) => Some(cluster),
        DataFolder::Empty | DataFolder::Unmarked => None,
    };
    Ok(Found::Disk(DiskIdentity { disk, node, cluster }))
}

/// A new disk is an empty file system that is mounted at the path or its parent, or an empty folder
/// with the mark. Another empty folder may be where a disk was mounted: a store there would fill the
/// file system below it.
fn without_identity(path: &Path) -> io::Result<Found> {
    let exists = fs::exists(path)?;
    if exists {
        for entry in fs::read_dir(path)? {
            let name = entry?.file_name();
            if name != LOST_AND_FOUND && name != DRAFT && name != MARK {
                let reason = format!("the folder has `{}` and no identity", name.display());
                return Ok(Found::Nothing(reason));
            }
        }
    }
    let is_new = exists && (fs::exists(path.join(MARK))? || is_mount_point(path)?);
    if is_new || is_new_file_system_above(path)? {
        return Ok(Found::New);
    }
    Ok(Found::Nothing("no file system is mounted there".into()))
}

/// Whether the folder of a path is a file system with nothing but the path.
fn is_new_file_system_above(path: &Path) -> io::Result<bool> {
    let Some(parent) = path.parent() else { return Ok(false) };
    if !fs::exists(parent)? || !is_mount_point(parent)? {
        return Ok(false);
    }
    for entry in fs::read_dir(parent)? {
        let name = entry?.file_name();
        if name != LOST_AND_FOUND && Some(name.as_os_str()) != path.file_name() {
            return Ok(false);
        }
    }
    Ok(true)
}

fn is_mount_point(path: &Path) -> io::Result<bool> {
    Ok(fs::metadata(path)?.dev() != fs::metadata(path.join(".."))?.dev())
}

#[cfg(test)]
mod tests {
    use threefs_core::ids::ClusterId;

    use super::*;

    #[test]
    fn an_adopted_disk_is_recognized_at_another_path() {
        let folder = tempfile::tempdir().unwrap();
        let (old, new) = (folder.path().join("a"), folder.path().join("b"));
        adopt(&old, NodeId(2_000_003)).unwrap();
        identity::write(&old, ClusterId(7)).unwrap();
        let Found::Disk(disk) = look(&old) else { panic!("{:?}", look(&old)) };
        assert_eq!((disk.node, disk.cluster), (NodeId(2_000_003), Some(ClusterId(7))));
        fs::rename(&old, &new).unwrap();
        assert_eq!(look(&new), Found::Disk(disk.clone()));
        check(&new, &disk.disk).unwrap();
        check(&old, &disk.disk).unwrap_err();
        adopt(&old, NodeId(3)).unwrap();
        let other = check(&old, &disk.disk).unwrap_err().to_string();
        assert!(other.ends_with("is there"), "{other}");
    }

    /// The identity that `threefs-service` writes.
    #[test]
    fn a_data_folder_of_an_earlier_release_is_the_first_disk() {
        let folder = tempfile::tempdir().unwrap();
        let text = r#"{"version": 1, "node": 3, "disk": "0a1b-2c"}"#;
        fs::write(folder.path().join(FILE), text).unwrap();
        prepare_only(folder.path(), NodeId(9)).unwrap();
        let Found::Disk(disk) = look(folder.path()) else { panic!() };
        assert_eq!((disk.node, disk.disk), (NodeId(3), DiskId("0a1b-2c".into())));
    }

    #[test]
    fn a_first_folder_with_targets_and_without_an_identity_is_claimed() {
        let folder = tempfile::tempdir().unwrap();
        claim_first(folder.path(), NodeId(9)).unwrap();
        assert!(matches!(look(folder.path()), Found::Nothing(_)), "it is empty");
        fs::create_dir(folder.path().join("target-1")).unwrap();
        claim_first(folder.path(), NodeId(9)).unwrap();
        let Found::Disk(disk) = look(folder.path()) else { panic!() };
        assert_eq!(disk.node, NodeId(9));
    }

    #[test]
    fn only_an_empty_folder_with_the_mark_is_new() {
        let folder = tempfile::tempdir().unwrap();
        let reason = |found| match found {
            Found::Nothing(reason) => reason,
            found => panic!("{found:?}"),
        };
        assert!(reason(look(folder.path())).contains("no file system is mounted"));
        let missing = folder.path().join("missing");
        assert!(reason(look(&missing)).contains("no file system is mounted"));
        assert!(reason(look(&missing.join("storage"))).contains("no file system is mounted"));
        fs::write(folder.path().join(MARK), "").unwrap();
        assert_eq!(look(folder.path()), Found::New);
        fs::write(folder.path().join("cluster"), "").unwrap();
        assert!(reason(look(folder.path())).contains("`cluster` and no identity"));
    }

    #[test]
    fn an_identity_that_cannot_be_read_proves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["", "{}", r#"{"version": 2, "node": 3, "disk": "x"}"#, "\u{0}"] {
            fs::write(folder.path().join(FILE), text).unwrap();
            let Found::Unknown(reason) = look(folder.path()) else { panic!("{text}") };
            assert!(reason.contains(FILE), "{reason}");
        }
    }
}
