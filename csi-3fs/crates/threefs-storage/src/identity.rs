//! Identity of a storage process: the cluster of its data folder, and its incarnation.
//!
//! The cluster id is written to a file next to the targets once, after mgmtd has registered the
//! node and before the first target is created, and sent with every heartbeat. A node with data of
//! one cluster does not join another, and an mgmtd that has lost its store does not create new
//! chains over existing data.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use rand::TryRngCore;
use threefs_core::heartbeat::DataFolder;
use threefs_core::ids::{ClusterId, Incarnation};

const FILE: &str = "cluster";
const DRAFT: &str = "cluster.draft";
const TARGETS: &str = "target-";

/// Reads the identity of a data folder.
///
/// # Errors
/// The folder or the file cannot be read, or the file holds no cluster id.
pub(crate) fn read(data: &Path) -> io::Result<DataFolder> {
    match fs::read_to_string(data.join(FILE)) {
        Ok(text) => u128::from_str_radix(text.trim(), 16)
            .map(|number| DataFolder::Of(ClusterId(number)))
            .map_err(|error| {
                io::Error::other(format!("`{FILE}` does not hold a cluster id: {error}"))
            }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            for entry in fs::read_dir(data)? {
                if entry?.file_name().to_string_lossy().starts_with(TARGETS) {
                    return Ok(DataFolder::Unmarked);
                }
            }
            Ok(DataFolder::Empty)
        }
        Err(error) => Err(error),
    }
}

/// Writes the cluster id to a data folder, durably.
///
/// # Errors
/// It cannot be written.
pub(crate) fn write(data: &Path, cluster: ClusterId) -> io::Result<()> {
    let text = format!("{:032x}\n", cluster.0);
    replace(data, DRAFT, FILE, text.as_bytes())
}

/// Replaces a file of a folder, durably: after a crash it has the former content or the new one.
///
/// # Errors
/// It cannot be written.
pub(crate) fn replace(folder: &Path, draft: &str, name: &str, content: &[u8]) -> io::Result<()> {
    let draft = folder.join(draft);
    let mut file = File::create(&draft)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(draft, folder.join(name))?;
    File::open(folder)?.sync_all()
}

/// Draws the incarnation of a process or of an open store. From the operating system's generator,
/// because incarnations must be unique.
pub(crate) fn draw_incarnation() -> Incarnation {
    let mut bytes = [0; 8];
    if rand::rngs::OsRng.try_fill_bytes(&mut bytes).is_err() {
        // Without entropy: the time at least differs between incarnations.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        return Incarnation(now.map_or(1, |elapsed| elapsed.as_nanos() as u64));
    }
    Incarnation(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_empty_then_unmarked_then_of_its_cluster() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read(folder.path()).unwrap(), DataFolder::Empty);
        fs::create_dir(folder.path().join("target-1")).unwrap();
        assert_eq!(read(folder.path()).unwrap(), DataFolder::Unmarked);
        write(folder.path(), ClusterId(u128::MAX - 5)).unwrap();
        assert_eq!(read(folder.path()).unwrap(), DataFolder::Of(ClusterId(u128::MAX - 5)));
        fs::write(folder.path().join(FILE), "no number").unwrap();
        assert!(
            read(folder.path()).unwrap_err().to_string().contains("does not hold a cluster id")
        );
    }
}
