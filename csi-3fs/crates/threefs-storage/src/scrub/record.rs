//! Record of a scrub's progress in the folder of its store, so that a restart continues the pass.

use std::fs;
use std::io;
use std::path::Path;

use threefs_core::scrub::Progress;

use crate::identity::replace;

/// Name of the file.
pub(super) const FILE: &str = "scrub.json";
const DRAFT: &str = "scrub.tmp";

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

/// Replaces the record, durably.
pub(super) fn write(file: &Path, progress: &Progress) -> io::Result<()> {
    let content = serde_json::to_vec(progress).map_err(io::Error::other)?;
    let folder = file.parent().unwrap_or(Path::new("."));
    replace(folder, DRAFT, FILE, &content)
}
