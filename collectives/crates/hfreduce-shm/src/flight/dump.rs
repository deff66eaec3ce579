//! Dumps of the flight recorder: JSON files.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, SystemTime};

use super::Snapshot;
use super::storage::private_folder;

/// Maximum number of dumps in a folder; the oldest are deleted.
const KEPT: usize = 128;
/// A folder that does not respond delays an error by at most this time.
const PATIENCE: Duration = Duration::from_secs(1);
const SUFFIX: &str = ".json";
const PREFIX: &str = "hfreduce-";

/// Writes a dump in a separate thread; returns its path, or none if it could not be written in
/// time.
pub fn write(folder: &Path, snapshot: Snapshot) -> Option<PathBuf> {
    let (sender, wait) = mpsc::channel();
    let folder = folder.to_owned();
    let write = move || {
        let _ = sender.send(write_now(&folder, &snapshot));
    };
    std::thread::Builder::new().name("hfreduce-dump".into()).spawn(write).ok()?;
    match wait.recv_timeout(PATIENCE) {
        Ok(Ok(path)) => Some(path),
        Ok(Err(error)) => {
            tracing::warn!(%error, "cannot write a dump of the flight recorder");
            None
        }
        Err(_) => None,
    }
}

fn write_now(folder: &Path, snapshot: &Snapshot) -> std::io::Result<PathBuf> {
    private_folder(folder)?;
    let pid = std::process::id();
    let name = format!("{PREFIX}{}-rank{}-{pid}", snapshot.group, snapshot.rank);
    let (whole, part) =
        (folder.join(format!("{name}{SUFFIX}")), folder.join(format!("{name}.part")));
    let mut file = std::fs::File::create(&part)?;
    file.write_all(&serde_json::to_vec(snapshot)?)?;
    // The file appears complete.
    std::fs::rename(&part, &whole)?;
    forget_the_oldest(folder);
    Ok(whole)
}

fn forget_the_oldest(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    let mut dumps: Vec<(SystemTime, PathBuf)> = entries
        .flatten()
        .filter(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.starts_with(PREFIX) && name.ends_with(SUFFIX)
        })
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    dumps.sort();
    let over = dumps.len().saturating_sub(KEPT);
    for (_, path) in &dumps[..over] {
        let _ = std::fs::remove_file(path);
    }
}
