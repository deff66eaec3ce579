//! In-memory disk that records every operation, so that any state that a loss of power may leave
//! can be built from it; it can become full or fail on demand.

#![allow(clippy::unwrap_used, dead_code, unused_imports)]

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex};

use threefs_chunkstore::disk::{Disk, DiskFile};

mod crash;
mod extents;

pub use crash::{Luck, after_kill, after_power_loss};
use extents::Extents;

/// Writes may tear between sectors.
const SECTOR_BYTES: usize = 512;

#[derive(Clone, Debug)]
pub enum Operation {
    Create(String, usize),
    Write {
        file: usize,
        offset: u64,
        bytes: Vec<u8>,
    },
    /// A write to the device. `in_place`: all its sectors had been written and flushed since they
    /// were allocated, so that a flush of any file makes it durable.
    WriteToDevice {
        file: usize,
        offset: u64,
        bytes: Vec<u8>,
        in_place: bool,
    },
    Allocate {
        file: usize,
        length: u64,
    },
    Fill {
        file: usize,
        offset: u64,
        length: u64,
    },
    Punch {
        file: usize,
        offset: u64,
        length: u64,
    },
    Zero(usize),
    Cut {
        file: usize,
        length: u64,
    },
    Sync(usize),
    Rename(String, String),
    Remove(String),
    SyncNames,
}

#[derive(Default)]
pub struct State {
    names: BTreeMap<String, usize>,
    files: Vec<Vec<u8>>,
    /// Sectors of the files that are holes.
    holes: BTreeSet<(usize, u64)>,
    extents: Extents,
    pub operations: Vec<Operation>,
    /// File, offset and length of parts of the page cache that were dropped.
    pub dropped: Vec<(usize, u64, u64)>,
    /// Maximum total size of all files.
    pub quota: Option<u64>,
    /// The next flush fails.
    pub fail_sync: bool,
    /// The next flush of this file fails.
    pub fail_sync_of: Option<usize>,
    /// The next flush of names fails.
    pub fail_sync_names: bool,
    /// A flush concerns only its file.
    pub separate_flushes: bool,
    /// How often a flush lets other threads run before it returns: their writes meanwhile are not
    /// durable.
    pub flush_yields: usize,
}

#[derive(Clone, Default)]
pub struct MemoryDisk(pub Arc<Mutex<State>>);

pub struct MemoryFile {
    state: Arc<Mutex<State>>,
    file: usize,
}

impl State {
    pub fn used(&self) -> usize {
        let holes = self.holes.len() * SECTOR_BYTES;
        self.files.iter().map(Vec::len).sum::<usize>() - holes
    }

    fn check_quota(&self, file: usize, length: usize) -> io::Result<()> {
        self.check_grown(length.saturating_sub(self.files[file].len()))
    }

    fn check_grown(&self, added_bytes: usize) -> io::Result<()> {
        match self.quota {
            Some(quota) if added_bytes > 0 && (self.used() + added_bytes) as u64 > quota => {
                Err(io::ErrorKind::StorageFull.into())
            }
            _ => Ok(()),
        }
    }

    /// Allocates space for the holes of a range.
    fn fill(&mut self, file: usize, offset: u64, length: u64) -> io::Result<()> {
        let hole_sectors: Vec<_> =
            sectors(file, offset, length).filter(|sector| self.holes.contains(sector)).collect();
        self.check_grown(hole_sectors.len() * SECTOR_BYTES)?;
        for sector in hole_sectors {
            self.holes.remove(&sector);
        }
        Ok(())
    }

    fn write(&mut self, file: usize, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.check_quota(file, offset as usize + bytes.len())?;
        self.fill(file, offset, bytes.len() as u64)?;
        self.extents.write(file, offset, bytes.len() as u64);
        write(&mut self.files[file], offset, bytes);
        Ok(())
    }
}

impl DiskFile for MemoryFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let state = self.state.lock().unwrap();
        let bytes = &state.files[self.file];
        let from = (offset as usize).min(bytes.len());
        let to = (from + buffer.len()).min(bytes.len());
        buffer.fill(0);
        buffer[..to - from].copy_from_slice(&bytes[from..to]);
        Ok(())
    }

    fn read_ahead(&self, _offset: u64, _length: u64) {}

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        state.write(self.file, offset, bytes)?;
        state.operations.push(Operation::Write { file: self.file, offset, bytes: bytes.to_vec() });
        Ok(())
    }

    fn write_to_device(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        let file = self.file;
        let in_place = state.extents.is_initialized(file, offset, bytes.len() as u64);
        state.write(file, offset, bytes)?;
        let bytes = bytes.to_vec();
        state.operations.push(Operation::WriteToDevice { file, offset, bytes, in_place });
        Ok(())
    }

    fn start_writing(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_at(bytes, offset)
    }

    fn finish_writing(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_to_device(bytes, offset)
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        if std::mem::take(&mut state.fail_sync) {
            return Err(io::Error::other("injected failure"));
        }
        if state.fail_sync_of == Some(self.file) {
            state.fail_sync_of = None;
            return Err(io::Error::other("injected failure"));
        }
        state.operations.push(Operation::Sync(self.file));
        state.extents.sync(self.file);
        let yields = state.flush_yields;
        drop(state);
        (0..yields).for_each(|_| std::thread::yield_now());
        Ok(())
    }

    fn drop_cache_of(&self, offset: u64, length: u64) -> io::Result<()> {
        self.state.lock().unwrap().dropped.push((self.file, offset, length));
        Ok(())
    }

    fn drop_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn allocate(&self, length: u64) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        state.check_quota(self.file, length as usize)?;
        state.operations.push(Operation::Allocate { file: self.file, length });
        let file = &mut state.files[self.file];
        let length = file.len().max(length as usize);
        file.resize(length, 0);
        Ok(())
    }

    fn fill(&self, offset: u64, length: u64) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        assert!((offset + length) as usize <= state.files[self.file].len(), "beyond the end");
        state.fill(self.file, offset, length)?;
        state.operations.push(Operation::Fill { file: self.file, offset, length });
        state.extents.reset(self.file, offset, length);
        Ok(())
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        state.operations.push(Operation::Punch { file: self.file, offset, length });
        state.extents.reset(self.file, offset, length);
        state.holes.extend(sectors(self.file, offset, length));
        state.files[self.file][offset as usize..(offset + length) as usize].fill(0);
        Ok(())
    }

    fn has_holes(&self) -> io::Result<bool> {
        let state = self.state.lock().unwrap();
        Ok(state.holes.range((self.file, 0)..=(self.file, u64::MAX)).next().is_some())
    }

    fn zero(&self) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        state.operations.push(Operation::Zero(self.file));
        state.extents.reset(self.file, 0, u64::MAX);
        state.files[self.file].fill(0);
        Ok(())
    }

    fn cut(&self, length: u64) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        state.operations.push(Operation::Cut { file: self.file, length });
        state.extents.reset(self.file, length, u64::MAX);
        state.files[self.file].truncate(length as usize);
        let end = length / SECTOR_BYTES as u64;
        let file = self.file;
        state.holes.retain(|(of, sector)| *of != file || *sector < end);
        Ok(())
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.state.lock().unwrap().files[self.file].len() as u64)
    }
}

impl Disk for MemoryDisk {
    type File = MemoryFile;

    fn open(&self, name: &str) -> io::Result<MemoryFile> {
        let mut state = self.0.lock().unwrap();
        let file = match state.names.get(name) {
            Some(file) => *file,
            None => {
                let file = state.files.len();
                state.files.push(Vec::new());
                state.names.insert(name.to_owned(), file);
                state.operations.push(Operation::Create(name.to_owned(), file));
                file
            }
        };
        Ok(MemoryFile { state: Arc::clone(&self.0), file })
    }

    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.0.lock().unwrap().names.keys().cloned().collect())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        state.operations.push(Operation::Rename(from.to_owned(), to.to_owned()));
        rename(&mut state.names, from, to);
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        state.operations.push(Operation::Remove(name.to_owned()));
        state.names.remove(name);
        Ok(())
    }

    fn sync_names(&self) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        if std::mem::take(&mut state.fail_sync_names) {
            return Err(io::Error::other("injected failure of the folder flush"));
        }
        state.operations.push(Operation::SyncNames);
        Ok(())
    }

    fn shares_flushes(&self, _data: &MemoryFile, _log: &MemoryFile) -> bool {
        !self.0.lock().unwrap().separate_flushes
    }

    fn device(&self, _file: &MemoryFile) -> Option<u64> {
        Some(Arc::as_ptr(&self.0) as u64)
    }

    fn free_bytes(&self) -> io::Result<u64> {
        let state = self.0.lock().unwrap();
        Ok(state.quota.unwrap_or(1 << 30).saturating_sub(state.used() as u64))
    }
}

fn sectors(file: usize, offset: u64, length: u64) -> impl Iterator<Item = (usize, u64)> {
    let sector = SECTOR_BYTES as u64;
    (offset / sector..(offset + length) / sector).map(move |at| (file, at))
}

fn write(file: &mut Vec<u8>, offset: u64, bytes: &[u8]) {
    let (from, to) = (offset as usize, offset as usize + bytes.len());
    let length = file.len().max(to);
    file.resize(length, 0);
    file[from..to].copy_from_slice(bytes);
}

fn rename(names: &mut BTreeMap<String, usize>, from: &str, to: &str) {
    if let Some(file) = names.remove(from) {
        names.insert(to.to_owned(), file);
    }
}

/// The log of the store on a disk.
pub fn log_name(disk: &MemoryDisk) -> String {
    disk.list().unwrap().into_iter().find(|name| name.starts_with("log-")).unwrap()
}
