//! Check of metadata against itself: names, inodes, links, quotas and queues of one snapshot.
//!
//! The snapshot is a dump, which is consistent while services change the store, so every
//! contradiction in it is a fault. A [`Checker`] keeps a few numbers for each inode.

mod corrections;
mod counters;
mod history;
mod tree;

use std::collections::{HashMap, HashSet};
use std::path::Path;

use serde::Serialize;
use threefs_core::ids::InodeId;
use threefs_kv::{DumpError, KvError, Report};

use crate::protocol::{Correction, EntryKind, InodeKind, SESSION_ROW_BYTES, TrashId};
use crate::restore::DUMP_KIND;
use crate::rows::history as keys;
use crate::rows::{
    self, ANSWER_BYTES, ANSWERS, AnswerRow, DEAD, DentryRow, InodeRow, QuotaRow, REMOVALS, REPAIR,
    RemovalRow, RepairRow, SCHEMA, SCHEMA_VERSION, SCHEMA_WITH_SNAPSHOTS, SESSIONS, SessionRow,
    TOMBSTONES, TRASH, TrashRow, TrashedDirectoryRow,
};

/// Findings that are kept; further ones are counted.
const FINDINGS_MAX: usize = 1000;

/// A contradiction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What is contradicted: `name`, `inode`, `links`, `directory`, `removal`, `trash`, `quota`,
    /// `charge`, `answers`, `history` or `row`.
    pub kind: &'static str,
    /// The inode.
    pub inode: u64,
    /// The contradiction.
    pub detail: String,
}

/// Result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// Rows of the dump.
    pub rows: u64,
    /// Inodes, including removed ones.
    pub inodes: u64,
    /// Number of contradictions.
    pub findings_total: u64,
    /// The first ones, at most 1000.
    pub findings: Vec<Finding>,
    /// Rows that cannot be read. With any, no correction is known: they may count.
    pub unreadable_rows: u64,
    /// The repair that had started before the snapshot, unless it has applied corrections.
    pub repair: Option<u64>,
    /// Corrections of the counters that contradict what they count, the first ones; see
    /// [`Correction`].
    pub corrections: Vec<Correction>,
}

/// Checks a dump of metadata.
///
/// # Errors
/// [`DumpError`] if it cannot be read, or is of another schema.
pub fn check(file: &Path, report: Report<'_>) -> Result<Checked, DumpError> {
    let mut checker = Checker::default();
    let mut schema = None;
    let dumped = threefs_kv::scan(DUMP_KIND, file, report, &mut |key, value| {
        if key == SCHEMA {
            schema = rows::decode::<u64>(key, value).ok();
        }
        checker.row(key, value);
    })?;
    if !matches!(schema, Some(SCHEMA_VERSION | SCHEMA_WITH_SNAPSHOTS)) {
        let schema = schema.map_or("no schema".into(), |schema| format!("schema {schema}"));
        let detail = format!(
            "the tree has {schema}, this program checks {SCHEMA_VERSION} and {SCHEMA_WITH_SNAPSHOTS}; start a metadata service \
             of this release over it first"
        );
        return Err(KvError::bad_row(SCHEMA, detail).into());
    }
    Ok(Checked { rows: dumped.rows, ..checker.finish() })
}

/// What the check needs of an inode.
struct Node {
    version: u64,
    kind: EntryKind,
    links: u32,
    /// The epoch of its state.
    since: u32,
    quota: Option<InodeId>,
    /// Of a directory.
    parent: Option<InodeId>,
    /// Of a directory.
    name: String,
    charged: bool,
    dead: bool,
    parked: bool,
    metadata_bytes: u64,
    needed_end: u64,
    charged_end: u64,
    excess: u64,
    target_bytes: u64,
}

/// The names of an inode.
struct Names {
    count: u32,
    bytes: u64,
    /// The first epoch of one of them.
    since: u32,
    /// Kind and place of one of them; the name itself only of a directory.
    kind: EntryKind,
    parent: InodeId,
    name: String,
}

/// An entry of a trash.
struct Kept {
    volume: InodeId,
    id: TrashId,
    kind: EntryKind,
    name_bytes: u64,
}

/// Collects rows in any order, then compares them.
#[derive(Default)]
pub(crate) struct Checker {
    inodes: HashMap<InodeId, Node>,
    names: HashMap<InodeId, Names>,
    /// Directories that have names.
    parents: HashSet<InodeId>,
    removals: HashSet<InodeId>,
    trash: HashMap<InodeId, Kept>,
    trashed_directories: HashMap<InodeId, TrashedDirectoryRow>,
    subdirectories: HashMap<InodeId, i64>,
    quotas: HashMap<InodeId, QuotaRow>,
    /// Bytes, excess, inodes and metadata of quotas.
    usage: HashMap<InodeId, [i64; 4]>,
    /// Bytes of extended attributes and charged write sessions.
    attribute_bytes: HashMap<InodeId, u64>,
    /// Rows that belong to an inode, one prefix for each.
    belonging: HashMap<InodeId, String>,
    /// Bytes of stored answers and their counters, by volume.
    answers: HashMap<InodeId, i64>,
    answer_counters: HashMap<InodeId, i64>,
    history: history::History,
    found: Checked,
}

impl Checker {
    /// Takes a row.
    pub(crate) fn row(&mut self, key: &[u8], value: &[u8]) {
        if let Err(error) = self.take(key, value) {
            let inode = rows::inode_of_key(key).unwrap_or(InodeId(0));
            self.found.unreadable_rows += 1;
            self.add("row", inode, error.to_string());
        }
    }

    fn take(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        let prefix = key.get(..4).unwrap_or_default();
        let belongs = [b"XATT", b"WRIT", b"DTIM", b"DSUB", b"TRIM", b"RCNT", b"QUOT", b"INOS"];
        if belongs.iter().any(|it| *it == prefix) {
            let name = String::from_utf8_lossy(prefix).into_owned();
            self.belonging.entry(rows::inode_of_key(key)?).or_insert(name);
        }
        match prefix {
            b"INOD" => self.inode(InodeRow::decode(key, value)?),
            b"DENT" => self.name(key, DentryRow::decode(key, value)?)?,
            b"DSUB" => {
                self.subdirectories.insert(rows::inode_of_key(key)?, counter(key, value)?);
            }
            b"XATT" => {
                let bytes = (key.len() - 12 + value.len()) as u64;
                *self.attribute_bytes.entry(rows::inode_of_key(key)?).or_default() += bytes;
            }
            SESSIONS if SessionRow::decode(key, value)?.charged => {
                let bytes = self.attribute_bytes.entry(rows::inode_of_key(key)?).or_default();
                *bytes += SESSION_ROW_BYTES;
            }
            REMOVALS | DEAD | TOMBSTONES => {
                let row: RemovalRow = rows::decode(key, value)?;
                if !self.removals.insert(row.inode) {
                    self.add("removal", row.inode, "is queued for collection twice".into());
                }
            }
            TRASH => self.entry(key, rows::decode(key, value)?)?,
            b"TRDI" => {
                let location = rows::decode(key, value)?;
                self.trashed_directories.insert(rows::inode_of_key(key)?, location);
            }
            keys::FORMER_INODES
            | keys::FORMER_NAMES
            | keys::FORMER_ATTRIBUTES
            | keys::FORMER_PAGES
            | keys::ENDS => self.history_row(key, value)?,
            keys::SNAPSHOTS => self.snapshot_row(key, value)?,
            b"QUOT" => {
                self.quotas.insert(rows::inode_of_key(key)?, QuotaRow::decode(key, value)?);
            }
            b"QBYT" => self.use_of(key, value, 0)?,
            b"QEXC" => self.use_of(key, value, 1)?,
            b"QINO" => self.use_of(key, value, 2)?,
            b"QMET" => self.use_of(key, value, 3)?,
            ANSWERS => {
                let row = AnswerRow::decode(key, value)?;
                for volume in row.volume.iter().flat_map(|it| [*it, rows::ALL_VOLUMES]) {
                    *self.answers.entry(volume).or_default() += row.bytes();
                }
            }
            ANSWER_BYTES => {
                self.answer_counters.insert(rows::inode_of_key(key)?, counter(key, value)?);
            }
            _ if key == REPAIR => {
                let row: RepairRow = rows::decode(key, value)?;
                self.found.repair = (row.next_step == 0).then_some(row.repair);
            }
            _ => {}
        }
        Ok(())
    }

    fn inode(&mut self, row: InodeRow) {
        self.current_row(keys::former_inodes(row.inode.id), row.since);
        let (kind, parent, needed_end) = (row.kind(), row.parent(), row.needed_end());
        let target_bytes = match &row.inode.kind {
            InodeKind::Symlink { target } => target.len() as u64,
            _ => 0,
        };
        let node = Node {
            version: row.inode.version,
            kind,
            links: row.inode.links,
            since: row.since,
            quota: row.inode.quota,
            parent,
            name: row.name,
            charged: row.charged,
            dead: row.dead,
            parked: row.parked,
            metadata_bytes: row.metadata_bytes,
            needed_end,
            charged_end: row.charged_end,
            excess: row.excess,
            target_bytes,
        };
        self.inodes.insert(row.inode.id, node);
    }

    fn name(&mut self, key: &[u8], entry: DentryRow) -> Result<(), KvError> {
        let (parent, name) = (rows::inode_of_key(key)?, key.get(12..).unwrap_or_default());
        self.parents.insert(parent);
        self.current_row(keys::former_entries(parent, name), entry.since);
        let bytes = charge_of_name(name.len());
        let name = match entry.kind {
            EntryKind::Directory => String::from_utf8_lossy(name).into_owned(),
            _ => String::new(),
        };
        let names = self.names.entry(entry.inode).or_insert(Names {
            count: 0,
            bytes: 0,
            since: entry.since,
            kind: entry.kind,
            parent,
            name,
        });
        (names.count, names.bytes) = (names.count + 1, names.bytes + bytes);
        names.since = names.since.min(entry.since);
        if names.kind != entry.kind {
            let detail =
                format!("a name in {parent} has another kind than one in {}", names.parent);
            self.add("name", entry.inode, detail);
        }
        Ok(())
    }

    fn entry(&mut self, key: &[u8], entry: TrashRow) -> Result<(), KvError> {
        let (volume, id) = (rows::inode_of_key(key)?, rows::trash_id_of_key(key)?);
        let name_bytes = charge_of_name(entry.name.len());
        let kept = Kept { volume, id, kind: entry.kind, name_bytes };
        if self.trash.insert(id.inode, kept).is_some() {
            self.add("trash", id.inode, "is in the trash twice".into());
        }
        Ok(())
    }

    fn use_of(&mut self, key: &[u8], value: &[u8], what: usize) -> Result<(), KvError> {
        let used = counter(key, value)?;
        self.usage.entry(rows::inode_of_key(key)?).or_default()[what] = used;
        Ok(())
    }

    /// Compares all rows.
    pub(crate) fn finish(mut self) -> Checked {
        self.check_names();
        self.check_inodes();
        self.check_trash();
        self.check_subdirectories();
        self.check_quotas();
        self.check_answers();
        self.check_history();
        let without: Vec<(InodeId, String)> = self
            .belonging
            .iter()
            .filter(|(id, _)| !self.inodes.contains_key(id))
            .map(|(id, prefix)| (*id, prefix.clone()))
            .collect();
        for (id, prefix) in without {
            self.add("row", id, format!("has a row {prefix} but no inode"));
        }
        if self.found.unreadable_rows > 0 {
            self.found.corrections.clear();
        }
        self.found.inodes = self.inodes.len() as u64;
        self.found.findings.sort_by_key(|finding| (finding.inode, finding.kind));
        self.found
    }

    fn add(&mut self, kind: &'static str, inode: InodeId, detail: String) {
        self.found.findings_total += 1;
        if self.found.findings.len() < FINDINGS_MAX {
            self.found.findings.push(Finding { kind, inode: inode.0, detail });
        }
    }
}

fn counter(key: &[u8], value: &[u8]) -> Result<i64, KvError> {
    let bytes = value.try_into().map_err(|_| KvError::bad_row(key, "not a counter"))?;
    Ok(i64::from_le_bytes(bytes))
}

fn charge_of_name(length: usize) -> u64 {
    length as u64 + crate::protocol::NAME_ROW_BYTES
}
