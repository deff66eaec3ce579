//! Names against inodes: links, parents, and what has no name.

use std::collections::HashSet;

use threefs_core::ids::InodeId;

use crate::check::Checker;
use crate::check::corrections::correction;
use crate::protocol::{EntryKind, ROOT};
use crate::rows::{REMOVED, TrashedDirectoryRow};

type Findings = Vec<(&'static str, InodeId, String)>;

impl Checker {
    fn add_all(&mut self, findings: Findings) {
        for (kind, inode, detail) in findings {
            self.add(kind, inode, detail);
        }
    }

    /// Each name has its inode, and is in a directory of its quota.
    pub(super) fn check_names(&mut self) {
        let mut findings = Findings::new();
        for (id, names) in &self.names {
            let Some(node) = self.inodes.get(id) else {
                let detail = format!("has a name in {} but no inode", names.parent);
                findings.push(("name", *id, detail));
                continue;
            };
            if node.kind != names.kind {
                let detail = format!(
                    "is a {:?}, its name in {} says {:?}",
                    node.kind, names.parent, names.kind
                );
                findings.push(("name", *id, detail));
            }
            let parent = self.inodes.get(&names.parent);
            let owned = node.quota == Some(*id);
            if let Some(parent) = parent.filter(|it| !owned && it.quota != node.quota) {
                let detail = format!(
                    "has the quota {:?}, its directory {} has {:?}",
                    node.quota, names.parent, parent.quota
                );
                findings.push(("quota", *id, detail));
            }
        }
        for parent in &self.parents {
            match self.inodes.get(parent) {
                None => findings.push(("directory", *parent, "has names but no inode".into())),
                Some(node) if node.kind != EntryKind::Directory => {
                    findings.push((
                        "directory",
                        *parent,
                        "has names but is not a directory".into(),
                    ));
                }
                Some(_) => {}
            }
        }
        self.add_all(findings);
    }

    /// Links match names; what has no name is queued or in the trash; directories form a tree.
    pub(super) fn check_inodes(&mut self) {
        let (mut findings, mut corrections) = (Findings::new(), Vec::new());
        if !self.inodes.contains_key(&ROOT) {
            findings.push(("directory", ROOT, "the root does not exist".into()));
        }
        let mut connected = HashSet::from([ROOT]);
        for (id, node) in &self.inodes {
            let names = self.names.get(id);
            let (count, name_bytes) = names.map_or((0, 0), |names| (names.count, names.bytes));
            let kept = self.trash.get(id);
            let queued = self.removals.contains(id);
            if queued && kept.is_some() {
                findings.push(("removal", *id, "is queued for collection and in the trash".into()));
            }
            let has_formers = self.history.inodes.contains(id);
            if node.parked && (queued || kept.is_some() || node.links > 0 || !has_formers) {
                let detail = "is kept for snapshots that do not show it".into();
                findings.push(("history", *id, detail));
            }
            if queued && has_formers && node.kind != EntryKind::Directory {
                let detail = "is queued for collection, and snapshots show it".into();
                findings.push(("history", *id, detail));
            }
            let removed = queued || kept.is_some() || node.parked;
            match (node.kind, node.parent) {
                (EntryKind::Directory, _) if *id == ROOT => {
                    if count > 0 {
                        findings.push(("name", ROOT, "the root has a name".into()));
                    }
                }
                (EntryKind::Directory, Some(REMOVED)) => {
                    if count > 0 {
                        findings.push(("name", *id, "is removed but has a name".into()));
                    }
                    if !removed {
                        let detail = "is removed, but neither queued nor in the trash".into();
                        findings.push(("removal", *id, detail));
                    }
                }
                (EntryKind::Directory, parent) => {
                    let place = names.map(|names| (Some(names.parent), &names.name));
                    if count != 1 || place != Some((parent, &node.name)) {
                        let detail = format!(
                            "has {count} names, and says that it is `{}` in {parent:?}",
                            node.name
                        );
                        findings.push(("directory", *id, detail));
                    }
                    if removed {
                        let detail = "has a name, and is queued or in the trash".into();
                        findings.push(("removal", *id, detail));
                    }
                    self.climb(*id, &mut connected, &mut findings);
                }
                _ => {
                    if node.links != count {
                        let detail = format!("has {count} names, its link count is {}", node.links);
                        findings.push(("links", *id, detail));
                    }
                    if removed != (count == 0) {
                        let detail = match removed {
                            true => "has a name, and is queued or in the trash",
                            false => "has no name, and is neither queued nor in the trash",
                        };
                        findings.push(("removal", *id, detail.into()));
                    }
                }
            }
            let kept_bytes = kept.map_or(0, |kept| kept.name_bytes);
            let attributes = self.attribute_bytes.get(id).copied().unwrap_or_default();
            let expected = name_bytes + kept_bytes + attributes + node.target_bytes;
            // The charge of a removed directory is released with it.
            let counts = node.parent != Some(REMOVED) || kept.is_some();
            if counts && node.metadata_bytes != expected {
                let detail = format!(
                    "is charged for {} bytes of names and attributes, which have {expected}",
                    node.metadata_bytes
                );
                findings.push(("charge", *id, detail));
            }
            if !removed {
                corrections.extend(correction(*id, node, names, expected));
            }
            if node.charged && node.charged_end < node.needed_end.saturating_add(node.excess) {
                let detail = format!(
                    "is charged up to byte {}, {} of them as excess, and needs {}",
                    node.charged_end, node.excess, node.needed_end
                );
                findings.push(("charge", *id, detail));
            }
        }
        self.add_all(findings);
        self.correct_all(corrections);
    }

    /// Walks up from a directory to one that is known to be connected, or to a removed one.
    fn climb(&self, from: InodeId, connected: &mut HashSet<InodeId>, findings: &mut Findings) {
        let (mut path, mut at) = (HashSet::new(), from);
        while !connected.contains(&at) {
            if !path.insert(at) {
                findings.push(("directory", from, format!("is below itself, through {at}")));
                break;
            }
            at = match self.inodes.get(&at).and_then(|node| node.parent) {
                Some(REMOVED) => break,
                Some(parent) => parent,
                None => {
                    findings.push(("directory", from, format!("is below {at}, which is none")));
                    break;
                }
            };
        }
        connected.extend(path);
    }

    /// Each entry has a charged inode without a link, and a directory knows its entry.
    pub(super) fn check_trash(&mut self) {
        let mut findings = Findings::new();
        for (id, kept) in &self.trash {
            let Some(node) = self.inodes.get(id) else {
                findings.push(("trash", *id, "is in the trash but does not exist".into()));
                continue;
            };
            let is_right = node.links == 0 && node.charged && !node.dead;
            if !is_right || node.quota != Some(kept.volume) || node.kind != kept.kind {
                let detail = format!("differs from its entry in the trash of {}", kept.volume);
                findings.push(("trash", *id, detail));
            }
            let location = TrashedDirectoryRow { volume: kept.volume, id: kept.id };
            let known = self.trashed_directories.get(id);
            if kept.kind == EntryKind::Directory && known != Some(&location) {
                findings.push(("trash", *id, "does not know its entry in the trash".into()));
            }
        }
        for id in self.trashed_directories.keys() {
            if self.trash.get(id).is_none_or(|kept| kept.kind != EntryKind::Directory) {
                findings.push(("trash", *id, "has a place in a trash without an entry".into()));
            }
        }
        self.add_all(findings);
    }
}
