//! The cluster that a data folder belongs to: a small file beside the targets.
//!
//! It is written once, when mgmtd has registered the node and before the first target is made, and
//! sent with every heartbeat. A node with the data of one cluster takes no part in another, and no
//! mgmtd that has lost its store makes new chains over the data of the old ones.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use threefs_core::heartbeat::DataFolder;
use threefs_core::ids::ClusterId;

const FILE: &str = "cluster";
const DRAFT: &str = "cluster.draft";
const TARGETS: &str = "target-";

/// What is known of a data folder.
///
/// # Errors
/// The folder or the file cannot be read, or the file holds no cluster.
pub(crate) fn read(data: &Path) -> io::Result<DataFolder> {
    match fs::read_to_string(data.join(FILE)) {
        Ok(text) => u128::from_str_radix(text.trim(), 16)
            .map(|number| DataFolder::Of(ClusterId(number)))
            .map_err(|error| io::Error::other(format!("`{FILE}` holds no cluster id: {error}"))),
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

/// Marks a data folder, durably.
///
/// # Errors
/// It cannot be written.
pub(crate) fn write(data: &Path, cluster: ClusterId) -> io::Result<()> {
    let draft = data.join(DRAFT);
    let mut file = File::create(&draft)?;
    file.write_all(format!("{:032x}\n", cluster.0).as_bytes())?;
    file.sync_all()?;
    fs::rename(draft, data.join(FILE))?;
    File::open(data)?.sync_all()
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
        assert!(read(folder.path()).unwrap_err().to_string().contains("no cluster id"));
    }
}
