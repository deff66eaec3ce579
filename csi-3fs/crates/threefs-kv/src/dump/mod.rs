//! Backups of a store, and conversion from one kind of store to another: one file with all rows of
//! one snapshot, in the same format for each store.
//!
//! | part | responsibility |
//! |---|---|
//! | `format` | pure: the bytes of a dump |
//! | `folder` | rows of an embedded store |
//! | `crate::etcd::{DumpSource, LoadTarget}` | rows of a store in etcd |
//! | `crate::postgres::{DumpSource, LoadTarget}` | rows of a store in PostgreSQL |
//!
//! A dump is written while services run. A load fills a store that is empty, and no service serves
//! it before it is complete.

mod folder;
mod format;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::{Path, PathBuf};

use crate::{EtcdConfig, KvError, PostgresConfig, Row, StoreConfig, etcd, postgres};
use folder::FolderTarget;
use format::{Reader, Writer};

/// Rows between two reports of the progress.
const REPORT_ROWS: u64 = 4096;
/// Attempts to dump a store in etcd before its revision is compacted.
const DUMP_ATTEMPTS: u32 = 3;

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
    /// The prefix already has a store.
    #[error(
        "{0} already has rows; load with another --etcd-prefix, or remove the rows of a store that is \
         given up with `etcdctl del --prefix`"
    )]
    OccupiedPrefix(String),
    /// The schema already has a store.
    #[error(
        "{0} already has rows or was used by a service; load with another --postgres-schema, or drop \
         the schema of a store that is given up"
    )]
    OccupiedSchema(String),
    /// Each attempt took longer than etcd keeps a revision.
    #[error(
        "{store}: revision {revision} was compacted after {rows} rows, in each of {attempts} attempts; \
         repeat the dump when etcd is less busy, or use `etcdctl snapshot save`"
    )]
    Compacted {
        /// The store's address.
        store: String,
        /// Revision of the last attempt.
        revision: u64,
        /// Rows that it has read.
        rows: u64,
        /// Number of attempts.
        attempts: u32,
    },
    /// [`Report`] has returned false.
    #[error("stopped; nothing was changed, except that an interrupted load has to be repeated")]
    Stopped,
}

/// Size of a dump.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dumped {
    /// Number of rows.
    pub rows: u64,
    /// Bytes of keys and values.
    pub bytes: u64,
}

/// Receives progress: completed and total rows of a dump, bytes of the file otherwise. Returns whether to
/// continue.
pub type Report<'a> = &'a (dyn Fn(u64, u64) -> bool + Sync);

/// Values by key.
pub type Values = BTreeMap<Vec<u8>, Vec<u8>>;

/// Rows that a load writes in place of those of the dump.
#[derive(Clone, Copy)]
pub struct Amendment<'a> {
    /// Keys of rows that the replacements depend on.
    pub keys: &'a [&'a [u8]],
    /// The replacements, from those rows.
    pub rows: &'a (dyn Fn(&Values) -> Result<Vec<Row>, KvError> + Sync),
}

impl Amendment<'_> {
    /// The rows of the dump as they are.
    pub const NONE: Self = Self { keys: &[], rows: &|_| Ok(Vec::new()) };
}

/// Writes all rows of a store from one snapshot, while its services may run. The file appears under
/// its name once it is complete and durable.
///
/// # Errors
/// [`DumpError`].
pub async fn dump(
    store: &StoreConfig,
    kind: &str,
    file: &Path,
    report: Report<'_>,
) -> Result<Dumped, DumpError> {
    let mut name = file.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    let draft = file.with_file_name(name);
    let written = match store {
        StoreConfig::Embedded(config) => folder::dump(config, kind, &draft, report),
        StoreConfig::Etcd(config) => dump_etcd(config, kind, &draft, report).await,
        StoreConfig::Postgres(config) => dump_postgres(config, kind, &draft, report).await,
    };
    let published = written.and_then(|dumped| publish(&draft, file).map(|()| dumped));
    if published.is_err() {
        // A full disk gets its space back.
        let _ = std::fs::remove_file(&draft);
    }
    published
}

fn publish(draft: &Path, file: &Path) -> Result<(), DumpError> {
    let file_error = |source| DumpError::File { path: file.into(), source };
    std::fs::rename(draft, file).map_err(file_error)?;
    let folder = file.parent().filter(|it| !it.as_os_str().is_empty());
    let folder = folder.unwrap_or_else(|| Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(file_error)
}

async fn dump_etcd(
    config: &EtcdConfig,
    kind: &str,
    draft: &Path,
    report: Report<'_>,
) -> Result<Dumped, DumpError> {
    let source = etcd::DumpSource::connect(config).await?;
    let mut attempts = 0;
    loop {
        attempts += 1;
        let mut pages = source.start().await?;
        let mut out = Draft::create(draft, kind)?;
        loop {
            match pages.next().await {
                Ok(None) => return out.finish(),
                Ok(Some(rows)) => {
                    for (key, value) in rows {
                        out.row(&key, &value)?;
                    }
                    if !report(out.rows(), pages.total()) {
                        return Err(DumpError::Stopped);
                    }
                }
                Err(KvError::TooOld { .. }) if attempts < DUMP_ATTEMPTS => {
                    tracing::warn!(attempts, rows = out.rows(), "the revision was compacted");
                    break;
                }
                Err(KvError::TooOld { version }) => {
                    let (store, rows) = (config.name(), out.rows());
                    return Err(DumpError::Compacted { store, revision: version, rows, attempts });
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

async fn dump_postgres(
    config: &PostgresConfig,
    kind: &str,
    draft: &Path,
    report: Report<'_>,
) -> Result<Dumped, DumpError> {
    let mut source = postgres::DumpSource::start(config).await?;
    let mut out = Draft::create(draft, kind)?;
    loop {
        let rows = source.next().await?;
        if rows.is_empty() {
            return out.finish();
        }
        for (key, value) in rows {
            out.row(&key, &value)?;
        }
        if !report(out.rows(), source.total()) {
            return Err(DumpError::Stopped);
        }
    }
}

/// A dump that is being written.
struct Draft {
    path: PathBuf,
    writer: Writer<BufWriter<File>>,
}

impl Draft {
    fn create(path: &Path, kind: &str) -> Result<Self, DumpError> {
        let file_error = |source| DumpError::File { path: path.into(), source };
        let file = BufWriter::new(File::create(path).map_err(file_error)?);
        let writer = Writer::start(file, kind).map_err(file_error)?;
        Ok(Self { path: path.into(), writer })
    }

    fn row(&mut self, key: &[u8], value: &[u8]) -> Result<(), DumpError> {
        let written = self.writer.row(key, value);
        written.map_err(|source| DumpError::File { path: self.path.clone(), source })
    }

    fn rows(&self) -> u64 {
        self.writer.rows()
    }

    fn finish(self) -> Result<Dumped, DumpError> {
        let file_error = |source| DumpError::File { path: self.path.clone(), source };
        let (out, dumped) = self.writer.finish().map_err(file_error)?;
        let file = out.into_inner().map_err(|error| file_error(error.into_error()))?;
        file.sync_all().map_err(file_error)?;
        Ok(dumped)
    }
}

/// A dump that is being read.
struct Input<'a> {
    path: &'a Path,
    kind: &'a str,
    reader: Reader<BufReader<File>>,
    file_bytes: u64,
    report: Report<'a>,
}

impl<'a> Input<'a> {
    fn open(kind: &'a str, path: &'a Path, report: Report<'a>) -> Result<Self, DumpError> {
        let file_error = |source| DumpError::File { path: path.into(), source };
        let file = File::open(path).map_err(file_error)?;
        let file_bytes = file.metadata().map_err(file_error)?.len();
        let reader = Reader::start(BufReader::new(file), kind)
            .map_err(|detail| damaged(kind, path, detail))?;
        Ok(Self { path, kind, reader, file_bytes, report })
    }

    fn next(&mut self) -> Result<Option<Row>, DumpError> {
        let row = self.reader.next().map_err(|detail| damaged(self.kind, self.path, detail))?;
        let due = row.is_none() || self.reader.dumped().rows.is_multiple_of(REPORT_ROWS);
        if due && !(self.report)(self.reader.bytes(), self.file_bytes) {
            return Err(DumpError::Stopped);
        }
        Ok(row)
    }
}

fn damaged(kind: &str, path: &Path, detail: &str) -> DumpError {
    DumpError::Damaged { path: path.into(), kind: kind.into(), detail: detail.into() }
}

/// Reads and verifies a whole dump, and returns the values of some of its rows.
///
/// # Errors
/// [`DumpError`].
pub fn verify(
    kind: &str,
    file: &Path,
    keys: &[&[u8]],
    report: Report<'_>,
) -> Result<(Dumped, Values), DumpError> {
    let mut values = Values::new();
    let dumped = scan(kind, file, report, &mut |key, value| {
        if keys.contains(&key) {
            values.insert(key.to_vec(), value.to_vec());
        }
    })?;
    Ok((dumped, values))
}

/// Reads a whole dump, and calls `visit` with the key and value of each row. The dump is verified
/// once this returns.
///
/// # Errors
/// [`DumpError`].
pub fn scan(
    kind: &str,
    file: &Path,
    report: Report<'_>,
    visit: &mut dyn FnMut(&[u8], &[u8]),
) -> Result<Dumped, DumpError> {
    let mut input = Input::open(kind, file, report)?;
    while let Some((key, value)) = input.next()? {
        visit(&key, &value);
    }
    Ok(input.reader.dumped())
}

/// Loads a dump into an empty store. The dump is verified first.
///
/// # Errors
/// [`DumpError`]; then no service serves the store, and the load can be repeated.
pub async fn load(
    store: &StoreConfig,
    kind: &str,
    file: &Path,
    amendment: Amendment<'_>,
    report: Report<'_>,
) -> Result<Dumped, DumpError> {
    match store {
        StoreConfig::Embedded(config) => FolderTarget::check_empty(config)?,
        StoreConfig::Etcd(config) if etcd::LoadTarget::is_empty(config).await? => {}
        StoreConfig::Etcd(config) => return Err(occupied(config)),
        // Its transaction is rolled back.
        StoreConfig::Postgres(config) => drop(start_postgres(config).await?),
    }
    let (_, values) = verify(kind, file, amendment.keys, &|_, _| report(0, 1))?;
    let amended = (amendment.rows)(&values)?;
    // No row is written twice: a late copy of a request would undo the second write.
    let is_amended = |key: &[u8]| amended.iter().any(|(amended, _)| amended == key);
    let mut input = Input::open(kind, file, report)?;
    match store {
        StoreConfig::Embedded(config) => {
            let mut target = FolderTarget::start(config)?;
            while let Some((key, value)) = input.next()? {
                if !is_amended(&key) {
                    target.put(key, value)?;
                }
            }
            for (key, value) in amended {
                target.put(key, value)?;
            }
            target.finish()?;
        }
        StoreConfig::Etcd(config) => {
            let target = etcd::LoadTarget::start(config).await?;
            let mut target = target.ok_or_else(|| occupied(config))?;
            while let Some((key, value)) = input.next()? {
                if !is_amended(&key) {
                    target.put(key, value).await?;
                }
            }
            for (key, value) in amended {
                target.put(key, value).await?;
            }
            target.finish().await?;
        }
        StoreConfig::Postgres(config) => {
            let mut target = start_postgres(config).await?;
            while let Some((key, value)) = input.next()? {
                if !is_amended(&key) {
                    target.put(key, value).await?;
                }
            }
            for (key, value) in amended {
                target.put(key, value).await?;
            }
            target.finish().await?;
        }
    }
    Ok(input.reader.dumped())
}

fn occupied(config: &EtcdConfig) -> DumpError {
    DumpError::OccupiedPrefix(config.name())
}

async fn start_postgres(config: &PostgresConfig) -> Result<postgres::LoadTarget, DumpError> {
    let target = postgres::LoadTarget::start(config).await?;
    target.ok_or_else(|| DumpError::OccupiedSchema(config.name()))
}
