//! Comparison of the model with the reference.

use std::collections::BTreeMap;

use super::files::Content;
use super::meta::{Kind, Meta, Tree};
use super::reference::{Entry, FileId, Observation, Reference, Write};
use super::storage::Storage;
use super::{CHUNK_BLOCKS, CHUNKS, Epoch, Id, Slot, Tag};

/// Blocks of the longest file.
const BLOCKS: u64 = CHUNK_BLOCKS * CHUNKS;

/// Checks a snapshot: its names, its contents, and that nothing has changed since the last check.
pub fn snapshot(
    meta: &Meta,
    storage: &Storage,
    reference: &mut Reference,
    slot: Slot,
) -> Result<(), String> {
    let Some(expected) = reference.snapshots.get(&slot) else { return Ok(()) };
    let Some(row) = meta.snapshots.get(&slot) else {
        return Err(format!("snapshot {slot} is gone"));
    };
    let mut seen = BTreeMap::new();
    let mut directories = vec![(row.volume, expected.root)];
    let mut links: BTreeMap<FileId, Id> = BTreeMap::new();
    let mut count = 0;
    while let Some((directory, counterpart)) = directories.pop() {
        for (name, inode) in meta.list(Tree::In(slot), directory) {
            let what = || format!("snapshot {slot}: {name} in {directory}");
            let entry = expected.names.get(&(counterpart, name.clone()));
            let version = meta.inode_in(slot, inode);
            let version = version.ok_or_else(|| format!("{}: inode {inode} is lost", what()))?;
            count += 1;
            match (entry, &version.kind) {
                (Some(Entry::Directory(id)), Kind::Directory { .. }) => {
                    directories.push((inode, *id));
                }
                (Some(Entry::File(file)), Kind::File { .. }) => {
                    if *links.entry(*file).or_insert(inode) != inode {
                        return Err(format!("{}: another file", what()));
                    }
                    let content = meta.content_in(storage, slot, inode);
                    let Content { at, origins, length } =
                        content.ok_or_else(|| format!("{}: no content", what()))?;
                    let block = |number| match number < length {
                        true => storage.block(inode, at, &origins, number),
                        false => 0,
                    };
                    seen.insert(*file, (length, (0..BLOCKS).map(block).collect::<Vec<Tag>>()));
                }
                (entry, kind) => return Err(format!("{}: {kind:?} is not {entry:?}", what())),
            }
        }
    }
    if count != expected.names.len() {
        return Err(format!("snapshot {slot} has {count} names: {:?}", expected.names));
    }
    if !expected.seen.is_empty() && expected.seen != seen {
        return Err(format!("snapshot {slot} was {:?} and is {seen:?}", expected.seen));
    }
    let at = expected.at;
    for (file, (length, blocks)) in &seen {
        for (block, value) in (0..).zip(blocks) {
            if let Some(why) = reference.refute((*file, block), *value, at, at) {
                return Err(format!("snapshot {slot}: {why}"));
            }
        }
        lengths(reference, *file, *length, at)?;
    }
    if let Some(expected) = reference.snapshots.get_mut(&slot) {
        expected.seen = seen;
    }
    Ok(())
}

/// A file of a snapshot has at least the length that acknowledged writes gave it, and at most the
/// one that a truncation and later writes did.
fn lengths(reference: &Reference, file: FileId, length: u64, start: u64) -> Result<(), String> {
    let writes = || reference.writes.values().filter(|it| it.file == file);
    let truncations = || writes().filter(|it| it.zeros);
    let truncated = truncations().map(|it| it.end.unwrap_or(u64::MAX)).max();
    let counts = |it: &&Write| {
        let after = it.start > truncated.unwrap_or_default();
        !it.zeros && after && it.end.is_some_and(|end| end < start)
    };
    let end = writes().filter(counts).map(|it| it.to).max().unwrap_or_default();
    let starts_with = reference.initial.get(&file).map_or(0, |(length, _)| *length);
    let least = if truncated.is_none() { end.max(starts_with) } else { end };
    if length < least {
        return Err(format!("file {file} has length {length} at {start}, expected {least}"));
    }
    let cut = truncations().filter(|it| it.cut.is_some_and(|cut| cut < start));
    if let Some(last) = cut.max_by_key(|it| it.start) {
        let later = writes().filter(|it| it.start > last.start);
        let most = later.map(|it| if it.zeros { it.from } else { it.to }).max();
        let most = last.from.max(most.unwrap_or_default());
        if length > most {
            return Err(format!("file {file} has length {length} at {start}, at most {most}"));
        }
    }
    Ok(())
}

/// Checks the live tree of a volume: names, and contents if no operation is in progress.
pub fn live(
    meta: &Meta,
    storage: &Storage,
    reference: &mut Reference,
    volume: Id,
    root: Id,
    now: u64,
) -> Result<(), String> {
    let mut directories = vec![(volume, root)];
    while let Some((directory, counterpart)) = directories.pop() {
        let names = meta.list(Tree::Live, directory);
        let expected = reference.list(counterpart);
        if !names.keys().eq(expected.keys()) {
            return Err(format!("directory {directory} has {names:?}, expected {expected:?}"));
        }
        for (inode, entry) in names.values().zip(expected.values()) {
            match entry {
                Entry::Directory(id) => directories.push((*inode, *id)),
                Entry::File(file) => {
                    let handle = meta.open(*inode).ok_or_else(|| format!("no file {inode}"))?;
                    for block in 0..BLOCKS {
                        let value = storage.block(*inode, Epoch::MAX, &handle.origins, block);
                        if let Some(why) = reference.refute((*file, block), value, now, now) {
                            return Err(format!("live file {inode}: {why}"));
                        }
                        let reads = reference.observed.entry((*file, block)).or_default();
                        reads.push(Observation { start: now, end: now, value });
                    }
                }
            }
        }
    }
    Ok(())
}

/// A value that was read does not come back after another one was written or read.
pub fn reads(reference: &Reference) -> Result<(), String> {
    for (block, reads) in &reference.observed {
        for read in reads.iter().filter(|read| read.value != 0) {
            let others = reads.iter().filter(|other| other.value != read.value);
            let others = others.map(|other| (other.start, other.end));
            let written = reference.writes.iter().filter_map(|(tag, it)| {
                let is_of_block = it.file == block.0 && (it.from..it.to).contains(&block.1);
                Some((it.start, it.end.filter(|_| is_of_block && *tag != read.value)?))
            });
            for (start, end) in others.chain(written).filter(|(start, _)| *start > read.end) {
                let back = |later: &&Observation| later.value == read.value && later.start > end;
                if let Some(later) = reads.iter().find(back) {
                    return Err(format!(
                        "{block:?}: {read:?}, then another value between {start} and {end}, and \
                         then {later:?}"
                    ));
                }
            }
        }
    }
    Ok(())
}
