//! Disks after a kill or a loss of power, built from the recorded operations.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::{MemoryDisk, Operation, SECTOR_BYTES, State, rename, sectors, write};

impl MemoryDisk {
    /// Records operations that make the current content, durably.
    pub fn record_content(&self) {
        let mut state = self.0.lock().unwrap();
        let mut operations = Vec::new();
        for (name, file) in &state.names {
            operations.push(Operation::Create(name.clone(), *file));
            let bytes = state.files[*file].clone();
            operations.push(Operation::Write { file: *file, offset: 0, bytes });
            operations.push(Operation::Sync(*file));
        }
        operations.push(Operation::SyncNames);
        state.operations = operations;
    }
}

/// Which unflushed operations are on the disk after a loss of power.
pub enum Luck<'a> {
    Nothing,
    Everything,
    /// Any subset of the writes, each possibly torn; any prefix of the name changes.
    Random(&'a mut ChaCha8Rng),
}

impl Luck<'_> {
    fn keeps(&mut self) -> bool {
        match self {
            Self::Nothing => false,
            Self::Everything => true,
            Self::Random(rng) => rng.random_bool(0.5),
        }
    }
}

/// The disk after the process was killed just before operation number `at`: no operation is lost,
/// and nothing more is durable than before.
pub fn after_kill(operations: &[Operation], at: usize) -> MemoryDisk {
    let disk = after_power_loss(operations, at, Luck::Everything);
    disk.0.lock().unwrap().operations = operations[..at.min(operations.len())].to_vec();
    disk
}

/// The disk after a loss of power just before operation number `at`.
pub fn after_power_loss(operations: &[Operation], at: usize, mut luck: Luck<'_>) -> MemoryDisk {
    let operations = &operations[..at.min(operations.len())];
    let mut synced = BTreeMap::new();
    for (index, operation) in operations.iter().enumerate() {
        if let Operation::Sync(file) = operation {
            synced.insert(*file, index);
        }
    }
    let any_synced = synced.values().max().copied();
    let names_synced =
        operations.iter().rposition(|op| matches!(op, Operation::SyncNames)).unwrap_or(0);
    let mut state = State::default();
    let mut names_end = false;
    for (index, operation) in operations.iter().enumerate() {
        let durable = |file: usize| synced.get(&file).is_some_and(|sync| index < *sync);
        match operation {
            Operation::Create(..) | Operation::Rename(..) | Operation::Remove(_) => {
                if let Operation::Create(_, file) = operation {
                    state.files.resize(state.files.len().max(file + 1), Vec::new());
                }
                names_end |= index > names_synced && !luck.keeps();
                if names_end {
                    continue;
                }
                match operation {
                    Operation::Create(name, file) => {
                        state.names.insert(name.clone(), *file);
                    }
                    Operation::Rename(from, to) => rename(&mut state.names, from, to),
                    Operation::Remove(name) => {
                        state.names.remove(name);
                    }
                    _ => {}
                }
            }
            Operation::Write { file, offset, bytes }
            | Operation::WriteToDevice { file, offset, bytes, .. } => {
                let in_place = matches!(operation, Operation::WriteToDevice { in_place: true, .. });
                let flushed = in_place && any_synced.is_some_and(|sync| index < sync);
                if durable(*file) || flushed {
                    write(&mut state.files[*file], *offset, bytes);
                    state.extents.write(*file, *offset, bytes.len() as u64);
                    continue;
                }
                for (sector, part) in bytes.chunks(SECTOR_BYTES).enumerate() {
                    if luck.keeps() {
                        let offset = offset + (sector * SECTOR_BYTES) as u64;
                        write(&mut state.files[*file], offset, part);
                        state.extents.write(*file, offset, part.len() as u64);
                    }
                }
            }
            Operation::Allocate { file, length } => {
                if durable(*file) || luck.keeps() {
                    let bytes = &mut state.files[*file];
                    let length = bytes.len().max(*length as usize);
                    bytes.resize(length, 0);
                }
            }
            Operation::Punch { file, offset, length } => {
                if durable(*file) || luck.keeps() {
                    let bytes = &mut state.files[*file];
                    let from = (*offset as usize).min(bytes.len());
                    let to = ((offset + length) as usize).min(bytes.len());
                    bytes[from..to].fill(0);
                    state.holes.extend(sectors(*file, from as u64, (to - from) as u64));
                    state.extents.reset(*file, from as u64, (to - from) as u64);
                }
            }
            Operation::Fill { file, offset, length } => {
                if durable(*file) || luck.keeps() {
                    for sector in sectors(*file, *offset, *length) {
                        state.holes.remove(&sector);
                    }
                    state.extents.reset(*file, *offset, *length);
                }
            }
            Operation::Zero(file) => {
                if durable(*file) || luck.keeps() {
                    state.files[*file].fill(0);
                    state.extents.reset(*file, 0, u64::MAX);
                }
            }
            Operation::Cut { file, length } => {
                if durable(*file) || luck.keeps() {
                    state.files[*file].truncate(*length as usize);
                    state.extents.reset(*file, *length, u64::MAX);
                }
            }
            Operation::Sync(_) | Operation::SyncNames => {}
        }
    }
    MemoryDisk(Arc::new(Mutex::new(state)))
}
