//! Record of a scrub's progress in the folder of its store, so that a restart continues the pass.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use threefs_core::scrub::Progress;

/// Name of the file.
pub(super) const FILE: &str = "scrub.json";

/// The recorded progress; `None` if there is none that can be used.
pub(super) fn read(file: &Path) -> Option<Progress> {
    let text = match fs::read(file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => {
            tracing::warn!("cannot read {file:?}: {error}; the scrub starts from the beginning");
            return None;
        }
    };
    serde_json::from_slice(&text)
        .inspect_err(|error| {
            tracing::warn!("{file:?} is damaged: {error}; the scrub starts from the beginning");
        })
        .ok()
}

/// Replaces the record.
pub(super) fn write(file: &Path, progress: &Progress) -> io::Result<()> {
    let temporary = file.with_extension("tmp");
    let mut output = File::create(&temporary)?;
    output.write_all(&serde_json::to_vec(progress).map_err(io::Error::other)?)?;
    output.sync_all()?;
    fs::rename(temporary, file)
}
