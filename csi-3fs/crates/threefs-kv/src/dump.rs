//! Backup of an embedded store: one file with all rows of one snapshot.
//!
//! ```text
//! magic "3FSDUMP1", kind (length u8, bytes)
//! row*      key length u32 (not 0), value length u32, key, value
//! end       key length 0, count of rows u64, CRC-32C of everything before the CRC u32
//! ```
//!
//! Numbers are little endian. A dump is written while the service runs: another process reads an
//! LMDB snapshot. It is streamed, so neither side needs memory for more than one row.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::ops::Bound;
use std::path::{Path, PathBuf};

use heed::types::Bytes;
use heed::{CommitOrAbort, Env, EnvOpenOptions, WithoutTls};

use crate::embedded::{RESERVED_KEYS_END, Rows, open_rows, sync_folder, take_ownership};
use crate::{EmbeddedConfig, KEY_BYTES_MAX, KvError, VALUE_BYTES_MAX};

const MAGIC: &[u8; 8] = b"3FSDUMP1";
/// Rows per transaction of a load.
const LOAD_BATCH: u64 = 10_000;
/// Stored keys may be longer than those of callers, by a versionstamp.
const STORED_KEY_BYTES_MAX: usize = KEY_BYTES_MAX + 11;

/// Why a dump could not be written or loaded.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    /// A file error.
    #[error("`{path}`: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// An error of the store.
    #[error(transparent)]
    Store(#[from] KvError),
    /// The dump is truncated, altered, or another file.
    #[error("`{path}` is not a complete dump of kind `{kind}`: {detail}; use another one")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The expected kind.
        kind: String,
        /// The damage.
        detail: String,
    },
    /// The folder already has a store.
    #[error("`{0}` already has a store; load into an empty folder, then move it into place")]
    Occupied(PathBuf),
}

/// Size of a dump.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dumped {
    /// Number of rows.
    pub rows: u64,
    /// Bytes of keys and values.
    pub bytes: u64,
}

/// Writes all rows of a store from one snapshot, while its service may run. The file appears under
/// its name once it is complete and durable.
///
/// # Errors
/// [`DumpError`].
pub fn dump(store: &EmbeddedConfig, kind: &str, file: &Path) -> Result<Dumped, DumpError> {
    let broken = |detail: String| KvError::broken(&store.path, detail);
    if !store.path.join("data.mdb").is_file() {
        return Err(broken("the folder has no store".into()).into());
    }
    let mut options = EnvOpenOptions::new().read_txn_without_tls();
    options.map_size(store.map_bytes_max);
    // SAFETY: LMDB's own lock file arbitrates between this reader and the service that writes; the
    // files are changed through LMDB alone, and this environment only reads.
    let env = unsafe { options.open(&store.path) }.map_err(|error| broken(error.to_string()))?;
    let rows = find_rows(&env).map_err(|error| broken(error.to_string()))?;
    let rows = rows.ok_or_else(|| broken("the store has no rows".into()))?;
    let txn = env.read_txn().map_err(|error| broken(error.to_string()))?;
    let draft = file.with_extension("partial");
    let file_error = |source| DumpError::File { path: draft.clone(), source };
    let mut out = Checksummed::new(BufWriter::new(File::create(&draft).map_err(file_error)?));
    let mut dumped = Dumped::default();
    write_head(&mut out, kind).map_err(file_error)?;
    let bounds = (Bound::Included(RESERVED_KEYS_END), Bound::Unbounded);
    for row in rows.range(&txn, &bounds).map_err(|error| broken(error.to_string()))? {
        let (key, value) = row.map_err(|error| broken(error.to_string()))?;
        // Both are far below 4 GiB: the store refuses longer ones.
        out.write_all(&(key.len() as u32).to_le_bytes()).map_err(file_error)?;
        out.write_all(&(value.len() as u32).to_le_bytes()).map_err(file_error)?;
        out.write_all(key).map_err(file_error)?;
        out.write_all(value).map_err(file_error)?;
        dumped.rows += 1;
        dumped.bytes += (key.len() + value.len()) as u64;
    }
    out.write_all(&0u32.to_le_bytes()).map_err(file_error)?;
    out.write_all(&dumped.rows.to_le_bytes()).map_err(file_error)?;
    let crc = out.crc;
    out.write_all(&crc.to_le_bytes()).map_err(file_error)?;
    let written = out.inner.into_inner().map_err(|error| file_error(error.into_error()))?;
    written.sync_all().map_err(file_error)?;
    std::fs::rename(&draft, file).map_err(file_error)?;
    let folder = file.parent().filter(|it| !it.as_os_str().is_empty());
    let folder = folder.unwrap_or_else(|| Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(file_error)?;
    Ok(dumped)
}

/// Reads and verifies a whole dump.
///
/// # Errors
/// [`DumpError`].
pub fn verify(kind: &str, file: &Path) -> Result<Dumped, DumpError> {
    read_rows(kind, file, |_, _| Ok(()))
}

/// Loads a dump into a folder without a store. The dump is verified first.
///
/// # Errors
/// [`DumpError`]; the folder then has no store.
pub fn load(store: &EmbeddedConfig, kind: &str, file: &Path) -> Result<Dumped, DumpError> {
    let broken = |detail: String| KvError::broken(&store.path, detail);
    if store.path.join("data.mdb").exists() {
        return Err(DumpError::Occupied(store.path.clone()));
    }
    verify(kind, file)?;
    let draft = store.path.join("loading");
    let file_error = |source| DumpError::File { path: draft.clone(), source };
    std::fs::create_dir_all(&store.path).map_err(file_error)?;
    let _owner = take_ownership(&store.path)?;
    // Left behind by an interrupted attempt.
    if draft.exists() {
        std::fs::remove_dir_all(&draft).map_err(file_error)?;
    }
    std::fs::create_dir(&draft).map_err(file_error)?;
    let mut options = EnvOpenOptions::new().read_txn_without_tls();
    options.map_size(store.map_bytes_max);
    // SAFETY: this folder was created above, under the lock of its parent folder.
    let env = unsafe { options.open(&draft) }.map_err(|error| broken(error.to_string()))?;
    let rows = open_rows(&env).map_err(|error| broken(error.to_string()))?;
    let dumped = fill(&env, rows, kind, file, broken)?;
    env.prepare_for_closing().wait();
    std::fs::rename(draft.join("data.mdb"), store.path.join("data.mdb")).map_err(file_error)?;
    std::fs::remove_dir_all(&draft).map_err(file_error)?;
    sync_folder(&store.path).map_err(file_error)?;
    Ok(dumped)
}

fn find_rows(env: &Env<WithoutTls>) -> Result<Option<Rows>, heed::Error> {
    let database = env.open_databases_and_commit(env.read_txn()?, |opener, txn| {
        let database = opener.open_database::<Bytes, Bytes>(txn, None)?;
        Ok::<_, heed::Error>(database.map_or(CommitOrAbort::Abort(()), CommitOrAbort::Commit))
    })?;
    match database {
        CommitOrAbort::Commit(rows) => Ok(Some(rows)),
        CommitOrAbort::Abort(()) => Ok(None),
    }
}

/// Writes the rows of a dump into an empty environment.
fn fill(
    env: &Env<WithoutTls>,
    rows: Rows,
    kind: &str,
    file: &Path,
    broken: impl Fn(String) -> KvError,
) -> Result<Dumped, DumpError> {
    let mut txn = Some(env.write_txn().map_err(|error| broken(error.to_string()))?);
    let mut pending = 0;
    let dumped = read_rows(kind, file, |key, value| {
        if pending == LOAD_BATCH {
            pending = 0;
            if let Some(full) = txn.take() {
                full.commit().map_err(|error| broken(error.to_string()))?;
            }
            txn = Some(env.write_txn().map_err(|error| broken(error.to_string()))?);
        }
        pending += 1;
        let Some(txn) = txn.as_mut() else { return Ok(()) };
        Ok(rows.put(txn, key, value).map_err(|error| broken(error.to_string()))?)
    })?;
    if let Some(last) = txn.take() {
        last.commit().map_err(|error| broken(error.to_string()))?;
    }
    Ok(dumped)
}

fn write_head(out: &mut impl Write, kind: &str) -> std::io::Result<()> {
    out.write_all(MAGIC)?;
    // Kinds are short constants.
    out.write_all(&[kind.len() as u8])?;
    out.write_all(kind.as_bytes())
}

fn read_rows(
    kind: &str,
    file: &Path,
    mut take: impl FnMut(&[u8], &[u8]) -> Result<(), DumpError>,
) -> Result<Dumped, DumpError> {
    let damage = |detail: &str| DumpError::Damaged {
        path: file.into(),
        kind: kind.into(),
        detail: detail.into(),
    };
    let dump_file =
        File::open(file).map_err(|source| DumpError::File { path: file.into(), source })?;
    let mut input = Checksummed::new(BufReader::new(dump_file));
    let cut = |_| damage("the file is truncated");
    let mut head = vec![0; MAGIC.len() + 1 + kind.len()];
    input.read_exact(&mut head).map_err(cut)?;
    let mut expected = Vec::new();
    write_head(&mut expected, kind)
        .map_err(|source| DumpError::File { path: file.into(), source })?;
    if head != expected {
        return Err(damage("the header is wrong"));
    }
    let mut dumped = Dumped::default();
    let mut last: Vec<u8> = Vec::new();
    loop {
        let key_bytes = input.u32().map_err(cut)? as usize;
        if key_bytes == 0 {
            break;
        }
        let value_bytes = input.u32().map_err(cut)? as usize;
        // Checked before memory is allocated.
        if key_bytes > STORED_KEY_BYTES_MAX || value_bytes > VALUE_BYTES_MAX {
            return Err(damage("a row exceeds the maximum size"));
        }
        let mut row = vec![0; key_bytes + value_bytes];
        input.read_exact(&mut row).map_err(cut)?;
        let (key, value) = row.split_at(key_bytes);
        if key <= last.as_slice() || key < RESERVED_KEYS_END {
            return Err(damage("the rows are not in order"));
        }
        take(key, value)?;
        dumped.rows += 1;
        dumped.bytes += row.len() as u64;
        row.truncate(key_bytes);
        last = row;
    }
    let mut count = [0; 8];
    input.read_exact(&mut count).map_err(cut)?;
    let crc = input.crc;
    if input.u32().map_err(cut)? != crc || u64::from_le_bytes(count) != dumped.rows {
        return Err(damage("the checksum is wrong"));
    }
    match input.read(&mut [0]) {
        Ok(0) => Ok(dumped),
        _ => Err(damage("unexpected data after the end")),
    }
}

/// A reader or writer that computes the checksum of its bytes.
struct Checksummed<T> {
    inner: T,
    crc: u32,
}

impl<T> Checksummed<T> {
    fn new(inner: T) -> Self {
        Self { inner, crc: 0 }
    }
}

impl<T: Read> Checksummed<T> {
    fn u32(&mut self) -> std::io::Result<u32> {
        let mut bytes = [0; 4];
        self.read_exact(&mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }
}

impl<T: Read> Read for Checksummed<T> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(out)?;
        self.crc = crc32c::crc32c_append(self.crc, out.get(..count).unwrap_or_default());
        Ok(count)
    }
}

impl<T: Write> Write for Checksummed<T> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let count = self.inner.write(bytes)?;
        self.crc = crc32c::crc32c_append(self.crc, bytes.get(..count).unwrap_or_default());
        Ok(count)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.inner.flush()
    }
}
